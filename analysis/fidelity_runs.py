"""What real and simulated runs of the same names tell of each of their jobs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from analysis.batches import batch_efficiency, placements
from analysis.breakdown import Breakdown, breakdown
from analysis.experiment import Experiment
from analysis.load import RunHistory, read_log, replay
from analysis.metrics import batch_mean, replicas_mean, rescales
from analysis.pairing import LeftOut, of_same_jobs
from common.eventlog import EVENTS_FILE
from common.types import JobConfig, Struct
from workloads.measured import Measured


class JobFigures(Struct, frozen=True):
    """What one run says of a job that completed; of it, what helps to find why two runs differ."""

    application: str
    jct_s: float
    parts: Breakdown
    progress: float
    replicas: float | None
    batch: float | None
    rescales: int


class StepTime(Struct, frozen=True):
    """Of one application in one configuration: mean seconds of a step, and seconds of samples with it.
    `placement` has the replicas on each node, the most first."""

    application: str
    placement: tuple[int, ...]
    config: JobConfig
    step_s: float
    weight_s: float


class Pair(Struct, frozen=True):
    """One run on both sides, with the jobs, by id, that completed on both: at least one."""

    run: str
    set: str
    policy: str
    seed: int
    real: dict[str, JobFigures]
    simulated: dict[str, JobFigures]
    real_steps: tuple[StepTime, ...] = ()
    simulated_steps: tuple[StepTime, ...] = ()
    real_batches: float | None = None
    """How near its batches come to the best ones (`analysis.batches`)."""
    simulated_batches: float | None = None


def paired(
    experiment: Experiment, simulated: Path, profiles: Mapping[str, Measured]
) -> Iterator[Pair | LeftOut]:
    """The runs of the experiment that count, with those in `simulated`, and what of both is left out."""
    counting, strangers = of_same_jobs(experiment.runs)
    yield from (*experiment.left_out, *strangers)
    names = {run.name for run in counting}
    for run in (run for run in experiment.runs if run.name in names):
        twin = simulated / run.name / EVENTS_FILE
        log = read_log(twin)
        histories = [replay(records).run for records in (read_log(experiment.log(run)).records, log.records)]
        real, copy = map(figures, histories)
        both = sorted(real.keys() & copy.keys())
        if log.fault or not both:
            why = log.fault or "no job completed on both sides"
            yield LeftOut(run=run.name, why=f"simulated: {why}" if twin.exists() else "was not simulated")
            continue
        if alone := sorted(real.keys() ^ copy.keys()):
            yield LeftOut(run=run.name, why=f"its jobs that completed on one side only: {', '.join(alone)}")
        yield Pair(
            run=run.name,
            set=run.set,
            policy=run.policy,
            seed=run.seed,
            real={name: real[name] for name in both},
            simulated={name: copy[name] for name in both},
            real_steps=step_times(histories[0]),
            simulated_steps=step_times(histories[1]),
            real_batches=batch_efficiency(histories[0], profiles),
            simulated_batches=batch_efficiency(histories[1], profiles),
        )


def figures(run: RunHistory) -> dict[str, JobFigures]:
    """Of the jobs that completed, by id."""
    return {
        name: JobFigures(
            application=job.spec.application,
            jct_s=job.jct_s,
            parts=parts,
            progress=job.completed.progress,
            replicas=replicas_mean(job, run.last_s),
            batch=batch_mean(job),
            rescales=rescales(job),
        )
        for name, job in run.jobs.items()
        if job.completed and job.jct_s is not None and (parts := breakdown(job))
    }


def step_times(run: RunHistory) -> tuple[StepTime, ...]:
    """Of every configuration in which its jobs were timed."""
    sums: dict[tuple[str, tuple[int, ...], JobConfig], list[float]] = {}
    for job in run.jobs.values():
        placement_of = placements(job)
        for _, sample in job.samples:
            placement = placement_of(sample)
            if sample.timed_steps > 0 and sample.window_s > 0 and placement is not None:
                key = (job.spec.application, placement, sample.config)
                step_s = sample.step_s + sample.config.accumulation * sample.accumulation_s
                held = sums.setdefault(key, [0.0, 0.0])
                held[0] += sample.window_s
                held[1] += sample.window_s * step_s
    return tuple(StepTime(*key, total / weight_s, weight_s) for key, (weight_s, total) in sums.items())


def step_factors(
    steps: Iterable[StepTime], profiles: Mapping[str, Measured]
) -> tuple[tuple[str, float], ...]:
    """By application, what its steps took over what was measured of the same configurations, each weighted by
    the time that it was in use: how much slower the machine was than on the day of the profiles. Nothing of
    an application without any."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for step in steps:
        measured = profiles.get(step.application)
        if measured:
            config = step.config
            known_s = measured.step_s(step.placement, config.atomic_batch, config.accumulation)
            sums[step.application][0] += step.weight_s * step.step_s / known_s
            sums[step.application][1] += step.weight_s
    return tuple((name, ratio / weight_s) for name, (ratio, weight_s) in sorted(sums.items()))
