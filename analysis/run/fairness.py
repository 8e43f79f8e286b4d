"""Finish-time fairness: the time that a job took / the time that it takes alone on its share. Pure."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from analysis.log.history import JobHistory, RunHistory, integral
from common.goodput.model import BatchBounds, Numbers, best_batch
from common.types import GradientStatistics, Struct, ThroughputParameters

PIECES = 16
"""Equal parts of its progress into which a job's isolated run is divided."""

IsolatedTime: TypeAlias = Callable[[JobHistory, float], float | None]
"""Seconds from submission to completion of a job, alone on that many slots; None where they are unknown."""


class Fairness(Struct, frozen=True):
    """Finish-time fairness rho over the completed jobs that have a model; Jain's index is that of 1/rho."""

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

    Isolated: alone from its submission on, on slots / (mean number of active jobs in its life). `isolated`
    gives the time that this takes; without it, the models in the run's own log do (`isolated_jct_s`).
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
    """Seconds to completion of a completed job, alone on `share` slots of nodes with `node_slots` each.

    The training is integrated over the job's own progress: each part of it with the gradient statistics that
    the job showed there, the last throughput model fitted to it, and the batch of the largest goodput.
    Between two whole numbers of replicas the time is interpolated; below one slot it is the time of one slot
    / share. Its first start and its verification are added as they were: it would need them alone as well.
    None without model, statistics or share.
    """
    if not job.completed or job.models.is_empty() or job.ended_s is None or not share > 0 or node_slots < 1:
        return None
    parameters = parameters_of(job.models.row(-1, named=True))
    known_at, known = statistics_by_progress(job)
    if not known or not usable(parameters.alpha_c + parameters.beta_c, parameters.gamma):
        return None
    bounds = BatchBounds.of(job.spec, job.accumulates_alone)
    if bounds.min_atomic < 1 or bounds.initial < 1 or bounds.max_atomic < 1:
        return None
    most = max(min(job.spec.max_replicas, bounds.max_replicas), 1)
    low = min(max(int(share), 1), most)
    replicas = np.array([low, min(low + 1, most)])
    nodes = -(-replicas // node_slots)
    part = job.completed.progress / PIECES
    middles = (np.arange(PIECES) + 0.5) * part
    rates: dict[tuple[float, float], npt.NDArray[np.float64]] = {}
    training_s = np.zeros(2)
    with np.errstate(divide="ignore", invalid="ignore"):
        for index in np.maximum(np.searchsorted(known_at, middles, side="right") - 1, 0).tolist():
            sqr, var = known[index]
            if (sqr, var) not in rates:
                statistics = GradientStatistics(sqr=sqr, var=var)
                rates[sqr, var] = best_batch(bounds, parameters, statistics, nodes, replicas).goodput
            training_s += bounds.initial * part / rates[sqr, var]
    alone_s = training_s[0] / min(share, 1.0)
    if share > low and np.isfinite(training_s[1]):
        alone_s += min(share - low, 1.0) * (training_s[1] - training_s[0])
    started_s = job.generations["seconds_lost"][0] if len(job.generations) else 0.0
    verified_s = job.ended_s - job.verifying_s if job.verifying_s is not None else 0.0
    total_s = float(alone_s) + started_s + verified_s
    return total_s if np.isfinite(total_s) else None


def statistics_by_progress(
    job: JobHistory,
) -> tuple[npt.NDArray[np.float64], list[tuple[float, float]]]:
    """The trusted gradient statistics (sqr, var) of the samples, sorted by progress: where, and which.
    Without any, those of the last fit."""
    trusted = job.samples.get_column("trusted").fill_null(False).to_numpy()
    if not trusted.any():
        last = job.models.row(-1, named=True)
        known = [] if last["sqr"] is None else [(last["sqr"], last["var"])]
        return np.zeros(len(known)), known
    progress, sqr, var = (
        job.samples.get_column(name).to_numpy()[trusted] for name in ("progress", "sqr", "var")
    )
    order = np.argsort(progress, kind="stable")
    return progress[order], list(zip(sqr[order].tolist(), var[order].tolist(), strict=True))


def parameters_of(model: dict[str, Any]) -> ThroughputParameters:
    """Those of a row of the frame `models`."""
    return ThroughputParameters(**{name: model[name] for name in ThroughputParameters.__struct_fields__})


def statistics_of(model: dict[str, Any]) -> GradientStatistics:
    """Those of a row of the frame `models` that has some."""
    return GradientStatistics(**{name: model[name] for name in GradientStatistics.__struct_fields__})


def usable(compute_s: Numbers, gamma: Numbers) -> npt.NDArray[np.bool_]:
    """Whether a model gives a time: its computing time, `alpha_c` + `beta_c`, must have a logarithm."""
    return np.asarray((np.asarray(compute_s) > 0) & (np.asarray(gamma) > 0))
