"""The nouns of the project, as frozen structs that every process shares.

Batch sizes count examples. `atomic_batch` is what one replica puts through one forward and backward
pass; a step of a job is `accumulation + 1` such passes on each of its replicas, so

    total batch size = replicas x atomic_batch x (accumulation + 1)        (Pollux, section 3.1)

Progress is counted in AdaScale steps: steps at the initial batch size M0 (DESIGN section 4).
"""

import enum
import math
import re
from functools import lru_cache
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_NAME_CHARS = 64
NAME_PATTERN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every shared struct: immutable, keyword-only, unknown fields refused."""


class ApplicationSpec(Struct, frozen=True):
    """What the scheduler must know of an application, without importing torch.

    The bounds are those within which progress to the target does not depend on the batch size.
    `metric_mode` says whether the target is reached from below ("max") or from above ("min").
    """

    name: str
    optimizer: Literal["sgd", "adam", "adamw"]
    metric: str
    metric_mode: Literal["max", "min"]
    target: float
    target_min: float
    target_max: float
    initial_batch_size: int
    """M0: the batch size at which the learning rate was tuned."""
    max_batch_size: int
    min_atomic_batch: int
    max_atomic_batch: int
    examples: int
    """Training examples, an epoch."""
    max_progress: float
    """Declared budget in AdaScale steps: a job that has spent it short of its target has failed."""
    evaluate_every: float
    """Progress between two evaluations on held-out data, in AdaScale steps."""
    settings: dict[str, float] = {}
    """Numbers that a job may override, such as the learning rate, with their defaults."""


class JobSpec(Struct, frozen=True):
    """A job as its user asked for it, complete: defaults of its application are already filled in."""

    id: str
    application: str
    seed: int
    target: float
    max_progress: float
    replicas: int
    """Requested replicas: what `fixed` gives."""
    batch_size: int
    """Requested total batch size: what `fixed` and `dynamic` train with."""
    min_batch_size: int
    """M0, and the lower bound of what a policy may choose."""
    max_batch_size: int
    min_atomic_batch: int
    max_atomic_batch: int
    max_replicas: int
    """Upper bound of what a policy may give."""
    settings: dict[str, float] = {}
    """Overrides of the application's own numbers, such as its learning rate."""


class JobState(enum.StrEnum):
    """The life cycle; the transitions stand in `common/job_states.py`."""

    PENDING = "pending"
    """Waits for slots; has state on disk if it has been preempted."""
    STARTING = "starting"
    """Has slots; no step of its present allocation reported yet."""
    RUNNING = "running"
    PREEMPTING = "preempting"
    """Told to save and leave: its slots are given to others, who start when its replicas have gone."""
    VERIFYING = "verifying"
    """Reported its target reached; an independent process checks the claim."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


class Node(Struct, frozen=True):
    """A machine, or a part of one, that one job-agent looks after."""

    name: Annotated[str, Meta(pattern=rf"^(?:{NAME_PATTERN.pattern})\Z", max_length=MAX_NAME_CHARS)]
    slots: Annotated[int, Meta(ge=0, le=4096)]
    slot_speed: Annotated[float, Meta(gt=0, le=1)]
    """Fraction of a core that one slot is worth."""
    store_host: str = "127.0.0.1"
    store_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Where this node's TCPStore listens; groups whose first node this is meet there."""


class Placement(Struct, frozen=True, order=True):
    """Replicas on one node."""

    node: str
    replicas: int


Allocation = tuple[Placement, ...]
"""Where a job runs, in rank order of nodes; empty: it has no slots."""


def replicas_of(allocation: Allocation) -> int:
    return sum(p.replicas for p in allocation)


class JobConfig(Struct, frozen=True):
    """The batch of every replica: `accumulation + 1` passes of `atomic_batch` examples a step."""

    atomic_batch: int
    accumulation: int = 0

    def total_batch(self, replicas: int) -> int:
        return replicas * self.atomic_batch * (self.accumulation + 1)


