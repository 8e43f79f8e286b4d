"""The measures of a run. Pure. A measure that a log cannot give is None, never 0.

Slots and queueing follow the scheduler's decisions on its own clock, so that a live log and a simulated one
are measured alike; training follows the samples of rank 0.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

from analysis.log.audit import Audit
from analysis.log.history import JobHistory, RunHistory, integral
from analysis.run.fairness import (
    Fairness,
    IsolatedTime,
    fairness,
    finish_time_fairness,
    parameters_of,
    statistics_of,
    usable,
)
from common.goodput.model import goodput
from common.types import JobState, Struct

FloatArray = npt.NDArray[np.float64]


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
    `modelled_over_realised`: predicted by the models in force / realised, over the same samples."""

    cluster_mean: float | None
    modelled_over_realised: float | None


class ThroughputFigures(Struct, frozen=True):
    """Examples a second that all jobs processed over the run's span; repeated work counts each time."""

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
    """What `summarize --json` prints for each run."""

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


def summary(run: RunHistory, verdict: Audit, isolated: IsolatedTime | None = None) -> RunSummary:
    """`isolated`: see `finish_time_fairness`."""
    jobs = list(run.jobs.values())
    jcts_s = [jct for job in jobs if (jct := job.jct_s) is not None]
    queues_s = [queue for job in jobs if (queue := queue_s(job)) is not None]
    rhos = dict(zip(run.jobs, finish_time_fairness(run, isolated), strict=True))
    span_s = _span_s(run)
    lost_s = [seconds for job in jobs for seconds in job.generations["seconds_lost"].to_list()[1:]]
    started = run.started
    return RunSummary(
        run_id=run.frames.run_id,
        policy=started.policy if started else None,
        workload=started.workload if started else None,
        seed=started.seed if started else None,
        jobs=JobCounts(
            submitted=len(jobs),
            completed=sum(job.end is JobState.COMPLETED for job in jobs),
            verified=sum(job.verified for job in jobs),
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
            modelled_over_realised=modelled_over_realised(run),
        ),
        throughput=ThroughputFigures(cluster_mean=_over(_total(examples(job) for job in jobs), span_s)),
        efficiency_mean=efficiency_mean(run),
        slot_utilisation=slot_utilisation(run),
        rescales=Rescales(
            count=sum(rescales(job) for job in jobs),
            seconds=sum(lost_s, 0.0),
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
                verified=job.verified,
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
    """Total batch in examples, over the time of the job's samples."""
    window_s = job.samples.get_column("window_s").to_numpy()
    return _over(_sum(window_s * total_batch(job.samples)), _sum(window_s))


def total_batch(samples: pl.DataFrame) -> FloatArray:
    """Examples a step of each sample."""
    replicas, atomic_batch, accumulation = (
        np.asarray(samples.get_column(name).to_numpy(), dtype=np.float64)
        for name in ("replicas", "atomic_batch", "accumulation")
    )
    return np.asarray(replicas * atomic_batch * (accumulation + 1))


def rescales(job: JobHistory) -> int:
    """New process groups after the first one."""
    return max(len(job.generations) - 1, 0)


def metric(job: JobHistory) -> float | None:
    """At completion, else at the last evaluation."""
    if job.completed:
        return job.completed.metric
    return job.evaluations["metric"][-1] if len(job.evaluations) else None


def useful_examples(job: JobHistory) -> float | None:
    """M0 x final progress: what the work done was worth at the initial batch size."""
    if job.completed:
        return job.spec.min_batch_size * job.completed.progress
    return job.spec.min_batch_size * job.samples["progress"][-1] if len(job.samples) else None


def examples(job: JobHistory) -> float | None:
    """Examples processed. Where work was lost the total goes back, but that work was done all the same."""
    if job.samples.is_empty():
        return None
    totals = job.samples.get_column("total_examples").to_numpy().astype(np.float64)
    return _sum(np.maximum(np.diff(totals, prepend=0.0), 0.0))


# --------------------------------------------------------------------------- the cluster


def efficiency_mean(run: RunHistory) -> float | None:
    """Mean over the time of all samples of the measured efficiency, gain / scale with scale = M / M0."""
    samples = _samples(run)
    batch, gain = total_batch(samples), samples["gain"].to_numpy()
    measured = (samples["steps"].to_numpy() > 0) & (batch > 0) & np.isfinite(gain)
    window_s, initial = (samples[name].to_numpy()[measured] for name in ("window_s", "initial"))
    return _over(_sum(window_s * gain[measured] * initial / batch[measured]), _sum(window_s))


def _samples(run: RunHistory) -> pl.DataFrame:
    """The samples of all submitted jobs, with the number of the job and `initial`, its M0."""
    counts = [job.rows["samples"].stop - job.rows["samples"].start for job in run.jobs.values()]
    jobs = np.repeat(np.arange(len(counts)), counts)
    initial = run.frames.jobs["min_batch_size"].to_numpy().astype(np.float64)[jobs]
    samples = run.frames.samples.head(len(jobs))
    return samples.with_columns(job=pl.Series(jobs), initial=pl.Series(initial))


def slot_utilisation(run: RunHistory) -> float | None:
    """Slot seconds given to training and verifying / slot seconds of the nodes, in the run's span."""
    span = _span(run)
    if span is None:
        return None
    held = sum(integral(steps, *span) for job in run.jobs.values() for steps in (job.slots, job.verifier))
    return _over(held, integral(run.capacity, *span))


def modelled_over_realised(run: RunHistory) -> float | None:
    """Useful examples predicted by the model in force / useful examples realised, in the same seconds.

    Over each two neighbouring samples of one generation: realised is M0 x the difference of progress,
    predicted is the goodput of the newest fit before them (parameters and gradient statistics), at their
    configuration, x the seconds between.
    """
    samples = _samples(run)
    fit = _newest_fits(run, samples)
    gained = pl.col("progress") - pl.col("progress").shift(1).over("job")
    configuration = ["fit", "nodes", "replicas", "atomic_batch", "accumulation"]
    samples = samples.with_columns(fit=pl.Series(fit)).select(
        *configuration,
        "initial",
        "window_s",
        realised=pl.col("initial") * gained,
        same_group=pl.col("generation") == pl.col("generation").shift(1).over("job"),
    )
    models = run.frames.models
    compute_s = models["alpha_c"].to_numpy() + models["beta_c"].to_numpy()
    predicts = usable(compute_s, models["gamma"].to_numpy()) & models["sqr"].is_not_null().to_numpy()
    pairs = samples.filter(pl.col("same_group") & pl.Series((fit >= 0) & np.append(predicts, False)[fit]))
    if pairs.is_empty():
        return None
    distinct = pairs.unique(configuration, maintain_order=True).sort("fit", maintain_order=True)
    rated = distinct.select(*configuration, rate=pl.Series(_modelled_goodput(models, distinct)))
    rates = pairs.join(rated, on=configuration, how="left", maintain_order="left")["rate"].to_numpy()
    return _over(_sum(rates * pairs["window_s"].to_numpy()), _sum(pairs["realised"].to_numpy()))


def _newest_fits(run: RunHistory, samples: pl.DataFrame) -> npt.NDArray[np.int64]:
    """The row in `models` of the newest fit before the window of each sample; -1 where there is none."""
    begins_s = samples["time_s"].to_numpy() - samples["window_s"].to_numpy()
    fitted_s = run.frames.models["time_s"].to_numpy()
    fits = np.full(len(samples), -1)
    for job in run.jobs.values():
        rows, models = job.rows["samples"], job.rows["models"]
        known = np.searchsorted(fitted_s[models], begins_s[rows], side="right")
        fits[rows] = np.where(known > 0, models.start + known - 1, -1)
    return fits


def _modelled_goodput(models: pl.DataFrame, samples: pl.DataFrame) -> FloatArray:
    """Useful examples a second of each of these samples, by the row `fit` of `models`; sorted by `fit`."""
    columns = ("nodes", "replicas", "atomic_batch", "accumulation")
    configurations = np.stack([samples[name].to_numpy() for name in columns])
    initial = samples["initial"].to_numpy()
    fits, first = np.unique(samples["fit"].to_numpy(), return_index=True)
    rates = []
    for model, begin, part in zip(
        models[fits].iter_rows(named=True), first, np.split(configurations, first[1:], axis=1), strict=True
    ):
        initial_batch = max(int(initial[begin]), 1)
        rates.append(goodput(parameters_of(model), statistics_of(model), initial_batch, *part))
    return np.concatenate(rates)


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


def _sum(values: FloatArray) -> float:
    """In the order of the rows: the result does not depend on how a library splits its sums."""
    return float(np.cumsum(values)[-1]) if values.size else 0.0


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
