"""The figures of a run, from its rebuilt history. Pure. What cannot be had is None, never 0.

Slots and queueing follow the scheduler's decisions on its own clock, so that a live log and a simulated one
are measured alike; training follows the samples of rank 0.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from analysis.log.audit import Audit
from analysis.log.history import JobHistory, RunHistory, integral
from analysis.run.fairness import Fairness, IsolatedTime, fairness, finish_time_fairness, usable
from common.goodput.model import goodput
from common.types import JobState, Struct


class JobCounts(Struct, frozen=True):
    """`verified`: completed, and confirmed by an independent verifier."""

    submitted: int
    completed: int
    verified: int
    failed: int
    cancelled: int


class CompletionTimes(Struct, frozen=True):
    """Seconds from submission to verified completion, over the completed jobs."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class QueueTimes(Struct, frozen=True):
    """Seconds from submission to the first slots, over the jobs that ever got slots."""

    mean: float | None


class GoodputFigures(Struct, frozen=True):
    """`cluster_mean`: useful examples a second, M0 x final progress of all jobs over the run's span.
    `modelled_over_realised`: what the models in force foretold over what the same samples show."""

    cluster_mean: float | None
    modelled_over_realised: float | None


class ThroughputFigures(Struct, frozen=True):
    """Examples a second that all jobs processed, work done twice included, over the run's span."""

    cluster_mean: float | None


class Rescales(Struct, frozen=True):
    """New process groups after a job's first one, and the seconds without a training step they cost."""

    count: int
    seconds: float


class JobSummary(Struct, frozen=True):
    id: str
    application: str
    jct_s: float | None
    queue_s: float | None
    replicas_mean: float | None
    """Over the time in which it had slots for training."""
    batch_mean: float | None
    """Total batch in examples, over the time of its samples."""
    rescales: int
    metric: float | None
    """At completion, else of its last evaluation."""
    target: float
    verified: bool
    rho: float | None


class RunSummary(Struct, frozen=True):
    """What `summarize --json` prints a run."""

    run_id: str
    policy: str | None
    workload: str | None
    seed: int | None
    jobs: JobCounts
    jct_s: CompletionTimes
    makespan_s: float | None
    queue_s: QueueTimes
    goodput: GoodputFigures
    throughput: ThroughputFigures
    efficiency_mean: float | None
    slot_utilisation: float | None
    rescales: Rescales
    fairness: Fairness
    audit: Audit
    per_job: tuple[JobSummary, ...]


def summary(run_id: str, run: RunHistory, verdict: Audit, isolated: IsolatedTime | None = None) -> RunSummary:
    """`isolated`: see `finish_time_fairness`."""
    jobs = list(run.jobs.values())
    jcts_s = [jct for job in jobs if (jct := job.jct_s) is not None]
    queues_s = [queue for job in jobs if (queue := queue_s(job)) is not None]
    rhos = dict(zip(run.jobs, finish_time_fairness(run, isolated), strict=True))
    span_s = _span_s(run)
    started = run.started
    return RunSummary(
        run_id=run_id,
        policy=started.policy if started else None,
        workload=started.workload if started else None,
        seed=started.seed if started else None,
        jobs=JobCounts(
            submitted=len(jobs),
            completed=sum(job.end is JobState.COMPLETED for job in jobs),
            verified=sum(is_verified(job) for job in jobs),
            failed=sum(job.end is JobState.FAILED for job in jobs),
            cancelled=sum(job.end is JobState.CANCELLED for job in jobs),
        ),
        jct_s=CompletionTimes(
            mean=_mean(jcts_s),
            p50=_percentile(jcts_s, 50),
            p90=_percentile(jcts_s, 90),
            p99=_percentile(jcts_s, 99),
        ),
        makespan_s=span_s if all(job.ended_s is not None for job in jobs) else None,
        queue_s=QueueTimes(mean=_mean(queues_s)),
        goodput=GoodputFigures(
            cluster_mean=_over(_total(useful_examples(job) for job in jobs), span_s),
            modelled_over_realised=modelled_over_realised(jobs),
        ),
        throughput=ThroughputFigures(cluster_mean=_over(_total(examples(job) for job in jobs), span_s)),
        efficiency_mean=efficiency_mean(jobs),
        slot_utilisation=slot_utilisation(run),
        rescales=Rescales(
            count=sum(rescales(job) for job in jobs),
            seconds=sum((anew.seconds_lost for job in jobs for _, anew in job.generations[1:]), 0.0),
        ),
        fairness=fairness(list(rhos.values())),
        audit=verdict,
        per_job=tuple(
            JobSummary(
                id=job_id,
                application=job.spec.application,
                jct_s=job.jct_s,
                queue_s=queue_s(job),
                replicas_mean=replicas_mean(job, run.last_s),
                batch_mean=batch_mean(job),
                rescales=rescales(job),
                metric=metric(job),
                target=job.spec.target,
                verified=is_verified(job),
                rho=rhos[job_id],
            )
            for job_id, job in run.jobs.items()
        ),
    )


