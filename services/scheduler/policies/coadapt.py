"""coadapt: short completion times and fairness together, by the exact search of `pollux`.

Every round maximises

    sum of w_j ln(f_j x speedup_j + 1e-3)

over divisions and placements, where a speedup is goodput over that of a fair share F = ceil(slots / jobs), as
in `pollux`. The logarithm (proportional fairness) keeps every job near its share; the weights tilt it towards
jobs that will be done soon:

*Weights* are the shares of heSRPT, which minimise the mean completion time when every job's speed grows as
the power a of its share (Berg, Vesilo and Harchol-Balter 2020, "heSRPT: Parallel scheduling to minimize mean
slowdown"): with k_j the number of jobs that have at least as much work left as job j,

    w_j = k_j^(1 / (1 - a)) - (k_j - 1)^(1 / (1 - a)),

scaled to mean 1. Work is in seconds on one slot: progress still to make x M0 / goodput of one slot, and what
a restart costs a job that holds no slots, for it has that before it. A job that has no model yet is taken to
be as long as the median of the others, from their beginning, and has at least the mean weight, 1: it may be
short, and only running it shows that.

*Late jobs.* These weights let the largest jobs starve while smaller ones keep coming. So every job's lag
behind a fair share is kept from round to round: it grows by (1 - goodput / goodput of F) x the seconds
between rounds. A job's finish-time fairness, as it would come out with a fair share from now on, is its
whole time over that time less the lag. Beyond LATE its weight has a floor, which at TOO_LATE is the mean
weight, 1: then it becomes no later.

*The exponent* a is the mean, over the jobs that can use several slots, of the slope of ln goodput over ln
replicas around the fair share, plus `delta`: the lower, the shorter the makespan; the higher, the shorter the
mean completion time.

*Restarts.* A job that keeps its placement, or has never run, loses nothing: f = 1. Otherwise the r seconds
that a restart costs count over the time in which they can pay: f = 1 - r / min(time left at a fair share,
240 s).

*Work left* is what the job declares, never what only a simulator knows: the progress that jobs of its
application needed for its target, where that is remembered, else its budget. A job that makes more than it
declared is taken to have as much again before it as behind it. A job that declares less than it needs
therefore counts for small only until then, and for large afterwards.
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
from services.scheduler.policies.pollux import GoodputPolicy, JobModel

DELTA = -0.05
UNKNOWN_EXPONENT = 0.5
"""Where no job with a model can use several slots."""
MIN_EXPONENT, MAX_EXPONENT = 0.05, 0.85
MIN_SLOPE, MAX_SLOPE = 0.02, 0.9
LATE, TOO_LATE = 1.28, 1.4
"""Lateness from which a job's weight has a floor, and at which that is the mean weight."""
FORGET_S = 60.0
"""A job that is away for so long, other than to save what it has, has ended."""
Lags: TypeAlias = dict[str, tuple[float, float]]
"""The memory from round to round, by job: the seconds by which it is behind the one that would have had its
fair share ever since its first round (negative: ahead of it), and when that was found."""
RESTART_HORIZON_S = 240.0
"""Nobody knows how long a placement will last, so a restart has to pay within so long."""


class CoadaptPolicy(Policy):
    """`delta` trades mean completion time against makespan."""

    name = "coadapt"
    adapts_batch = True

    def __init__(self, delta: float = DELTA) -> None:
        """Raises ValueError for a `delta` beyond what the exponent, 0 to 1, could be moved by."""
        if not -1 <= delta <= 1:
            raise ValueError(f"delta {delta}: allowed: -1 to 1")
        self.delta = delta

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """`seed` does not matter."""
        former = msgspec.convert(memory or {}, Lags)
        this_round = _Round(self.delta, former)
        decision = this_round.decide(view, None, seed)
        reasons = {
            job.spec.id: f"{decision.reasons[job.spec.id]}; {describe_work(job)}"
            + describe_lateness(this_round.lateness.get(job.spec.id, 1.0))
            for job in view.jobs
        }
        recent = {name: lag for name, lag in former.items() if view.now_s - lag[1] <= FORGET_S}
        lags = {name: (lag_s, view.now_s) for name, lag_s in this_round.lags_s.items()}
        return structs.replace(decision, reasons=reasons, memory=recent | lags)


class _Round(GoodputPolicy):
    """One decision: the search of `pollux` with our objective."""

    def __init__(self, delta: float, former: Lags) -> None:
        super().__init__(CoadaptPolicy.name, power=0.0)
        self.delta = delta
        self.former = former
        self.lags_s: dict[str, float] = {}
        self.lateness: dict[str, float] = {}

    def weights(self, jobs: Sequence[JobModel], view: ClusterView) -> FloatArray:
        self.lags_s = {job.view.spec.id: self._lag_s(job, view) for job in jobs}
        known = [job for job in jobs if job.fair_rate > 0]
        if not known:
            return np.ones(len(jobs))
        before_s = np.array([0.0 if job.present else restart_s(job.view, view) for job in jobs])
        left_s = before_s + of_all(jobs, work_left_s)
        weights = hesrpt_weights(left_s, exponent(known, view, self.delta))
        fair_s = of_all(jobs, fair_time_left_s).tolist()
        late = np.array([self._lateness(job, at_s, view) for job, at_s in zip(jobs, fair_s, strict=True)])
        overdue = np.clip((late - LATE) / (TOO_LATE - LATE), 0.0, 1.0)
        unknown = np.array([job.fair_rate <= 0 for job in jobs])
        return np.asarray(np.maximum(weights, np.maximum(overdue, unknown)))

    def _lag_s(self, job: JobModel, view: ClusterView) -> float:
        lag_s, found_s = self.former.get(job.view.spec.id, (0.0, view.now_s))
        slots = sum(node.slots for node in view.nodes)
        of_fair_share = job.present_speedup * slots / max(len(view.nodes), 1)
        return float(lag_s + (view.now_s - found_s) * (1.0 - of_fair_share))

    def _lateness(self, job: JobModel, left_s: float, view: ClusterView) -> float:
        name = job.view.spec.id
        age_s = max(view.now_s - job.view.submitted_s, 0.0)
        self.lateness[name] = lateness(age_s + left_s, self.lags_s[name])
        return self.lateness[name]

    def factor(self, job: JobModel, view: ClusterView) -> float:
        if job.view.run_s == 0:
            return 1.0
        cost_s = restart_s(job.view, view)
        horizon_s = RESTART_HORIZON_S
        if job.fair_rate > 0:
            horizon_s = min(fair_time_left_s(job), horizon_s)
        return 1.0 - cost_s / max(horizon_s, cost_s + 1.0)


