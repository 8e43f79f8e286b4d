"""coadapt: short completion times and fairness together, with the exact search of `pollux`.

Every round maximises

    sum of w_j ln(f_j x speedup_j + 1e-3)

over divisions and placements. As in `pollux`, a speedup is the goodput over that of a fair share
F = ceil(slots / jobs). The logarithm (proportional fairness) keeps every job near its share. The weights
favour jobs that will finish soon:

*Weights* are the shares of heSRPT. They minimise the mean completion time if every job's speed grows as the
power a of its share (Berg, Vesilo and Harchol-Balter 2020, "heSRPT: Parallel scheduling to minimize mean
slowdown"). With k_j the number of jobs that have at least as much work left as job j,

    w_j = k_j^(1 / (1 - a)) - (k_j - 1)^(1 / (1 - a)),

scaled to mean 1. Work is measured in seconds on one slot: progress left x M0 / goodput of one slot. A job
that holds no slots also has the cost of a restart ahead of it. A job without a model is assumed to be as long
in total as the median of the others. It has at least the mean weight, 1: it may be short, and only running it
shows that.

*Late jobs.* With these weights alone the largest jobs would starve while smaller ones keep coming. Each job's
lag behind a fair share is therefore kept from round to round: it grows by (1 - goodput / goodput of F) x the
seconds between rounds. The projected finish-time fairness of a job, assuming a fair share from now on, is its
total time over that time minus the lag. Above LATE the job's weight has a floor. At TOO_LATE the floor is the
mean weight, 1, and the job gets no later.

*The exponent* a is the mean slope of ln goodput over ln replicas around the fair share, over the jobs that
can use several slots, plus `delta`. A lower value shortens the makespan, a higher one the mean completion
time.

*Restarts.* A job that keeps its placement, or has never run, loses nothing: f = 1. Otherwise the cost of a
restart, r seconds, is spread over the time in which it can pay off: f = 1 - r / min(time left at a fair
share, 240 s).

*Work left* is what the job declares, never what only a simulator knows: the progress that jobs of its
application needed for its target if that is remembered, else the job's budget. A job that exceeds what it
declared is assumed to have as much progress left as it has made. A job that declares too little therefore
counts as small only until it exceeds that, and as large afterwards.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import structs

from common.goodput.model import BatchBounds, FloatArray, IntArray, best_batch
from common.types import GradientStatistics, ThroughputParameters
from services.scheduler.policies.interface import ClusterView, Decision, JobView, Policy
from services.scheduler.policies.pollux import GoodputPolicy, JobModel, restart_s

DELTA = -0.05
UNKNOWN_EXPONENT = 0.5
"""If no job with a model can use several slots."""
MIN_EXPONENT, MAX_EXPONENT = 0.05, 0.85
MIN_SLOPE, MAX_SLOPE = 0.02, 0.9
LATE, TOO_LATE = 1.28, 1.4
"""The weight has a floor above the lateness LATE; at TOO_LATE the floor is the mean weight."""
FORGET_S = 60.0
"""A job that is not in the view for this long has ended; one that is saving comes back sooner."""
Lags: TypeAlias = dict[str, tuple[float, float]]
"""The memory from round to round, by job: (lag_s, updated_s). `lag_s` is how far the job is behind a fair
share since its first round, in seconds (negative: ahead); `updated_s` is when that was computed."""
RESTART_HORIZON_S = 240.0
"""How long a placement will last is unknown, so a restart has to pay off within this time."""


class CoadaptPolicy(Policy):
    """`delta` trades mean completion time against makespan."""

    name = "coadapt"
    adapts_batch = True

    def __init__(self, delta: float = DELTA) -> None:
        """Raises ValueError for a `delta` outside -1 to 1; the exponent is between 0 and 1."""
        if not -1 <= delta <= 1:
            raise ValueError(f"delta {delta}: allowed: -1 to 1")
        self.delta = delta

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """`seed` is not used."""
        previous = msgspec.convert(memory or {}, Lags)
        this_round = CoadaptRound(self.delta, previous)
        decision = this_round.decide(view, None, seed)
        reasons = {
            job.spec.id: f"{decision.reasons[job.spec.id]}; {describe_work(job)}"
            + describe_lateness(this_round.lateness.get(job.spec.id, 1.0))
            for job in view.jobs
        }
        recent = {job_id: lag for job_id, lag in previous.items() if view.now_s - lag[1] <= FORGET_S}
        lags = {job_id: (lag_s, view.now_s) for job_id, lag_s in this_round.lags_s.items()}
        return structs.replace(decision, reasons=reasons, memory=recent | lags)


class CoadaptRound(GoodputPolicy):
    """One decision: the search of `pollux` with the objective of coadapt."""

    def __init__(self, delta: float, previous: Lags) -> None:
        super().__init__(CoadaptPolicy.name, power=0.0)
        self.delta = delta
        self.previous = previous
        self.lags_s: dict[str, float] = {}
        self.lateness: dict[str, float] = {}

    def weights(self, jobs: Sequence[JobModel], view: ClusterView) -> FloatArray:
        self.lags_s = self._updated_lags_s(jobs, view)
        known = [job for job in jobs if job.fair_rate > 0]
        if not known:
            return np.ones(len(jobs))
        restarts_s = np.array([0.0 if job.present else restart_s(job.view, view) for job in jobs])
        left_s = restarts_s + estimate_all(jobs, work_left_s)
        weights = hesrpt_weights(left_s, exponent(known, view, self.delta))
        for job, fair_left_s in zip(jobs, estimate_all(jobs, fair_time_left_s).tolist(), strict=True):
            job_id = job.view.spec.id
            age_s = max(view.now_s - job.view.submitted_s, 0.0)
            self.lateness[job_id] = lateness(age_s + fair_left_s, self.lags_s[job_id])
        late = np.array([self.lateness[job.view.spec.id] for job in jobs])
        floors = np.clip((late - LATE) / (TOO_LATE - LATE), 0.0, 1.0)
        unknown = np.array([job.fair_rate <= 0 for job in jobs])
        return np.asarray(np.maximum(weights, np.maximum(floors, unknown)))

    def _updated_lags_s(self, jobs: Sequence[JobModel], view: ClusterView) -> dict[str, float]:
        slots, nodes = view.slots, max(len(view.nodes), 1)
        lags_s = {}
        for job in jobs:
            job_id = job.view.spec.id
            lag_s, updated_s = self.previous.get(job_id, (0.0, view.now_s))
            of_fair_share = job.present_speedup * slots / nodes
            lags_s[job_id] = float(lag_s + (view.now_s - updated_s) * (1.0 - of_fair_share))
        return lags_s

    def factor(self, job: JobModel, view: ClusterView) -> float:
        if job.view.run_s == 0:
            return 1.0
        cost_s = restart_s(job.view, view)
        horizon_s = RESTART_HORIZON_S
        if job.fair_rate > 0:
            horizon_s = min(fair_time_left_s(job), horizon_s)
        return 1.0 - cost_s / max(horizon_s, cost_s + 1.0)


def lateness(total_s: float, lag_s: float) -> float:
    """Projected finish-time fairness of a job that takes `total_s` from submission to completion, with a fair
    share from now on: `total_s` over the time it would take with a fair share from the start."""
    return total_s / (total_s - lag_s) if lag_s < total_s else math.inf


def hesrpt_weights(left: FloatArray, a: float) -> FloatArray:
    """heSRPT's shares, [jobs], scaled to mean 1. left: [jobs], the work left. Equal work, equal weight."""
    at_least = ranks(left)
    power = 1.0 / (1.0 - a)
    # Divided by the number of jobs, so that no power overflows.
    shares = (at_least / len(left)) ** power - ((at_least - 1) / len(left)) ** power
    return np.asarray(shares / shares.mean())


