"""The work of a job, and the request of a user who has tuned it, from the measured profile of its
application.

Goodput here is progress per second: gain(statistics, batch / M0) / step time, with the gradient statistics in
the middle of the training. Replicas are packed on as few nodes as possible.
"""

import math

import numpy as np

from common.goodput.model import gain
from common.lifecycle import UserError
from common.types import JobConfig, JobSpec, batch_config
from workloads.files.measured_profile import MeasuredProfile, packed

LEAST_OF_LINEAR, MOST_OF_LINEAR = 0.5, 0.8
"""A well-chosen number of replicas reaches a fraction of the ideal speedup between these two."""
BATCHES = 25
"""How many batch sizes are tried, in equal ratios from the smallest to the largest."""


def tuned_request(
    measured: MeasuredProfile, job: JobSpec, nodes: int, slots: int, random: np.random.Generator
) -> tuple[int, int]:
    """Replicas and total batch size that an expert would request (Pollux, section 5.2).

    A number of replicas is valid if it reaches 50-80% of the ideal speedup over one replica, each with its
    best batch. The request is a random valid number and the best batch for it. If no number is valid (one
    replica reaches 100%, and two may be below 50%), it is the one nearest to the range, the smallest of
    equals.
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
    """The speedup by number of replicas: goodput with the best batch, relative to one replica with its best
    batch."""
    most = min(nodes * slots, job.max_replicas, measured.most_replicas)
    rates = {replicas: best_batch(measured, job, replicas, slots)[0] for replicas in range(1, most + 1)}
    return {replicas: rate / rates[1] for replicas, rate in rates.items()}


def best_batch(measured: MeasuredProfile, job: JobSpec, replicas: int, slots: int) -> tuple[float, int]:
    """The highest goodput of this many replicas, in progress per second, and the total batch size for it.

    Raises UserError if they can share no batch."""
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
    """How long the job takes to its target in one slot, with the fastest batch; infinity if it never gets
    there.

    The time is that of the steps that the measured progress takes, at their median time, and of the
    evaluations. Start, verification and the time between steps are not counted.
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
    """One split for each batch size that is tried; empty if this many replicas can share no batch."""
    smallest = max(job.min_batch_size, replicas * job.min_atomic_batch)
    spread = np.geomspace(smallest, max(job.max_batch_size, smallest), BATCHES).round().astype(int).tolist()
    # The largest batch for each number of passes: a slightly larger one would need one more pass.
    full = range(replicas * job.max_atomic_batch, job.max_batch_size, replicas * job.max_atomic_batch)
    configs = []
    for total in sorted({*spread, *(total for total in full if total >= smallest)}):
        try:
            configs.append(batch_config(total, replicas, job))
        except ValueError:
            continue
    return configs


def _step_s(measured: MeasuredProfile, config: JobConfig, replicas: int, slots: int) -> float:
    placement = packed(replicas, slots)
    return measured.step_s(placement, config.atomic_batch, config.accumulation)