def restart_s(job: JobView, view: ClusterView) -> float:
    """What a restart costs the job: as measured, else as is said of all."""
    measured_s = job.profile.restart_s if job.profile else 0.0
    return measured_s or view.restart_penalty_s


def lateness(whole_s: float, lag_s: float) -> float:
    """The finish-time fairness of a job that takes `whole_s` from submission to completion, with its fair
    share from now on: that over what it would be had it had its fair share all along."""
    return whole_s / (whole_s - lag_s) if lag_s < whole_s else math.inf


def hesrpt_weights(left: FloatArray, a: float) -> FloatArray:
    """heSRPT's shares for jobs with so much work left, scaled to mean 1; equal work, equal weight."""
    behind = ranks(left)
    power = 1.0 / (1.0 - a)
    # As shares of all jobs, so that no power overflows.
    shares = (behind / len(left)) ** power - ((behind - 1) / len(left)) ** power
    return np.asarray(shares / shares.mean())


def ranks(left: FloatArray) -> IntArray:
    """k: how many jobs have at least as much work left, each itself counted."""
    return np.asarray(len(left) - np.searchsorted(np.sort(left), left, side="left"))


def exponent(jobs: Sequence[JobModel], view: ClusterView, delta: float) -> float:
    """a, of the jobs that have a model."""
    slots = sum(node.slots for node in view.nodes)
    fair = math.ceil(slots / len(view.jobs))
    on_one_node = max((node.slots for node in view.nodes), default=0)
    slopes = [
        _slope(
            job.bounds, job.parameters, job.statistics, max(fair // 2, 1), min(2 * fair, slots), on_one_node
        )
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
    on_one_node: int,
) -> float:
    """Of ln goodput over ln replicas between `few` and `many` replicas, each count on as few nodes as it
    needs, and no count worse than a smaller one."""
    if many <= few:
        return MAX_SLOPE
    counts = np.arange(1, many + 1)
    rates = best_batch(bounds, parameters, statistics, np.where(counts > on_one_node, 2, 1), counts).goodput
    best = np.maximum.accumulate(rates)
    if best[few - 1] <= 0:
        return MAX_SLOPE
    slope = math.log(best[many - 1] / best[few - 1]) / math.log(many / few)
    return min(max(slope, MIN_SLOPE), MAX_SLOPE)


def work_left_s(job: JobModel) -> float:
    """Seconds on one slot; where one replica cannot have a batch, slot-seconds on the fewest that can."""
    alone = job.rates[0]
    fewest = int(np.argmax(alone > 0))
    rate = float(alone[fewest]) / fewest if fewest else job.fair_rate
    return progress_left(job.view) * job.bounds.initial / rate


def of_all(jobs: Sequence[JobModel], left_s: Callable[[JobModel], float]) -> FloatArray:
    """`left_s` of each job; of those without a model the median of what it is of the others from their
    beginning to their end. At least one has a model."""
    known = {j: left_s(job) for j, job in enumerate(jobs) if job.fair_rate > 0}
    views = {j: jobs[j].view for j in known}
    usual = np.median([s / progress_left(views[j]) * declared_progress(views[j]) for j, s in known.items()])
    return np.array([known.get(j, usual) for j in range(len(jobs))])


def fair_time_left_s(job: JobModel) -> float:
    """Seconds that the work left takes with a fair share."""
    return progress_left(job.view) * job.bounds.initial / job.fair_rate


def declared_progress(job: JobView) -> float:
    """In all, in AdaScale steps: what jobs of its application needed for its target, else its budget."""
    needed = job.profile.needed_progress if job.profile else 0.0
    return min(needed, job.spec.max_progress) if needed > 0 else job.spec.max_progress


def progress_left(job: JobView) -> float:
    """What is left of what is declared; after that, as much as the job has made, within its budget."""
    made = job.profile.progress if job.profile else 0.0
    left, budget_left = declared_progress(job) - made, job.spec.max_progress - made
    if left > 0:
        return left
    return min(made, budget_left) if budget_left > 0 else made


def describe_work(job: JobView) -> str:
    left, total = progress_left(job), declared_progress(job)
    if job.profile and job.profile.progress >= total:
        return f"past the {total:.0f} steps that it was to need, taken for half done"
    if job.profile and job.profile.needed_progress > 0:
        return f"{left:.0f} steps to go by what jobs of its application needed"
    return f"nobody can tell what its target needs: {left:.0f} steps are left of its budget"


def describe_lateness(late: float) -> str:
    return f"; late, {late:.2f}x its time with a fair share" if late > LATE else ""
