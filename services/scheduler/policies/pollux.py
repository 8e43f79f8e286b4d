"""pollux: replicas and batch size of every job chosen together, by goodput (Pollux, section 4.2).

Every round maximises a power mean of the jobs' speedups,

    speedup = best goodput of the allocation / best goodput of a fair share of the cluster     (eq. 15)
    value   = (sum of w x (f x speedup + 1e-3)^p / sum of w)^(1/p),   p = -1, w = 1              (eq. 14)

where f < 1 charges a job whose placement changes for the restart. The maximum is sought exactly (search.py).
A fair share is ceil(slots / jobs) replicas on one node, and speedups count nodes / slots of what eq. 15 says
(the published artifact's convention; it decides how much the 1e-3 weighs).

What a job has shown bounds what it gets: nothing measured yet, one replica at M0; else at most twice the
replicas that it has been profiled with. With a memory it starts from the model of its application, and gets
up to four times the replicas that this was profiled with. Gradient statistics that are not trusted never
raise its batch.
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
"""Of either sign. Below -4 the others have no digits left in a sum with a job that waits, 1e-3 ** p."""
MIN_FACTOR = 0.01
"""The restart factor's floor. The formula gives 0 to a job that has just come, or that was restarted for
longer than it exists, and then slots would be worth nothing to it; with the floor one that waits still gets
its first slot before others get more, and one that runs still keeps what it has."""
BATCH_GAIN = 1.05
"""A batch is changed, where nothing else is, only for this much more goodput."""
NO_GAIN = GradientStatistics(sqr=1.0, var=0.0)
"""What is assumed in the place of statistics that are not trusted: a larger batch gains nothing."""


class GoodputPolicy(Policy):
    """`power` is p of the objective (0: the geometric mean). With `avoid_interference`, at most one job
    that spans several nodes uses a node. Without `by_goodput`, efficiency is taken for 1 everywhere. Without
    `adapt_batch` every job trains with the total batch that it asked for, whatever its replicas.

    A policy with another objective of the same form overrides `weights` and `factor`; one of another form,
    as long as it is a sum over jobs, `options`."""

    def __init__(
        self,
        name: str = "pollux",
        *,
        power: float = -1.0,
        avoid_interference: bool = True,
        by_goodput: bool = True,
        adapt_batch: bool = True,
    ) -> None:
        """Raises ValueError for a power whose sums could not be told apart, or not be represented."""
        if power and not MIN_POWER <= abs(power) <= MAX_POWER:
            raise ValueError(f"power {power}: allowed: 0, and {MIN_POWER} to {MAX_POWER:g} of either sign")
        self.name = name
        self.power = power
        self.avoid_interference = avoid_interference
        self.by_goodput = by_goodput
        self.adapt_batch = adapt_batch

    @property
    def adapts_batch(self) -> bool:  # type: ignore[override]
        return self.by_goodput and self.adapt_batch

    def weights(self, jobs: Sequence["JobModel"], view: ClusterView) -> FloatArray:
        """Of each job in the objective, positive: [jobs]."""
        return np.ones(len(jobs))

    def factor(self, job: "JobModel", view: ClusterView) -> float:
        """What is left of the job's speedup when its placement changes."""
        return restart_factor(job.view, view)

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """Neither `memory` nor `seed` matters."""
        numbers = number_nodes(view.nodes)
        slots = sum(node.slots for node in view.nodes)
        fair = max(math.ceil(slots / max(len(view.jobs), 1)), 1)
        one_node = len(view.nodes) / max(slots, 1)
        jobs = [
            JobModel(
                job,
                to_row(job.allocation, numbers),
                slots,
                fair,
                one_node,
                by_goodput=self.by_goodput,
                adapt_batch=self.adapt_batch,
                accumulates_alone=view.accumulates_alone,
            )
            for job in view.jobs
        ]
        weights = self.weights(jobs, view)
        # On ties, whoever has had least comes first.
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
        """What slots are worth to each job."""
        if not jobs:
            return []
        most = max(job.rates.shape[1] for job in jobs)
        speedups = np.full((len(jobs), 2, most), np.nan)
        for j, job in enumerate(jobs):
            np.multiply(job.rates, job.speedup_of_rate, out=speedups[j, :, : job.rates.shape[1]])
        speedups *= np.array([self.factor(job, view) for job in jobs])[:, None, None]
        worth = utility(speedups, self.power)
        worth *= weights[:, None, None]
        keep = weights * utility(np.array([job.present_speedup for job in jobs]), self.power)
        return [
            Options(together=together, spread=spread, present=job.present, keep=kept)
            for job, (together, spread), kept in zip(jobs, worth, keep.tolist(), strict=True)
        ]


def utility(speedup: FloatArray, power: float) -> FloatArray:
    """Its sum over jobs orders divisions of the cluster as their power mean does. -inf where `speedup` is
    not a number."""
    shifted = speedup + SPEEDUP_OFFSET
    raised = np.log(shifted) if power == 0 else math.copysign(1.0, power) * shifted**power
    return np.where(np.isnan(raised), -np.inf, raised)


def power_mean(mean_utility: float, power: float) -> float:
    """The power mean of the speedups that have this mean utility."""
    return math.exp(mean_utility) if power == 0 else abs(mean_utility) ** (1 / power)


