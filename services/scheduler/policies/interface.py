"""What a policy sees and what it returns. A policy is pure: no clock, no global random state, no I/O."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from common.types import Allocation, JobConfig, JobProfile, JobSpec, JobState, Node, Struct


class JobView(Struct, frozen=True):
    """An active job: it waits for slots or holds some."""

    spec: JobSpec
    state: JobState
    submitted_s: float
    allocation: Allocation = ()
    config: JobConfig | None = None
    restarts: int = 0
    """How often its allocation has changed, not counting the first one."""
    run_s: float = 0.0
    """Seconds with at least one slot."""
    attained_slot_s: float = 0.0
    profile: JobProfile | None = None


class Oracle(Protocol):
    """What only a simulator knows about its jobs."""

    def step_time_s(self, job_id: str, replicas: int) -> float:
        """True seconds of one step of the requested batch, accumulation included, with the replicas packed
        on as few nodes as possible."""
        ...

    def remaining_steps(self, job_id: str) -> float:
        """True number of steps of the requested batch that the job still needs."""
        ...


class ClusterView(Struct, frozen=True):
    """The cluster at one moment. `jobs` are in order of submission. The slots in `nodes` are those that this
    decision may use: slots held by jobs under verification are already taken off."""

    now_s: float
    nodes: tuple[Node, ...]
    jobs: tuple[JobView, ...]
    restart_penalty_s: float
    """Assumed cost of a resize for a job whose own cost was not measured yet."""
    oracle: Oracle | None = None
    """Set in simulation only."""
    accumulates_alone: bool = False
    """Whether one replica with a batch above M0 has to accumulate. True for trainers that estimate gradient
    noise only from several passes of one step. Ours estimate it from successive steps."""

    @property
    def slots(self) -> int:
        """Slots of all nodes."""
        return sum(node.slots for node in self.nodes)


class Decision(Struct, frozen=True):
    """`allocations` and `reasons` have one entry for each job of the view, `configs` one for each job that
    gets slots.

    `memory` is passed to the next decision and must survive msgpack. `value` is the objective that was
    reached and `bound` a value that no placement can exceed, for policies that have such numbers."""

    allocations: dict[str, Allocation]
    configs: dict[str, JobConfig]
    reasons: dict[str, str]
    memory: Any = None
    value: float | None = None
    bound: float | None = None


class Policy(ABC):
    """Base class of every policy."""

    name: str
    needs_profiles: bool = True
    """Whether it reads the jobs' profiles. If not, a simulator does not have to fit models for it."""
    needs_oracle: bool = False
    """Whether it needs `ClusterView.oracle`. Such a policy runs in simulation only."""
    adapts_batch: bool = False
    """Whether it chooses batch sizes by goodput. If not, jobs train with the batch they requested."""

    @abstractmethod
    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """`memory` is that of the previous decision, None in the first round. `seed` differs from round to
        round and is the only source of randomness."""