def batch_config(total: int, replicas: int, spec: JobSpec) -> JobConfig:
    """Split a total batch size over `replicas` within the bounds of `spec`: in as few passes as
    `max_atomic_batch` allows, and as near to `total` as whole examples a pass do, from above where that is
    allowed. Raises ValueError where no split is within the bounds."""
    totals = spec.min_batch_size, spec.max_batch_size
    return split_batch(total, replicas, totals, (spec.min_atomic_batch, spec.max_atomic_batch))


@lru_cache(maxsize=10_000)
def split_batch(total: int, replicas: int, totals: tuple[int, int], atomics: tuple[int, int]) -> JobConfig:
    """`batch_config` with the bounds as pairs, lower and upper, of the total batch and of a pass."""
    fewest = max(math.ceil(total / (replicas * atomics[1])), 1)
    most = totals[1] // (replicas * atomics[0])
    for passes in (*range(fewest, most + 1), *range(min(fewest - 1, most), 0, -1)):
        parts = replicas * passes
        smallest = max(math.ceil(totals[0] / parts), atomics[0])
        largest = min(totals[1] // parts, atomics[1])
        if smallest <= largest:
            atomic = min(max(math.ceil(total / parts), smallest), largest)
            return JobConfig(atomic_batch=atomic, accumulation=passes - 1)
    raise ValueError(
        f"{replicas} replicas cannot share a batch of {total} with {atomics[0]} to {atomics[1]} examples a "
        f"pass and a total of {totals[0]} to {totals[1]}"
    )


def can_share(replicas: int, spec: JobSpec) -> bool:
    """Whether so many replicas have any batch within the bounds of `spec`."""
    try:
        batch_config(spec.batch_size, replicas, spec)
    except ValueError:
        return False
    return True


class GradientStatistics(Struct, frozen=True):
    """Debiased running estimates at batch size M0 (AdaScale; DESIGN section 4).

    `sqr` estimates the squared norm of the true gradient, `var` the trace of the covariance of a
    gradient at batch size M0. `trusted` is false until enough finite, positive estimates were seen.
    """

    sqr: float
    var: float
    trusted: bool = True


class ThroughputParameters(Struct, frozen=True):
    """Pollux section 3.2: T_accum = alpha_c + beta_c x atomic; sync with (alpha_n, beta_n) across
    nodes and (alpha_r, beta_r) within one; gamma blends compute and sync. Seconds.

    The paper has no `update_s`: what every step costs beside its passes and its synchronisation, however
    many replicas and passes it has."""

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float
    update_s: float = 0.0


class ProfilePoint(Struct, frozen=True):
    """Medians of what was measured in one configuration; the steps after a change are left out."""

    nodes: int
    replicas: int
    atomic_batch: int
    accumulation_s: float
    """Seconds of one forward and backward pass that only accumulates."""
    step_s: float
    """Seconds of the last pass of a step, its synchronisation and its update included."""
    samples: int


class JobProfile(Struct, frozen=True):
    """What the metrics-collector knows of a job; `parameters` is None before the first fit."""

    job_id: str
    points: tuple[ProfilePoint, ...] = ()
    parameters: ThroughputParameters | None = None
    statistics: GradientStatistics | None = None
    progress: float = 0.0
    max_profiled_replicas: int = 0
    restart_s: float = 0.0
    """Median seconds that the job's resizes have cost it."""
    application_replicas: int = 0
    """The most replicas that a job of its application was profiled with; 0: nothing is remembered."""
    needed_progress: float = 0.0
    """What jobs of its application needed for its target, in AdaScale steps; 0: nobody can tell."""

    @property
    def explored_replicas(self) -> int:
        """How many replicas may be tried: twice as many as the job has been profiled with, and four times
        as many as any job of its application, for what is remembered is believed further."""
        return max(2 * self.max_profiled_replicas, 4 * self.application_replicas)
