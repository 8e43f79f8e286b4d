"""The things that every process talks about, as frozen structs: jobs, nodes, allocations, profiles.

Batch sizes are in examples. The atomic batch size is the number of examples in one forward and backward pass
of one replica. A step of a job is `accumulation + 1` such passes on each of its replicas, so

    total batch size = replicas x atomic_batch x (accumulation + 1)        (Pollux, section 3.1)

Progress is in AdaScale steps: steps at the initial batch size M0 (DESIGN section 4).
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
    """What the scheduler needs to know about an application. It can be read without importing torch.

    Within the bounds on the batch size, the progress that a job needs does not depend on its batch size.
    """

    name: str
    optimizer: Literal["sgd", "adam", "adamw"]
    metric: str
    """What the target is about, for people."""
    metric_mode: Literal["max", "min"]
    """Whether the metric grows ("max") or falls ("min") towards the target."""
    target: float
    """Target of jobs that name none."""
    target_min: float
    target_max: float
    """Targets that jobs may have."""
    initial_batch_size: int
    """M0: the total batch size at which the learning rate was tuned."""
    max_batch_size: int
    """Largest total batch size."""
    min_atomic_batch: int
    max_atomic_batch: int
    examples: int
    """Training examples in an epoch."""
    max_progress: float
    """Budget, in AdaScale steps: a job that spends it without reaching its target has failed."""
    evaluate_every: float
    """Progress between two evaluations on held-out data, in AdaScale steps."""
    settings: dict[str, float] = {}
    """Numbers that a job may override, such as the learning rate, and their defaults."""


class JobSpec(Struct, frozen=True):
    """A job as its user requested it, with the defaults of its application filled in."""

    id: str
    application: str
    seed: int
    target: float
    max_progress: float
    replicas: int
    """Requested replicas. The policy `fixed` gives exactly these."""
    batch_size: int
    """Requested total batch size. The policies `fixed` and `dynamic` train with it."""
    min_batch_size: int
    """M0, and the smallest total batch size that a policy may choose."""
    max_batch_size: int
    """The largest total batch size that a policy may choose."""
    min_atomic_batch: int
    max_atomic_batch: int
    max_replicas: int
    """The most replicas that a policy may give."""
    settings: dict[str, float] = {}
    """Overrides of the application's settings, such as its learning rate."""


class JobState(enum.StrEnum):
    """The states in the life of a job. `common/job_states.py` has the transitions."""

    PENDING = "pending"
    """It waits for slots. If it was preempted, its state is on disk."""
    STARTING = "starting"
    """It has slots, but has not yet completed a step on them."""
    RUNNING = "running"
    PREEMPTING = "preempting"
    """It has been ordered to save and leave. Its slots belong to other jobs, which start when it has left."""
    VERIFYING = "verifying"
    """It has reported that its target is reached, and an independent process checks that."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


class Node(Struct, frozen=True):
    """A machine, or a part of one, that one job agent manages."""

    name: Annotated[str, Meta(pattern=rf"^(?:{NAME_PATTERN.pattern})\Z", max_length=MAX_NAME_CHARS)]
    slots: Annotated[int, Meta(ge=0, le=4096)]
    slot_speed: Annotated[float, Meta(gt=0, le=1)]
    """Fraction of a core that one slot is worth."""
    store_host: str = "127.0.0.1"
    store_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Where this node's TCPStore listens. Process groups whose first node this is meet there."""


class Placement(Struct, frozen=True, order=True):
    """A number of replicas on one node."""

    node: str
    replicas: int


Allocation = tuple[Placement, ...]
"""Where a job runs, its nodes in order of rank. Empty: the job has no slots."""


def replicas_of(allocation: Allocation) -> int:
    """Replicas on all nodes."""
    return sum(p.replicas for p in allocation)


class JobConfig(Struct, frozen=True):
    """How each replica makes a step: `accumulation + 1` passes of `atomic_batch` examples."""

    atomic_batch: int
    accumulation: int = 0

    def total_batch(self, replicas: int) -> int:
        return replicas * self.atomic_batch * (self.accumulation + 1)


def batch_config(total: int, replicas: int, spec: JobSpec) -> JobConfig:
    """Split a total batch size over `replicas`, within the bounds of `spec`.

    The split has as few passes as `max_atomic_batch` allows. Its total is rounded up to equal passes, or down
    if the bounds do not allow rounding up. Raises ValueError if no split is within the bounds.
    """
    totals = spec.min_batch_size, spec.max_batch_size
    return split_batch(total, replicas, totals, (spec.min_atomic_batch, spec.max_atomic_batch))


@lru_cache(maxsize=10_000)
def split_batch(total: int, replicas: int, totals: tuple[int, int], atomics: tuple[int, int]) -> JobConfig:
    """`batch_config` with the bounds as pairs (lowest, highest) of the total batch and of the atomic
    batch."""
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
    """Whether this many replicas can share any batch within the bounds of `spec`."""
    try:
        batch_config(spec.batch_size, replicas, spec)
    except ValueError:
        return False
    return True


class GradientStatistics(Struct, frozen=True):
    """Unbiased running estimates about the gradient of a batch of M0 examples (AdaScale; DESIGN section
    4)."""

    sqr: float
    """Squared norm of the true gradient."""
    var: float
    """Trace of the covariance of the gradient of M0 examples."""
    trusted: bool = True
    """False until there are enough finite, positive estimates. Untrusted ones never raise a batch size."""


class ThroughputParameters(Struct, frozen=True):
    """The throughput model of Pollux, section 3.2. Times are seconds; `common/goodput/model.py` has the
    formulas.

    A pass takes alpha_c + beta_c x atomic batch. Synchronising takes alpha + beta x (replicas - 2).
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    """alpha and beta across nodes."""
    beta_n: float
    alpha_r: float
    """alpha and beta within one node."""
    beta_r: float
    gamma: float
    """How much computing and synchronising overlap: 1 not at all, 10 almost completely."""
    update_s: float = 0.0
    """What every step costs in addition, whatever its replicas and passes. The paper does not have it."""


class ProfilePoint(Struct, frozen=True):
    """Medians measured in one configuration, without the steps right after a change."""

    nodes: int
    replicas: int
    atomic_batch: int
    accumulation_s: float
    """A forward and backward pass that only accumulates gradients."""
    step_s: float
    """The last pass of a step, its synchronisation and its update included."""
    samples: int
    """Samples that the medians are made of."""


class JobProfile(Struct, frozen=True):
    """What the metrics collector knows about a job."""

    job_id: str
    points: tuple[ProfilePoint, ...] = ()
    parameters: ThroughputParameters | None = None
    """None before the first fit."""
    statistics: GradientStatistics | None = None
    progress: float = 0.0
    max_profiled_replicas: int = 0
    """The most replicas that the job has been measured with."""
    restart_s: float = 0.0
    """Median time that a resize has cost the job."""
    application_replicas: int = 0
    """The most replicas that any remembered job of its application was measured with; 0: none is
    remembered."""
    needed_progress: float = 0.0
    """Progress that remembered jobs of its application needed for its target; 0: unknown."""

    @property
    def explored_replicas(self) -> int:
        """How many replicas a policy may try: twice as many as the job has been measured with, or four times
        as many as any remembered job of its application. A memory of whole jobs is the better evidence."""
        return max(2 * self.max_profiled_replicas, 4 * self.application_replicas)