def restart_factor(job: JobView, view: ClusterView) -> float:
    """What is left of a speedup when the job's placement changes: max(age - restarts x r, 0) / (age + r),
    r the seconds that a restart costs the job, and never less than MIN_FACTOR."""
    measured_s = job.profile.restart_s if job.profile else 0.0
    restart_s = measured_s or view.restart_penalty_s
    age_s = max(view.now_s - job.submitted_s, 0.0)
    if age_s + restart_s == 0:
        return 1.0
    return max((age_s - job.restarts * restart_s) / (age_s + restart_s), MIN_FACTOR)


class JobModel:
    """What slots are worth to one job.

    rates: [2, K + 1], of 0..K replicas on one node and over several, not a number where not allowed: goodput
        in examples a second; without a model, what is as good for comparing
    speedup_of_rate: what a speedup is over its rate
    present: the present row, empty where there is none or its nodes are gone; present_speedup: its speedup
    fair_rate: goodput of a fair share of the cluster, in examples a second; 0 without a model
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
        """`fair` replicas are a fair share; `scale` is what its speedup of 1 counts. Without `by_goodput`
        efficiency is taken for 1, and without `adapt_batch` the requested batch is the only one."""
        self.view = job
        self.by_goodput = by_goodput
        self.adapt_batch = adapt_batch
        self.accumulates_alone = accumulates_alone
        held = row_size(present)
        if held > slots:
            present, held = (), 0
        self.present = present
        self.bounds, self.statistics = self._trusted_bounds()
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
        """The batch for this row: the best one, or the present one where that is nearly as good."""
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
        """Whether it has a best batch there."""
        return self.best is not None and bool(self.rates[int(len(row) > 1), row_size(row)] > 0)

    def rate(self, row: Row, config: JobConfig) -> float:
        """Modelled goodput in examples a second (throughput, where efficiency is taken for 1)."""
        assert self.parameters is not None
        if self.best is not None and config == self._best_config(row):
            return float(self.rates[int(len(row) > 1), row_size(row)])
        return _rate(self.bounds, self.parameters, self.statistics, len(row) > 1, row_size(row), config)

    def reason(self, row: Row, allocation: Allocation, config: JobConfig) -> str:
        replicas = row_size(row)
        what = f"{describe(allocation)}, batch {config.total_batch(replicas)}"
        if not self.knows(row):
            if replicas > 1:
                return f"{what}: keeps what it has until its step times are known"
            which = "initial" if self.adapt_batch else "requested"
            return f"{what}: one replica at its {which} batch size until its step times are known"
        rate, alone = self.rate(row, config), float(self.rates[0, 1])
        noun = "goodput" if self.by_goodput else "throughput"
        text = f"{what}: modelled {noun} {rate:.0f} examples/s"
        if replicas > 1 and alone > 0:
            text += f", {rate / alone:.1f}x one replica"
        if self.statistics is NO_GAIN and self.adapt_batch:
            text += "; its gradient statistics do not allow a larger batch yet"
        return text

    def _best_config(self, row: Row) -> JobConfig:
        assert self.best is not None
        where = int(len(row) > 1), row_size(row) - 1
        return JobConfig(
            atomic_batch=int(self.best.atomic_batch[where]), accumulation=int(self.best.accumulation[where])
        )

    def _trusted_bounds(self) -> tuple[BatchBounds, GradientStatistics | None]:
        """Bounds of the batch, and the statistics to choose it by."""
        job, bounds = self.view, BatchBounds.of(self.view.spec, self.accumulates_alone)
        statistics = job.profile.statistics if job.profile else None
        trusted = statistics if statistics and statistics.trusted else NO_GAIN
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
    slots = sum(node.slots for node in view.nodes)
    if not slots:
        return "waits: no node has a slot"
    return f"waits: {sum(sizes)} of {slots} slots go to {len(sizes)} jobs to which they are worth more"


@lru_cache(maxsize=8192)
def _rates(
    bounds: BatchBounds,
    parameters: ThroughputParameters,
    statistics: GradientStatistics | None,
    most: int,
) -> tuple[FloatArray, BestBatch]:
    """Best goodput [2, most + 1] of 0..most replicas on one node and over several (not a number where no
    batch is allowed), and the best batches [2, most] of 1..most replicas."""
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
    """Best goodput of a fair share of the cluster, or of the most replicas below it that a batch in bounds
    can be split over; 0 where there is no such batch."""
    rate = 0.0
    for count in range(max(min(fair, bounds.max_replicas), 1), 0, -1):
        rate = float(best_batch(bounds, parameters, statistics, 1, count).goodput)
        if rate > 0:
            break
    return rate


@lru_cache(maxsize=8192)
def _rate(
    bounds: BatchBounds,
    parameters: ThroughputParameters,
    statistics: GradientStatistics | None,
    across: bool,
    replicas: int,
    config: JobConfig,
) -> float:
    """Goodput of one batch on one node, or across several."""
    nodes = 2 if across else 1
    batch = config.atomic_batch, config.accumulation
    return float(goodput(parameters, statistics, bounds.initial, nodes, replicas, *batch))
