"""srtf: the shortest estimated remaining time first, on the replicas and the batch that were asked for.

Remaining time = (declared max_progress - progress) x M0 / modelled goodput, and a restart for a job that does
not hold its slots, so that two jobs that are nearly equal do not take turns. Goodput is for everybody that on
as few nodes as hold the requested replicas: a job that happens to be spread out would else come behind an
equal one that waits, which would then be spread out in its turn, for ever. A job without a fitted model
cannot be estimated and says so: it goes first, until its step times are known. In that order everybody
who fits in what is left runs; long jobs may wait for as long as shorter ones come.
"""

from functools import lru_cache
from typing import Any

from common.goodput.model import goodput
from common.types import (
    Allocation,
    GradientStatistics,
    JobConfig,
    JobProfile,
    ThroughputParameters,
    batch_config,
    replicas_of,
)
from services.scheduler.policies.interface import ClusterView, Decision, JobView, Policy
from services.scheduler.policies.placement import (
    Board,
    Row,
    describe,
    number_nodes,
    row_size,
    to_allocation,
    to_row,
)

NO_GAIN = GradientStatistics(sqr=1.0, var=0.0)
"""What is assumed of statistics that are not trusted: a step is worth one step, whatever its batch."""


class SrtfPolicy(Policy):
    name = "srtf"

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """Neither `memory` nor `seed` matters."""
        jobs = view.jobs
        largest = max((node.slots for node in view.nodes), default=0)
        estimates_s = [remaining_s(job, largest, view.restart_penalty_s) for job in jobs]

        def shortest(j: int) -> float:
            estimate_s = estimates_s[j]
            return -1.0 if estimate_s is None else estimate_s

        slots = left = sum(node.slots for node in view.nodes)
        reasons: dict[str, str] = {}
        running: list[int] = []
        for j in sorted(range(len(jobs)), key=shortest):
            asked = jobs[j].spec.replicas
            if asked <= left:
                running.append(j)
                left -= asked
            elif asked > slots:
                reasons[jobs[j].spec.id] = f"waits: {asked} replicas asked for, the cluster has {slots} slots"
            else:
                reasons[jobs[j].spec.id] = (
                    f"waits: {_estimate(jobs[j], estimates_s[j])}; {asked} replicas asked for, {left} slots "
                    "left by those before it"
                )
        rows = _place(running, view)
        allocations: dict[str, Allocation] = {}
        configs: dict[str, JobConfig] = {}
        for j, job in enumerate(jobs):
            spec = job.spec
            allocations[spec.id] = to_allocation(rows.get(j, ()), view.nodes, job.allocation)
            if j in rows:
                configs[spec.id] = batch_config(spec.batch_size, spec.replicas, spec)
                batch = configs[spec.id].total_batch(spec.replicas)
                why = _estimate(job, estimates_s[j])
                reasons[spec.id] = f"{describe(allocations[spec.id])}, batch {batch}: {why}"
        return Decision(allocations=allocations, configs=configs, reasons=reasons)


def remaining_s(job: JobView, largest_node: int, restart_penalty_s: float) -> float | None:
    """Seconds until the job has made its declared progress on what it asked for, on as few nodes of
    `largest_node` slots as hold it, wherever it is; None without a model."""
    spec, profile = job.spec, job.profile
    if profile is None or profile.parameters is None:
        return None
    across = spec.replicas > largest_node
    config = batch_config(spec.batch_size, spec.replicas, spec)
    rate = _goodput(
        profile.parameters, _statistics(profile), spec.min_batch_size, across, spec.replicas, config
    )
    left_s = max(spec.max_progress - profile.progress, 0.0) * spec.min_batch_size / rate
    holds = replicas_of(job.allocation) == spec.replicas
    return left_s if holds else left_s + (profile.restart_s or restart_penalty_s)


def _statistics(profile: JobProfile) -> GradientStatistics:
    return profile.statistics if profile.statistics and profile.statistics.trusted else NO_GAIN


@lru_cache(maxsize=16384)
def _goodput(
    parameters: ThroughputParameters,
    statistics: GradientStatistics,
    initial_batch: int,
    across: bool,
    replicas: int,
    config: JobConfig,
) -> float:
    """Useful examples a second."""
    nodes = 2 if across else 1
    batch = config.atomic_batch, config.accumulation
    return float(goodput(parameters, statistics, initial_batch, nodes, replicas, *batch))


def _estimate(job: JobView, estimate_s: float | None) -> str:
    if estimate_s is None:
        return "its remaining time cannot be estimated before its step times are known, so it goes first"
    text = f"an estimated {estimate_s:.0f} s to its declared progress"
    if job.profile and _statistics(job.profile) is NO_GAIN and job.spec.batch_size > job.spec.min_batch_size:
        text += ", at most: its gradient statistics do not tell yet what its larger batch is worth"
    return text


def _place(running: list[int], view: ClusterView) -> dict[int, Row]:
    """Whoever holds what it asked for stays; the others, largest first, go on as few nodes as can be."""
    board = Board([node.slots for node in view.nodes])
    numbers = number_nodes(view.nodes)
    rows: dict[int, Row] = {}
    for j in running:
        row = to_row(view.jobs[j].allocation, numbers)
        if row_size(row) == view.jobs[j].spec.replicas and board.fits(row):
            board.take(row)
            rows[j] = row
    for j in sorted(set(running) - set(rows), key=lambda j: (-view.jobs[j].spec.replicas, j)):
        packed = board.pack(view.jobs[j].spec.replicas, to_row(view.jobs[j].allocation, numbers))
        assert packed is not None, "whoever was let in has slots"
        board.take(packed)
        rows[j] = packed
    return rows