def ranks(left: FloatArray) -> IntArray:
    """k, [jobs]: how many jobs have at least as much work left as each job, itself included."""
    return np.asarray(len(left) - np.searchsorted(np.sort(left), left, side="left"))


def exponent(jobs: Sequence[JobModel], view: ClusterView, delta: float) -> float:
    """The exponent a. `jobs` are those with a model."""
    fair = math.ceil(view.slots / len(view.jobs))
    few, many = max(fair // 2, 1), min(2 * fair, view.slots)
    largest_node = max((node.slots for node in view.nodes), default=0)
    slopes = [
        _slope(job.bounds, job.parameters, job.statistics, few, many, largest_node)
        for job in jobs
        if job.parameters and min(job.view.spec.max_replicas, job.bounds.max_replicas) > 1
    ]
    if not slopes:
        return UNKNOWN_EXPONENT
    return min(max(delta + sum(slopes) / len(slopes), MIN_EXPONENT), MAX_EXPONENT)


@lru_cache(maxsize=8192)
def _slope(
    bounds: BatchBounds,
    parameters: ThroughputParameters,
    statistics: GradientStatistics | None,
    few: int,
    many: int,
    largest_node: int,
) -> float:
    """The slope of ln goodput over ln replicas between `few` and `many` replicas. Each count of replicas is
    on as few nodes as it needs and at least as good as any smaller one."""
    if many <= few:
        return MAX_SLOPE
    counts = np.arange(1, many + 1)
    rates = best_batch(bounds, parameters, statistics, np.where(counts > largest_node, 2, 1), counts).goodput
    best = np.maximum.accumulate(rates)
    if best[few - 1] <= 0:
        return MAX_SLOPE
    slope = math.log(best[many - 1] / best[few - 1]) / math.log(many / few)
    return min(max(slope, MIN_SLOPE), MAX_SLOPE)


def work_left_s(job: JobModel) -> float:
    """Seconds that the work left takes on one slot. If one replica alone has no valid batch: slot-seconds
    with the fewest replicas that have one."""
    on_one_node = job.rates[0]
    fewest = int(np.argmax(on_one_node > 0))
    rate = float(on_one_node[fewest]) / fewest if fewest else job.fair_rate
    return progress_left(job.view) * job.bounds.initial / rate


def estimate_all(jobs: Sequence[JobModel], left_s: Callable[[JobModel], float]) -> FloatArray:
    """[jobs]: `left_s` of each job. A job without a model gets the median of the other jobs' values scaled
    from the work they have left to all their work. At least one job has a model."""
    known = {j: left_s(job) for j, job in enumerate(jobs) if job.fair_rate > 0}
    views = {j: jobs[j].view for j in known}
    usual = np.median([s / progress_left(views[j]) * declared_progress(views[j]) for j, s in known.items()])
    return np.array([known.get(j, usual) for j in range(len(jobs))])


def fair_time_left_s(job: JobModel) -> float:
    """Seconds that the work left takes with a fair share."""
    return progress_left(job.view) * job.bounds.initial / job.fair_rate


def declared_progress(job: JobView) -> float:
    """Total progress in AdaScale steps: what jobs of its application needed for its target, else its
    budget."""
    needed = job.profile.needed_progress if job.profile else 0.0
    return min(needed, job.spec.max_progress) if needed > 0 else job.spec.max_progress


def progress_left(job: JobView) -> float:
    """The declared progress minus the progress made. Once that is used up: as much as the job has made,
    within its budget."""
    made = job.profile.progress if job.profile else 0.0
    left, budget_left = declared_progress(job) - made, job.spec.max_progress - made
    if left > 0:
        return left
    return min(made, budget_left) if budget_left > 0 else made


def describe_work(job: JobView) -> str:
    left, total = progress_left(job), declared_progress(job)
    if job.profile and job.profile.progress >= total:
        return f"exceeded the expected {total:.0f} steps, assumed to be half done"
    if job.profile and job.profile.needed_progress > 0:
        return f"{left:.0f} steps left, judging by earlier jobs of its application"
    return f"{left:.0f} steps left in its budget; how many its target needs is unknown"


def describe_lateness(late: float) -> str:
    return f"; late: {late:.2f}x its time with a fair share" if late > LATE else ""
