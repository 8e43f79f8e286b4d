"""Finish-time fairness: how long a job took, over how long it had taken alone on its share. Pure."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from analysis.log.history import JobHistory, RunHistory, integral
from common.goodput.model import BatchBounds, best_batch
from common.types import GradientStatistics, Struct, ThroughputParameters

PIECES = 16
"""Into how many equal parts of its progress a job's isolated run is divided."""

IsolatedTime: TypeAlias = Callable[[JobHistory, float], float | None]
"""Seconds from submission to completion of a job, alone on that many slots; None where they cannot be had."""


class Fairness(Struct, frozen=True):
    """Finish-time fairness rho over the completed jobs with a model; Jain's index is of 1/rho."""

    worst_rho: float | None
    mean_rho: float | None
    unfair_fraction: float | None
    jain: float | None


def fairness(rhos: Sequence[float | None]) -> Fairness:
    known = np.array([rho for rho in rhos if rho is not None])
    if not known.size:
        return Fairness(worst_rho=None, mean_rho=None, unfair_fraction=None, jain=None)
    ease = 1 / known
    return Fairness(
        worst_rho=float(known.max()),
        mean_rho=float(known.mean()),
        unfair_fraction=float(np.mean(known > 1)),
        jain=float(ease.sum() ** 2 / (ease.size * (ease**2).sum())),
    )


def finish_time_fairness(run: RunHistory, isolated: IsolatedTime | None = None) -> list[float | None]:
    """rho = JCT / JCT_isolated of every job, in order of submission (Themis' finish-time fairness).

    Isolated: alone, from its submission on, on slots / (mean number of active jobs in its life); how long
    that takes says `isolated`, without it the models in the run's own log (`isolated_jct_s`).
    """
    jobs = list(run.jobs.values())
    begins = np.array([job.submitted_s for job in jobs])
    ends = np.array([run.last_s if job.ended_s is None else job.ended_s for job in jobs])
    rhos: list[float | None] = []
    for job in jobs:
        jct = job.jct_s
        if jct is None or not jct > 0 or job.ended_s is None:
            rhos.append(None)
            continue
        overlaps_s = np.minimum(ends, job.ended_s) - np.maximum(begins, job.submitted_s)
        active = float(np.maximum(overlaps_s, 0).sum()) / jct
        slots = integral(run.capacity, job.submitted_s, job.ended_s) / jct
        share = slots / active
        alone_s = isolated(job, share) if isolated else isolated_jct_s(job, share, run.largest_node)
        rhos.append(jct / alone_s if alone_s else None)
    return rhos


def isolated_jct_s(job: JobHistory, share: float, node_slots: int) -> float | None:
    """Completion time of a completed job, alone on `share` slots of nodes with `node_slots` each.

    The training is integrated over the job's own progress: at each part of it with the gradient statistics
    that it showed there, the last throughput model fitted to it, and the batch of the largest goodput.
    Between two whole numbers of replicas the time is interpolated; below one slot it is one slot's time
    / share. Added is what comes to it alone as well: its first start and its verification, as they were.
    None without model, statistics or share.
    """
    if not job.completed or not job.fits or job.ended_s is None or not share > 0 or node_slots < 1:
        return None
    parameters, statistics = job.fits[-1][1].parameters, statistics_by_progress(job)
    if not statistics or not usable(parameters):
        return None
    bounds = BatchBounds.of(job.spec, job.accumulates_alone)
    if bounds.min_atomic < 1 or bounds.initial < 1 or bounds.max_atomic < 1:
        return None
    most = max(min(job.spec.max_replicas, bounds.max_replicas), 1)
    low = min(max(int(share), 1), most)
    replicas = np.array([low, min(low + 1, most)])
    nodes = -(-replicas // node_slots)
    known_at = [progress for progress, _ in statistics]
    part = job.completed.progress / PIECES
    training_s = np.zeros(2)
    for piece in range(PIECES):
        index = max(bisect_right(known_at, (piece + 0.5) * part) - 1, 0)
        rate = best_batch(bounds, parameters, statistics[index][1], nodes, replicas).goodput
        with np.errstate(divide="ignore", invalid="ignore"):
            training_s += bounds.initial * part / rate
    alone_s = training_s[0] / min(share, 1.0)
    if share > low and np.isfinite(training_s[1]):
        alone_s += min(share - low, 1.0) * (training_s[1] - training_s[0])
    started_s = job.generations[0][1].seconds_lost if job.generations else 0.0
    verified_s = job.ended_s - job.verifying_s if job.verifying_s is not None else 0.0
    total_s = float(alone_s) + started_s + verified_s
    return total_s if np.isfinite(total_s) else None


def statistics_by_progress(job: JobHistory) -> list[tuple[float, GradientStatistics]]:
    """The trusted gradient statistics of the samples by progress, or those of the last fit."""
    known = [(s.progress, s.statistics) for _, s in job.samples if s.statistics and s.statistics.trusted]
    if not known and job.fits and (last := job.fits[-1][1].statistics):
        known = [(0.0, last)]
    return sorted(known, key=lambda pair: pair[0])


def usable(parameters: ThroughputParameters) -> bool:
    """Whether the model gives a time at all: its logarithms are taken."""
    return parameters.alpha_c + parameters.beta_c > 0 and parameters.gamma > 0
