"""Read the real and the simulated run of the same name, job by job."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from analysis.compare.experiment_runs import Experiment
from analysis.compare.pairing import LeftOut, runs_of_same_jobs
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
    """A completed job in one run: figures that help to find why two runs differ."""

    application: str
    jct_s: float
    parts: Breakdown
    progress: float
    replicas: float | None
    batch: float | None
    rescales: int


class Pair(Struct, frozen=True):
    """A run on both sides, with the jobs that completed on both, by id: at least one."""

    run: str
    set: str
    policy: str
    seed: int
    real: dict[str, JobFigures]
    simulated: dict[str, JobFigures]
    real_steps: tuple[StepTime, ...] = ()
    simulated_steps: tuple[StepTime, ...] = ()
    real_batches: float | None = None
    """How close its batches come to the best ones (`analysis.run.batches`)."""
    simulated_batches: float | None = None


def paired(
    experiment: Experiment,
    simulated: Path,
    profiles: Mapping[str, MeasuredProfile],
    not_simulated: Mapping[str, str],
) -> Iterator[Pair | LeftOut]:
    """The usable runs of the experiment with their twins in `simulated`, and what is left out on either side.
    `not_simulated` gives the reason, by run, why it has no twin."""
    usable, mismatched = runs_of_same_jobs(experiment.runs)
    yield from (*experiment.left_out, *mismatched)
    usable_names = {run.name for run in usable}
    for run in experiment.runs:
        if run.name not in usable_names:
            continue
        twin = simulated / run.name / EVENTS_FILE
        if not twin.exists():
            why = ": ".join(filter(None, ("was not simulated", not_simulated.get(run.name))))
            yield LeftOut(run=run.name, why=why)
            continue
        log = read(twin)
        real_history, simulated_history = experiment.history(run), history(log)
        real, copy = completed_jobs(real_history), completed_jobs(simulated_history)
        on_both = sorted(real.keys() & copy.keys())
        if log.faults or not on_both:
            why = "; ".join(log.faults) or "no job completed on both sides"
            yield LeftOut(run=run.name, why=f"simulated: {why}")
            continue
        if on_one := sorted(real.keys() ^ copy.keys()):
            yield LeftOut(run=run.name, why=f"jobs that completed only on one side: {', '.join(on_one)}")
        yield Pair(
            run=run.name,
            set=run.set,
            policy=run.policy,
            seed=run.seed,
            real={job_id: real[job_id] for job_id in on_both},
            simulated={job_id: copy[job_id] for job_id in on_both},
            real_steps=step_times(real_history),
            simulated_steps=step_times(simulated_history),
            real_batches=batch_efficiency(real_history, profiles),
            simulated_batches=batch_efficiency(simulated_history, profiles),
        )


def completed_jobs(run: RunHistory) -> dict[str, JobFigures]:
    """By job id."""
    return {
        job_id: JobFigures(
            application=job.spec.application,
            jct_s=job.jct_s,
            parts=parts,
            progress=job.completed.progress,
            replicas=replicas_mean(job, run.last_s),
            batch=batch_mean(job),
            rescales=rescales(job),
        )
        for job_id, job in run.jobs.items()
        if job.completed and job.jct_s is not None and (parts := breakdown(job))
    }
