"""What suits a job by what was measured of its application: its work, and the request of a user who knows.

Goodput here is progress a second, gain(statistics, batch / M0) / step time, with the statistics of the
middle of the training to the job's target; replicas are packed on as few nodes as they fit on.
"""

import math

import numpy as np

from common.goodput.model import gain
from common.lifecycle import UserError
from common.types import JobConfig, JobSpec, batch_config
from workloads.files.measured_profile import MeasuredProfile

LEAST_OF_LINEAR, MOST_OF_LINEAR = 0.5, 0.8
"""Of the ideal speedup: what a well-chosen number of replicas reaches."""
BATCHES = 25
"""Batch sizes that are tried, in equal ratios from the smallest to the largest."""


def tuned_request(
    measured: MeasuredProfile, job: JobSpec, nodes: int, slots: int, random: np.random.Generator
) -> tuple[int, int]:
    """Replicas and total batch size of an ideally tuned job (Pollux, section 5.2): numbers of replicas are
    valid that reach 50-80% of the ideal speedup over one replica, each with its best batch; one of these, any
    with equal chance, and the best batch for it.

    Where no number is valid (one replica reaches 100%, and two may be below 50%), the one that is nearest to
    being so; of equally near ones the smallest.
    """
    speedups = speedups_of(measured, job, nodes, slots)
    outside = {
        replicas: max(LEAST_OF_LINEAR - speedup / replicas, speedup / replicas - MOST_OF_LINEAR, 0.0)
        for replicas, speedup in speedups.items()
    }
    nearest = min(outside, key=lambda replicas: (outside[replicas], replicas))
    valid = [replicas for replicas, distance in outside.items() if distance == 0.0] or [nearest]
    replicas = int(random.choice(valid))
    return replicas, best_batch(measured, job, replicas, slots)[1]


def speedups_of(measured: MeasuredProfile, job: JobSpec, nodes: int, slots: int) -> dict[int, float]:
    """By number of replicas: the goodput with the best batch, over that of one replica with its own."""
    most = min(nodes * slots, job.max_replicas, measured.most_replicas)
    rates = {replicas: best_batch(measured, job, replicas, slots)[0] for replicas in range(1, most + 1)}
    return {replicas: rate / rates[1] for replicas, rate in rates.items()}


def best_batch(measured: MeasuredProfile, job: JobSpec, replicas: int, slots: int) -> tuple[float, int]:
    """The highest goodput of so many replicas, in progress a second, and the total batch size it takes.

    Raises UserError where they can share no batch."""
    middle = measured.needed_progress(job.min_batch_size, job.target) / 2
    rates = {}
    for config in configs(job, replicas):
        batch = config.total_batch(replicas)
        scale = batch / job.min_batch_size
        rates[batch] = float(gain(measured.statistics(batch, middle), scale)) / _step_s(
            measured, config, replicas, slots
        )
    if not rates:
        raise UserError(f"{job.application}: {replicas} replicas can share no batch size within its bounds")
    best = max(rates, key=lambda batch: rates[batch])
    return rates[best], best


def slot_seconds(measured: MeasuredProfile, job: JobSpec) -> float:
    """What the job takes in one slot to its target, evaluations included, with the batch that takes least.

    Every batch size takes the progress that was measured for it, in steps of their median time; start,
    verification and what lies between two steps are not counted.
    """
    middle = measured.needed_progress(job.min_batch_size, job.target) / 2
    seconds = []
    for config in configs(job, 1):
        batch = config.total_batch(1)
        needed = measured.needed_progress(batch, job.target)
        steps = needed / float(gain(measured.statistics(batch, middle), batch / job.min_batch_size))
        evaluations = math.ceil(needed / measured.spec.evaluate_every) if math.isfinite(needed) else 0
        seconds.append(
            steps * _step_s(measured, config, 1, 1) + evaluations * measured.costs.evaluation_slot_s
        )
    return min(seconds, default=math.inf)


def configs(job: JobSpec, replicas: int) -> list[JobConfig]:
    """Splits of each batch size that is tried; none where so many replicas can share none."""
    smallest = max(job.min_batch_size, replicas * job.min_atomic_batch)
    spread = np.geomspace(smallest, max(job.max_batch_size, smallest), BATCHES).round().astype(int).tolist()
    # The largest batch of so many passes: what is just above it takes one more.
    full = range(replicas * job.max_atomic_batch, job.max_batch_size, replicas * job.max_atomic_batch)
    configs = []
    for total in sorted({*spread, *(total for total in full if total >= smallest)}):
        try:
            configs.append(batch_config(total, replicas, job))
        except ValueError:
            continue
    return configs


def _step_s(measured: MeasuredProfile, config: JobConfig, replicas: int, slots: int) -> float:
    whole, rest = divmod(replicas, slots)
    placement = (*(whole * [slots]), *([rest] if rest else []))
    return measured.step_s(placement, config.atomic_batch, config.accumulation)
