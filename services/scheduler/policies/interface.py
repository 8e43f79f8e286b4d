"""What a policy sees and what it answers. A policy is pure: no clock, no global random state, no I/O."""

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


class ClusterView(Struct, frozen=True):
    """`jobs` are in order of submission. `nodes` are what this decision may use, already less the slots
    that jobs under verification hold."""

    now_s: float
    nodes: tuple[Node, ...]
    jobs: tuple[JobView, ...]
    restart_penalty_s: float
    """What a resize costs a job that has not shown it."""


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


class Policy(Protocol):
    """`seed` differs from round to round and is the only source of randomness."""

    name: str

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision: ...