# --------------------------------------------------------------------------- one job


def queue_s(job: JobHistory) -> float | None:
    """Submission to the first decision that gave it slots."""
    return job.slots[0][0] - job.submitted_s if job.slots else None


def replicas_mean(job: JobHistory, until_s: float) -> float | None:
    """Over the time in which it had slots for training, up to `until_s` where it goes on."""
    held = integral(job.slots, job.submitted_s, until_s)
    return _over(held, integral([(t, int(count > 0)) for t, count in job.slots], job.submitted_s, until_s))


def batch_mean(job: JobHistory) -> float | None:
    weighted = sum(s.window_s * s.config.total_batch(s.replicas) for _, s in job.samples)
    return _over(weighted, sum(sample.window_s for _, sample in job.samples))


def rescales(job: JobHistory) -> int:
    return len(job.generations[1:])


def metric(job: JobHistory) -> float | None:
    if job.completed:
        return job.completed.metric
    return job.evaluations[-1].metric if job.evaluations else None


def is_verified(job: JobHistory) -> bool:
    return bool(job.completed and job.completed.verified and job.verified and job.verified.ok)


def useful_examples(job: JobHistory) -> float | None:
    """M0 x final progress: what the work done was worth at the initial batch size."""
    if job.completed:
        return job.spec.min_batch_size * job.completed.progress
    return job.spec.min_batch_size * job.samples[-1][1].progress if job.samples else None


def examples(job: JobHistory) -> int | None:
    """Examples processed. Where work was lost the total goes back, but that work was done all the same."""
    if not job.samples:
        return None
    totals = [0, *(sample.total_examples for _, sample in job.samples)]
    return sum(max(after - before, 0) for before, after in pairwise(totals))


# --------------------------------------------------------------------------- the cluster


def efficiency_mean(jobs: Sequence[JobHistory]) -> float | None:
    """Mean over the time of all samples of the measured efficiency, gain / scale with scale = M / M0."""
    weighted, time_s = 0.0, 0.0
    for job in jobs:
        for _, sample in job.samples:
            batch = sample.config.total_batch(sample.replicas)
            if sample.steps > 0 and batch > 0 and math.isfinite(sample.gain):
                weighted += sample.window_s * sample.gain * job.spec.min_batch_size / batch
                time_s += sample.window_s
    return _over(weighted, time_s)


def slot_utilisation(run: RunHistory) -> float | None:
    """Slot seconds given to training and verifying over those that the nodes had, in the run's span."""
    span = _span(run)
    if span is None:
        return None
    held = sum(integral(steps, *span) for job in run.jobs.values() for steps in (job.slots, job.verifier))
    return _over(held, integral(run.capacity, *span))


def modelled_over_realised(jobs: Sequence[JobHistory]) -> float | None:
    """Useful examples that the model in force foretold, over those that came, in the same seconds.

    Over each two neighbouring samples of one generation: what came is M0 x the difference of progress, what
    was foretold is the goodput of the newest fit before them (parameters and gradient statistics), at
    their configuration, x the seconds between.
    """
    foretold, came = 0.0, 0.0
    for job in jobs:
        fitted_s = [t for t, _ in job.fits]
        known: dict[tuple[object, ...], float] = {}
        for (_, before), (t_s, sample) in pairwise(job.samples):
            fit_index = bisect_right(fitted_s, t_s - sample.window_s) - 1
            if fit_index < 0 or sample.generation != before.generation:
                continue
            fit = job.fits[fit_index][1]
            if fit.statistics is None or not usable(fit.parameters):
                continue
            key = (fit_index, sample.nodes, sample.replicas, sample.config)
            if key not in known:
                known[key] = float(
                    goodput(
                        fit.parameters,
                        fit.statistics,
                        max(job.spec.min_batch_size, 1),
                        sample.nodes,
                        sample.replicas,
                        sample.config.atomic_batch,
                        sample.config.accumulation,
                    )
                )
            foretold += known[key] * sample.window_s
            came += job.spec.min_batch_size * (sample.progress - before.progress)
    return _over(foretold, came)


# --------------------------------------------------------------------------- arithmetic


def _span(run: RunHistory) -> tuple[float, float] | None:
    """From the first submission to the last end, or to the end of the log while a job goes on."""
    if not run.jobs:
        return None
    ends = [run.last_s if job.ended_s is None else job.ended_s for job in run.jobs.values()]
    return min(job.submitted_s for job in run.jobs.values()), max(ends)


def _span_s(run: RunHistory) -> float | None:
    span = _span(run)
    return span[1] - span[0] if span else None


def _over(part: float | None, whole: float | None) -> float | None:
    if part is None or whole is None or not whole > 0:
        return None
    return part / whole if math.isfinite(part / whole) else None


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
