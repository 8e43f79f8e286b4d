"""What a policy sees and what it answers. A policy is pure: no clock, no global random state, no I/O."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from common.types import Allocation, JobConfig, JobProfile, JobSpec, JobState, Node, Struct


class JobView(Struct, frozen=True):
    """An active job: waiting for slots, or holding some."""

    spec: JobSpec
    state: JobState
    submitted_s: float
    allocation: Allocation = ()
    config: JobConfig | None = None
    restarts: int = 0
    """Changes of its allocation so far, its first one not counted."""
    run_s: float = 0.0
    """Seconds with at least one slot."""
    attained_slot_s: float = 0.0
    profile: JobProfile | None = None


class Oracle(Protocol):
    """What only a simulator knows of its jobs."""

    def step_time_s(self, job_id: str, replicas: int) -> float:
        """True seconds of a step of the requested batch on so many replicas, packed on as few nodes as can
        be; its accumulation passes included."""
        ...

    def remaining_steps(self, job_id: str) -> float:
        """True steps of the requested batch that the job has still to do."""
        ...


class ClusterView(Struct, frozen=True):
    """`jobs` are in order of submission. `nodes` are what this decision may use, already less the slots
    that jobs under verification hold."""

    now_s: float
    nodes: tuple[Node, ...]
    jobs: tuple[JobView, ...]
    restart_penalty_s: float
    """What a resize costs a job that has not shown it."""
    oracle: Oracle | None = None
    """There in simulation only."""
    accumulates_alone: bool = False
    """Whether one replica above M0 has to accumulate: trainers that estimate gradient noise only from several
    passes of one step cannot train otherwise. Ours estimate it from successive steps."""


class Decision(Struct, frozen=True):
    """One entry a job of the view in `allocations` and `reasons`, and in `configs` where it gets slots.

    `memory` comes back at the next decision; msgpack must be able to carry it. `value` and `bound` are the
    objective that was reached and what no placement could exceed, where the policy has such numbers."""

    allocations: dict[str, Allocation]
    configs: dict[str, JobConfig]
    reasons: dict[str, str]
    memory: Any = None
    value: float | None = None
    bound: float | None = None


class Policy(ABC):
    """Base of every policy. `seed` differs from round to round and is the only source of randomness."""

    name: str
    needs_profiles: bool = True
    """Whether it looks at jobs' profiles. Where not, a simulator need not fit any models for it."""
    needs_oracle: bool = False
    """Whether it cannot do without `ClusterView.oracle`: it then runs in simulation only."""
    adapts_batch: bool = False
    """Whether it chooses batch sizes by goodput. Where not, jobs train with the batch that they asked for."""

    @abstractmethod
    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision: ...
