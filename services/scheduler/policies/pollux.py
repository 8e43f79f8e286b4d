"""pollux: replicas and batch size of every job chosen together, by goodput (Pollux, section 4.2).

Every round maximises a power mean of the jobs' speedups,

    speedup = best goodput of the allocation / best goodput of a fair share of the cluster     (eq. 15)
    value   = (sum of w x (f x speedup + 1e-3)^p / sum of w)^(1/p),   p = -1, w = 1              (eq. 14)

where f < 1 is what a job keeps of its speedup when its placement changes and it has to restart. The search
for the maximum is exact (search.py). A fair share is ceil(slots / jobs) replicas on one node. Speedups are
those of eq. 15 times nodes / slots, as in the published artifact; this decides how much the offset 1e-3
matters.

A job gets at most what its measurements support: one replica at M0 while nothing is measured, then at most
twice the replicas that it was profiled with. With a memory a job starts from the model of its application and
gets at most four times the replicas that the application was profiled with. Gradient statistics that are not
trusted never raise the batch.

Ablations: `pollux:adapt_batch=false` keeps every requested batch, `pollux:adapt_replicas=false`
(batch_only.py) every requested number of replicas, `pollux:by_goodput=false` assumes an efficiency of 1.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec import structs

from common.goodput.model import BatchBounds, BestBatch, FloatArray, best_batch, best_batches, goodput
from common.types import (
    Allocation,
    GradientStatistics,
    JobConfig,
    ThroughputParameters,
    batch_config,
    replicas_of,
)
from services.scheduler.policies.interface import ClusterView, Decision, JobView, Policy
from services.scheduler.policies.placement import Row, describe, number_nodes, row_size, to_allocation, to_row
from services.scheduler.policies.search import Options, solve

SPEEDUP_OFFSET = 1e-3
"""Keeps the power mean finite while jobs wait."""
MIN_POWER, MAX_POWER = 0.01, 4.0
"""Limits of |p|. Below p = -4 the term of a waiting job, 1e-3 ** p, leaves no digits for the other terms."""
MIN_FACTOR = 0.01
"""Floor of the restart factor. The formula gives 0 to a job that has just arrived, or whose restarts took
longer than its life, and then slots would be worth nothing to it. With the floor, a waiting job still gets
its first slot before others get more, and a running job still keeps what it has."""
BATCH_GAIN = 1.05
"""A batch changes on its own only if it raises goodput by this factor."""
NO_GAIN = GradientStatistics(sqr=1.0, var=0.0)
"""Assumed in place of statistics that are not trusted: a larger batch gains nothing."""


class GoodputPolicy(Policy):
    """`power` is p of the objective (0: the geometric mean). With `avoid_interference`, a node holds replicas
    of at most one job that spans several nodes. Without `by_goodput`, efficiency is assumed to be 1. Without
    `adapt_batch`, every job trains with the total batch it requested, whatever its replicas.

    A policy with another objective of the same form overrides `weights` and `factor`. For an objective of
    another form that is still a sum over jobs, override `options`."""

    def __init__(
        self,
        name: str = "pollux",
        *,
        power: float = -1.0,
        avoid_interference: bool = True,
        by_goodput: bool = True,
        adapt_batch: bool = True,
    ) -> None:
        """Raises ValueError for a power whose sums would lose their differences or overflow."""
        if power and not MIN_POWER <= abs(power) <= MAX_POWER:
            raise ValueError(f"power {power}: allowed: 0, and {MIN_POWER} to {MAX_POWER:g} of either sign")
        self.name = name
        self.power = power
        self.avoid_interference = avoid_interference
        self.by_goodput = by_goodput
        self.adapt_batch = adapt_batch
        self.adapts_batch = by_goodput and adapt_batch

    def weights(self, jobs: Sequence["JobModel"], view: ClusterView) -> FloatArray:
        """[jobs], positive: the weight of each job in the objective."""
        return np.ones(len(jobs))

    def factor(self, job: "JobModel", view: ClusterView) -> float:
        """The share of its speedup that the job keeps when its placement changes."""
        return restart_factor(job.view, view)

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """`memory` and `seed` are not used."""
        numbers = number_nodes(view.nodes)
        slots = view.slots
        fair = max(math.ceil(slots / max(len(view.jobs), 1)), 1)
        scale = len(view.nodes) / max(slots, 1)
        jobs = [
            JobModel(
                job,
                to_row(job.allocation, numbers),
                slots,
                fair,
                scale,
                by_goodput=self.by_goodput,
                adapt_batch=self.adapt_batch,
                accumulates_alone=view.accumulates_alone,
            )
            for job in view.jobs
        ]
        weights = self.weights(jobs, view)
        # On ties, the job with the least attained service comes first.
        order = sorted(range(len(jobs)), key=lambda j: (view.jobs[j].attained_slot_s, j))
        options = self.options(jobs, weights, view)
        solution = solve(
            [options[j] for j in order],
            [node.slots for node in view.nodes],
            one_spread_a_node=self.avoid_interference,
        )
        rows = dict(zip(order, solution.rows, strict=True))
        allocations: dict[str, Allocation] = {}
        configs: dict[str, JobConfig] = {}
        reasons: dict[str, str] = {}
        waiting = _waiting_reason(rows.values(), view)
        for j, job in enumerate(jobs):
            job_id, row = job.view.spec.id, rows[j]
            allocations[job_id] = to_allocation(row, view.nodes, job.view.allocation)
            if row:
                configs[job_id] = job.config(row)
                reasons[job_id] = job.reason(row, allocations[job_id], configs[job_id])
            else:
                reasons[job_id] = waiting
        decision = Decision(allocations=allocations, configs=configs, reasons=reasons)
        if not jobs:
            return decision
        total = float(weights.sum())
        return structs.replace(
            decision,
            value=power_mean(solution.value / total, self.power),
            bound=power_mean(solution.bound / total, self.power),
        )

    def options(self, jobs: Sequence["JobModel"], weights: FloatArray, view: ClusterView) -> list[Options]:
        """The utility of slots for each job."""
        if not jobs:
            return []
        most = max(job.rates.shape[1] for job in jobs)
        speedups = np.full((len(jobs), 2, most), np.nan)
        for j, job in enumerate(jobs):
            np.multiply(job.rates, job.speedup_of_rate, out=speedups[j, :, : job.rates.shape[1]])
        speedups *= np.array([self.factor(job, view) for job in jobs])[:, None, None]
        utilities = utility(speedups, self.power)
        utilities *= weights[:, None, None]
        keep = weights * utility(np.array([job.present_speedup for job in jobs]), self.power)
        return [
            Options(together=together, spread=spread, present=job.present, keep=kept)
            for job, (together, spread), kept in zip(jobs, utilities, keep.tolist(), strict=True)
        ]


def utility(speedup: FloatArray, power: float) -> FloatArray:
    """Element by element. The sum of utilities over jobs ranks divisions of the cluster as the power mean of
    their speedups does. -inf where `speedup` is NaN."""
    shifted = speedup + SPEEDUP_OFFSET
    raised = np.log(shifted) if power == 0 else math.copysign(1.0, power) * shifted**power
    return np.where(np.isnan(raised), -np.inf, raised)


def power_mean(mean_utility: float, power: float) -> float:
    """The power mean of speedups whose mean utility is given."""
    return math.exp(mean_utility) if power == 0 else abs(mean_utility) ** (1 / power)


def restart_factor(job: JobView, view: ClusterView) -> float:
    """The share of its speedup that a job keeps when its placement changes: max(age - restarts x r, 0) /
    (age + r) with r = `restart_s`, and never less than MIN_FACTOR (Pollux, section 4.2)."""
    cost_s = restart_s(job, view)
    age_s = max(view.now_s - job.submitted_s, 0.0)
    if age_s + cost_s == 0:
        return 1.0
    return max((age_s - job.restarts * cost_s) / (age_s + cost_s), MIN_FACTOR)


def restart_s(job: JobView, view: ClusterView) -> float:
    """Seconds that a restart costs the job: as measured, else the assumed penalty of the cluster."""
    measured_s = job.profile.restart_s if job.profile else 0.0
    return measured_s or view.restart_penalty_s


def trusted_statistics(job: JobView) -> GradientStatistics:
    """The job's gradient statistics if they can be trusted, else NO_GAIN."""
    statistics = job.profile.statistics if job.profile else None
    return statistics if statistics and statistics.trusted else NO_GAIN


