"""What real and simulated runs of the same names tell of each of their jobs."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from analysis.compare.experiment_runs import Experiment
from analysis.compare.pairing import LeftOut, of_same_jobs
from analysis.log.frames import read
from analysis.log.history import RunHistory, history
from analysis.run.batches import batch_efficiency
from analysis.run.breakdown import Breakdown, breakdown
from analysis.run.measures import batch_mean, replicas_mean, rescales
from analysis.run.step_times import StepTime, step_times
from common.eventlog import EVENTS_FILE
from common.types import Struct
from workloads.files.measured_profile import MeasuredProfile


class JobFigures(Struct, frozen=True):
    """What one run says of a job that completed; of it, what helps to find why two runs differ."""

    application: str
    jct_s: float
    parts: Breakdown
    progress: float
    replicas: float | None
    batch: float | None
    rescales: int


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
    """How near its batches come to the best ones (`analysis.run.batches`)."""
    simulated_batches: float | None = None


def paired(
    experiment: Experiment,
    simulated: Path,
    profiles: Mapping[str, MeasuredProfile],
    lacking: Mapping[str, str],
) -> Iterator[Pair | LeftOut]:
    """The runs of the experiment that count, with those in `simulated`, and what of both is left out;
    `lacking` says, by run, why it was not simulated."""
    counting, strangers = of_same_jobs(experiment.runs)
    yield from (*experiment.left_out, *strangers)
    names = {run.name for run in counting}
    for run in (run for run in experiment.runs if run.name in names):
        twin = simulated / run.name / EVENTS_FILE
        log = read(twin)
        histories = [history(frames) for frames in (read(experiment.log(run)), log)]
        real, copy = map(figures, histories)
        both = sorted(real.keys() & copy.keys())
        if log.faults or not both:
            if twin.exists():
                why = f"simulated: {'; '.join(log.faults) or 'no job completed on both sides'}"
            else:
                why = ": ".join(filter(None, ("was not simulated", lacking.get(run.name))))
            yield LeftOut(run=run.name, why=why)
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
