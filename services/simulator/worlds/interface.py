"""What the simulator asks of a world: the jobs' side of the cluster, in virtual time."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.protocol import Event, Fact, Orders
from common.types import ApplicationSpec, JobProfile, JobSpec
from services.scheduler.policies.interface import Oracle

COLLECTOR = "collector"


@dataclass(frozen=True)
class Happening:
    """Something that happens at `t_s`: a fact goes to the scheduler's core, an event to the log.

    `source` is the name of the node whose agent tells it, or COLLECTOR."""

    t_s: float
    source: str
    what: Fact | Event


class World(Protocol):
    """A world is deterministic. Its clock starts at 0 and is set by `apply` and `advance`."""

    @property
    def applications(self) -> Mapping[str, ApplicationSpec]:
        """By name."""
        ...

    @property
    def oracle(self) -> Oracle | None: ...

    event_driven: bool
    """Whether arrivals and finishes start a round at once, as they do live, or wait for the next one."""
    accumulates_alone: bool
    """Whether one replica above M0 has to accumulate."""
    restart_s: float
    """What a resize costs a job, before it has shown it."""

    def kind(self, spec: JobSpec) -> Hashable:
        """Equal for jobs that would run alike, alone and with batches that adapt."""
        ...

    def fixed_s(self, spec: JobSpec) -> float:
        """Seconds of a job's life, alone, in which it does not train: on less than a slot they would be as
        many. 0 where a world counts them to the training."""
        ...

    def complete(self, spec: JobSpec) -> JobSpec:
        """A job of a workload file, with the bounds that this world sets to it."""
        ...

    def apply(self, orders: Orders, now_s: float) -> Sequence[Happening]:
        """Take new orders, and say what happens in answer to them, now or later."""
        ...

    def advance(self, until_s: float) -> tuple[float, Sequence[Happening]]:
        """Let jobs run on to `until_s`. Returns how far they came, and what happened up to then, by time.

        An event-driven world stops at the first moment at which something happens that a round may follow."""
        ...

    def profiles(self, job_ids: Sequence[str]) -> tuple[JobProfile, ...]:
        """What is known by measuring, of those of the jobs of which anything is."""
        ...