class JobModel:
    """What slots are worth to one job.

    rates: [2, K + 1], goodput in examples per second of 0..K replicas on one node and over several nodes; NaN
        where not allowed. Without a model, numbers of replicas, which compare in the same way
    speedup_of_rate: factor from a rate to a speedup
    present: the present row, empty if there is none or its nodes are gone; present_speedup: its speedup
    fair_rate: goodput of a fair share of the cluster, in examples per second; 0 without a model
    """

    def __init__(
        self,
        job: JobView,
        present: Row,
        slots: int,
        fair: int,
        scale: float,
        *,
        by_goodput: bool = True,
        adapt_batch: bool = True,
        accumulates_alone: bool = False,
    ) -> None:
        """A fair share has `fair` replicas and the speedup `scale`. Without `by_goodput`, efficiency is
        assumed to be 1. Without `adapt_batch`, only the requested batch is allowed."""
        self.view = job
        self.by_goodput = by_goodput
        self.adapt_batch = adapt_batch
        held = row_size(present)
        if held > slots:
            present, held = (), 0
        self.present = present
        self.bounds, self.statistics = self._trusted_bounds(accumulates_alone)
        profile = job.profile
        self.parameters = profile.parameters if profile else None
        self.best: BestBatch | None = None
        self.fair_rate = 0.0
        if profile and self.parameters:
            most = min(job.spec.max_replicas, self.bounds.max_replicas, profile.explored_replicas)
            most = max(min(most, slots), held, 1)
            rates, best = _rates(self.bounds, self.parameters, self.statistics, most)
            base = float(rates[0, fair]) if fair <= most else math.nan
            if math.isnan(base):
                base = _fair_rate(self.bounds, self.parameters, self.statistics, fair)
            if base > 0:
                self.best, self.fair_rate = best, base
                self.rates = rates
                self.speedup_of_rate = scale / base
                self.present_speedup = self._rate_of_present() * self.speedup_of_rate
        if self.best is None:
            counts = np.arange(min(max(held, 1), slots) + 1)
            known = np.where((counts <= 1) | (counts == held), counts, np.nan)
            self.rates = np.stack((known, np.where(counts == 1, np.nan, known)))
            self.speedup_of_rate = scale / fair
            self.present_speedup = held * scale / fair

    def config(self, row: Row) -> JobConfig:
        """The batch for this row: the best one, or the present one if that is nearly as good."""
        spec, replicas = self.view.spec, row_size(row)
        present = self.view.config if replicas == replicas_of(self.view.allocation) else None
        if not self.knows(row):
            batch = spec.min_batch_size if self.adapt_batch else spec.batch_size
            return present or batch_config(batch, replicas, spec)
        best = self._best_config(row)
        if self.adapt_batch and present and present.total_batch(replicas) <= self.bounds.maximum:
            reached = self.rates[int(len(row) > 1), replicas]
            if reached <= BATCH_GAIN * self.rate(row, present):
                return present
        return best

    def knows(self, row: Row) -> bool:
        """Whether the model gives a best batch for this row."""
        return self.best is not None and bool(self.rates[int(len(row) > 1), row_size(row)] > 0)

    def rate(self, row: Row, config: JobConfig) -> float:
        """Modelled goodput in examples per second (throughput, where efficiency is assumed to be 1)."""
        assert self.parameters is not None
        if self.best is not None and config == self._best_config(row):
            return float(self.rates[int(len(row) > 1), row_size(row)])
        return modelled_goodput(
            self.parameters, self.statistics, self.bounds.initial, len(row) > 1, row_size(row), config
        )

    def reason(self, row: Row, allocation: Allocation, config: JobConfig) -> str:
        """Why the job gets this row and batch, for its user."""
        replicas = row_size(row)
        what = f"{describe(allocation)}, batch {config.total_batch(replicas)}"
        if not self.knows(row):
            if replicas > 1:
                return f"{what}: keeps its replicas until its step times are measured"
            which = "initial" if self.adapt_batch else "requested"
            return f"{what}: one replica at its {which} batch size until its step times are measured"
        rate, alone = self.rate(row, config), float(self.rates[0, 1])
        noun = "goodput" if self.by_goodput else "throughput"
        text = f"{what}: modelled {noun} {rate:.0f} examples/s"
        if replicas > 1 and alone > 0:
            text += f", {rate / alone:.1f}x one replica"
        if self.statistics is NO_GAIN and self.adapt_batch:
            text += "; its gradient statistics do not support a larger batch yet"
        return text

    def _best_config(self, row: Row) -> JobConfig:
        assert self.best is not None
        where = int(len(row) > 1), row_size(row) - 1
        return JobConfig(
            atomic_batch=int(self.best.atomic_batch[where]), accumulation=int(self.best.accumulation[where])
        )

    def _trusted_bounds(self, accumulates_alone: bool) -> tuple[BatchBounds, GradientStatistics | None]:
        """Bounds of the batch, and the statistics that choose it within them."""
        job, bounds = self.view, BatchBounds.of(self.view.spec, accumulates_alone)
        trusted = trusted_statistics(job)
        if not self.adapt_batch:
            bounds = structs.replace(bounds, only=job.spec.batch_size)
        if not self.by_goodput:
            return bounds, None
        if trusted is not NO_GAIN or not self.adapt_batch:
            return bounds, trusted
        present = job.config.total_batch(replicas_of(job.allocation)) if job.config else 0
        return structs.replace(bounds, maximum=min(max(bounds.initial, present), bounds.maximum)), NO_GAIN

    def _rate_of_present(self) -> float:
        if not self.present:
            return 0.0
        best = float(self.rates[int(len(self.present) > 1), row_size(self.present)])
        if math.isnan(best):
            return self.rate(self.present, self.view.config) if self.view.config else 0.0
        return best


