"""What the simulator asks of a world: the jobs' side of the cluster, in virtual time."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.protocol import Event, Fact, Orders
from common.types import ApplicationSpec, JobProfile, JobSpec
from services.scheduler.policies.interface import Oracle

COLLECTOR = "collector"


@dataclass(frozen=True)
class WorldEvent:
    """Something that happens at `t_s`. A fact goes to the scheduler's core, an event goes to the log.

    `source` is the name of the node whose agent reports it, or COLLECTOR."""

    t_s: float
    source: str
    content: Fact | Event


class World(Protocol):
    """A world is deterministic. Its clock starts at 0; `apply` and `advance` move it."""

    @property
    def applications(self) -> Mapping[str, ApplicationSpec]:
        """By name."""
        ...

    @property
    def oracle(self) -> Oracle | None: ...

    event_driven: bool
    """Whether arrivals and finishes start a round at once, as they do live, or wait for the next interval."""
    accumulates_alone: bool
    """Whether a single replica above M0 must accumulate gradients."""
    restart_s: float
    """Assumed cost of a resize until the job has been resized once."""

    def isolation_key(self, spec: JobSpec) -> Hashable:
        """Jobs with equal keys take the same time alone in the cluster with adaptive batch sizes."""
        ...

    def overhead_s(self, spec: JobSpec) -> float:
        """Seconds from a job's start to its end, alone, in which it does not train. A smaller share of the
        cluster does not lengthen them. 0 in a world that counts them as training."""
        ...

    def add_job(self, spec: JobSpec) -> JobSpec:
        """Make a job known to this world. Returns its specification within the bounds of this world."""
        ...

    def apply(self, orders: Orders, now_s: float) -> Sequence[WorldEvent]:
        """Take new orders. Returns what happens in response, now or later."""
        ...

    def advance(self, until_s: float) -> tuple[float, Sequence[WorldEvent]]:
        """Let jobs run until `until_s`. Returns the time reached and what happened, in order of time.

        An event-driven world stops early at the first event that may start a round."""
        ...

    def profiles(self, job_ids: Sequence[str]) -> tuple[JobProfile, ...]:
        """What measurements have shown so far; jobs without any are left out."""
        ...