def _waiting_reason(rows: Iterable[Row], view: ClusterView) -> str:
    sizes = [row_size(row) for row in rows if row]
    if not view.slots:
        return "waits: no node has a free slot"
    return f"waits: {sum(sizes)} of {view.slots} slots go to {len(sizes)} jobs that gain more from them"


@lru_cache(maxsize=8192)
def _rates(
    bounds: BatchBounds,
    parameters: ThroughputParameters,
    statistics: GradientStatistics | None,
    most: int,
) -> tuple[FloatArray, BestBatch]:
    """Best goodput [2, most + 1] of 0..most replicas on one node and over several (NaN where no batch is
    allowed), and the best batches [2, most] of 1..most replicas."""
    best = best_batches(bounds, parameters, statistics, most)
    rates = np.zeros((2, most + 1))
    rates[:, 1:] = np.where(best.goodput > 0, best.goodput, np.nan)
    rates[1, 1] = np.nan
    return rates, best


@lru_cache(maxsize=8192)
def _fair_rate(
    bounds: BatchBounds,
    parameters: ThroughputParameters,
    statistics: GradientStatistics | None,
    fair: int,
) -> float:
    """Best goodput of a fair share of the cluster. If no batch within bounds can be split over that many
    replicas, of the most replicas below for which one can; 0 if there is no such batch."""
    rate = 0.0
    for count in range(max(min(fair, bounds.max_replicas), 1), 0, -1):
        rate = float(best_batch(bounds, parameters, statistics, 1, count).goodput)
        if rate > 0:
            break
    return rate


@lru_cache(maxsize=16384)
def modelled_goodput(
    parameters: ThroughputParameters,
    statistics: GradientStatistics | None,
    initial_batch: int,
    several_nodes: bool,
    replicas: int,
    config: JobConfig,
) -> float:
    """Useful examples per second with this batch, on one node or over several."""
    nodes = 2 if several_nodes else 1
    batch = config.atomic_batch, config.accumulation
    return float(goodput(parameters, statistics, initial_batch, nodes, replicas, *batch))
