"""A world without files: jobs whose models are drawn from a seed, for clusters of any size.

There are four families of jobs, from minutes to days on one slot. A job's step times follow the throughput
model of Pollux (section 3.2) exactly, with parameters around those of its family. Its gradient noise grows
geometrically during the training, as has been measured on real jobs (McCandlish et al. 2018), so that larger
batches become more useful. It completes after `EPOCHS` equal parts of its progress. The budget that it
declares is larger than its need, by a factor that policies do not know.

A job's model depends only on the world's seed and on the job's name: a job is the same in every workload.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from msgspec import structs

from common.goodput.fit import fit_throughput
from common.goodput.model import accumulation_time, gain, last_pass_time, step_time
from common.types import (
    ApplicationSpec,
    GradientStatistics,
    JobSpec,
    ProfilePoint,
    Struct,
    ThroughputParameters,
    batch_config,
)
from services.simulator.worlds.fleet import Fleet, SimulatedJob
from workloads.files.workload_file import Arrival, JobFields, Workload, complete_spec

EPOCHS = 10
RESTART_S = 30.0
MAX_REPLICAS = 64
REFIT_ERROR = 0.05
"""A configuration whose times the current model predicts within this relative error needs no new fit."""
SPREAD = 0.3
"""Standard deviation of a job's log times around those of its family; for the log noise, twice as much."""
MIN_NEEDED_FRACTION = 0.7
"""A job needs at least this fraction of the progress that it declares, and at most all of it."""
UTILIZATION = 0.6
"""The rate of arrivals in a generated workload: on one slot each at M0, its jobs would use this fraction of
the cluster."""


class Family(Struct, frozen=True):
    share: float
    """Of the jobs of a generated workload."""
    hours: tuple[float, float]
    """Least and most that a job needs on one slot at M0."""
    replicas: tuple[int, int]
    """Fewest and most that a user requests; powers of two."""
    noise: tuple[float, float]
    """Gradient variance at M0 / squared norm of the gradient, at the start and at the end of the training."""
    initial_batch_size: int
    max_batch_size: int
    min_atomic_batch: int
    max_atomic_batch: int


FAMILIES = {
    "small": Family(0.72, (0.1, 1.0), (1, 4), (1.0, 20.0), 128, 4096, 32, 1024),
    "medium": Family(0.20, (1.0, 8.0), (1, 8), (0.5, 20.0), 32, 1024, 8, 64),
    "large": Family(0.06, (8.0, 40.0), (4, 16), (1.0, 40.0), 16, 512, 4, 16),
    "xlarge": Family(0.02, (60.0, 250.0), (8, 32), (2.0, 60.0), 256, 12_800, 32, 256),
}
PARAMETERS = {
    "small": ThroughputParameters(0.02, 2e-4, 0.05, 2e-3, 0.01, 5e-4, 1.6),
    "medium": ThroughputParameters(0.05, 5e-3, 0.15, 5e-3, 0.03, 1e-3, 2.0),
    "large": ThroughputParameters(0.08, 3e-2, 0.25, 4e-3, 0.05, 2e-3, 2.5),
    "xlarge": ThroughputParameters(0.1, 3e-3, 0.3, 5e-3, 0.08, 2e-3, 2.0),
}
"""Of each family; a job's own parameters are around them."""


def _application(name: str, family: Family) -> ApplicationSpec:
    """Its progress budget is that of the family's longest job."""
    initial = family.initial_batch_size
    steps = 3600.0 * family.hours[1] / float(step_time(PARAMETERS[name], 1, 1, initial, 0))
    return ApplicationSpec(
        name=name,
        optimizer="sgd",
        metric="epochs",
        metric_mode="max",
        target=EPOCHS,
        target_min=EPOCHS,
        target_max=EPOCHS,
        initial_batch_size=initial,
        max_batch_size=family.max_batch_size,
        min_atomic_batch=family.min_atomic_batch,
        max_atomic_batch=family.max_atomic_batch,
        examples=int(steps * initial / EPOCHS),
        max_progress=steps,
        evaluate_every=steps / EPOCHS,
    )


APPLICATIONS = {name: _application(name, family) for name, family in FAMILIES.items()}


class SyntheticModel(Struct, frozen=True):
    """The true model of one job."""

    parameters: ThroughputParameters
    statistics: tuple[GradientStatistics, ...]
    """By epoch."""
    progress: float
    """What the job needs."""
    declared_progress: float
    hours: float
    """On one slot at M0."""


def draw_model(application: str, job_id: str, seed: int) -> SyntheticModel:
    family = FAMILIES[application]
    rng = np.random.default_rng([seed, zlib.crc32(job_id.encode())])
    compute, network = np.exp(SPREAD * rng.standard_normal(2)).tolist()
    noise_factor = math.exp(2 * SPREAD * rng.standard_normal())
    low, high = family.hours
    hours = low * (high / low) ** rng.random()
    own = PARAMETERS[application]
    parameters = structs.replace(
        own,
        alpha_c=own.alpha_c * compute,
        beta_c=own.beta_c * compute,
        alpha_n=own.alpha_n * network,
        beta_n=own.beta_n * network,
        alpha_r=own.alpha_r * network,
        beta_r=own.beta_r * network,
    )
    start, end = family.noise
    growth = [(end / start) ** (epoch / (EPOCHS - 1)) for epoch in range(EPOCHS)]
    progress = 3600.0 * hours / float(step_time(parameters, 1, 1, family.initial_batch_size, 0))
    return SyntheticModel(
        parameters=parameters,
        statistics=tuple(GradientStatistics(sqr=1.0, var=start * noise_factor * g) for g in growth),
        progress=progress,
        declared_progress=progress / (MIN_NEEDED_FRACTION + (1.0 - MIN_NEEDED_FRACTION) * rng.random()),
        hours=hours,
    )


def generate(jobs: int, seed: int, slots: int) -> Workload:
    """A workload of jobs of all families. They arrive at random, at a mean rate that keeps `slots` busy."""
    rng = np.random.default_rng([seed, jobs])
    names = list(FAMILIES)
    drawn = rng.choice(len(names), size=jobs, p=[family.share for family in FAMILIES.values()])
    specs = []
    hours = 0.0
    for number, family_number in enumerate(drawn.tolist()):
        name = names[family_number]
        family = FAMILIES[name]
        job_id = f"{name}-{number}"
        hours += draw_model(name, job_id, seed).hours
        fewest, most = (min(count, slots) for count in family.replicas)
        replicas = fewest * 2 ** int(rng.integers(0, int(math.log2(most / fewest)) + 1))
        fields = JobFields(
            application=name,
            id=job_id,
            replicas=replicas,
            batch_size=min(family.initial_batch_size * replicas, family.max_batch_size),
        )
        specs.append(complete_spec(fields, APPLICATIONS, job_id, seed))
    gaps_s = rng.exponential(3600.0 * hours / (slots * UTILIZATION * jobs), size=jobs)
    rows = [
        Arrival(at_s=at_s, spec=spec) for at_s, spec in zip(accumulate(gaps_s.tolist()), specs, strict=True)
    ]
    return Workload(name=f"synthetic-{jobs}", seed=seed, rows=tuple(rows))


@dataclass(kw_only=True)
class SyntheticJob(SimulatedJob):
    model: SyntheticModel
    pace: tuple[float, float] = (0.0, 0.0)
    """Seconds and progress of a step, in the configuration and epoch of `pace_key`."""
    pace_key: tuple[object, ...] = ()


def _is_predicted(job: SyntheticJob, pass_s: float, last_s: float) -> bool:
    """Whether the job's model predicts the times of its current configuration."""
    if job.parameters is None:
        return False
    atomic = job.config.atomic_batch
    predicted_s = (
        accumulation_time(job.parameters, atomic),
        last_pass_time(job.parameters, len(job.placement), job.replicas, atomic),
    )
    return np.allclose(predicted_s, (pass_s, last_s), rtol=REFIT_ERROR, atol=0.0)


def _fit(points: Sequence[ProfilePoint]) -> tuple[ThroughputParameters, float]:
    fit = fit_throughput(points)
    return fit.parameters, fit.error


class SyntheticWorld(Fleet[SyntheticJob]):
    """Jobs train with the batch size of their orders."""

    event_driven = False
    accumulates_alone = False
    applications = APPLICATIONS

    def __init__(self, *, seed: int = 0, slots: int = 4, restart_s: float = RESTART_S) -> None:
        """`slots` of each node, for the oracle."""
        super().__init__(restart_s)
        self.seed, self.slots = seed, slots
        self.oracle = self
        self._oracle_steps_s: dict[tuple[str, int], float] = {}

    def add_job(self, spec: JobSpec) -> JobSpec:
        model = draw_model(spec.application, spec.id, self.seed)
        most = min(spec.max_replicas, max(MAX_REPLICAS, spec.replicas))
        spec = structs.replace(spec, max_replicas=most, max_progress=model.declared_progress)
        self.jobs[spec.id] = SyntheticJob(spec=spec, model=model)
        return spec

    def train(self, job: SyntheticJob, seconds: float) -> None:
        seconds = self.wait_for_restart(job, seconds)
        while seconds > 0 and job.placement:
            step_s, gained = self._pace(job)
            epoch_end = job.model.progress * (job.epoch + 1) / EPOCHS
            needed_s = (epoch_end - job.progress) / gained * step_s
            if needed_s > seconds:
                steps = seconds / step_s
                self.trained(job, seconds, steps, job.progress + steps * gained)
                return
            self.trained(job, needed_s, needed_s / step_s, epoch_end)
            seconds -= needed_s
            job.epoch += 1
            self.sample(job, job.clock_s)
            self.evaluated(job, reached=job.epoch == EPOCHS)

    def _pace(self, job: SyntheticJob) -> tuple[float, float]:
        key = (job.group, job.config, job.epoch)
        if key != job.pace_key:
            job.pace_key = key
            job.statistics = job.model.statistics[job.epoch]
            parameters, nodes, replicas = job.model.parameters, len(job.placement), job.replicas
            atomic, passes = job.config.atomic_batch, job.config.accumulation
            pass_s = float(accumulation_time(parameters, atomic))
            last_s = float(last_pass_time(parameters, nodes, replicas, atomic))
            batch = job.config.total_batch(replicas)
            gained = float(gain(job.statistics, batch / job.spec.min_batch_size))
            job.pace = passes * pass_s + last_s, gained
            job.measured = last_s, last_s - pass_s, gained
            if self.observe(job, last_s, last_s - pass_s) and not _is_predicted(job, pass_s, last_s):
                self.refit(job, _fit)
        return job.pace

    # ------------------------------------------------------------------ the oracle

    def step_time_s(self, job_id: str, replicas: int) -> float:
        key = (job_id, replicas)
        if key not in self._oracle_steps_s:
            job = self.jobs[job_id]
            config = batch_config(job.spec.batch_size, replicas, job.spec)
            nodes = math.ceil(replicas / self.slots)
            batch = config.atomic_batch, config.accumulation
            step_s = float(step_time(job.model.parameters, nodes, replicas, *batch))
            self._oracle_steps_s[key] = step_s
        return self._oracle_steps_s[key]

    def remaining_steps(self, job_id: str) -> float:
        job = self.jobs[job_id]
        scale = job.spec.batch_size / job.spec.min_batch_size
        gains: Sequence[float] = [float(gain(s, scale)) for s in job.model.statistics[job.epoch :]]
        part = job.model.progress / EPOCHS
        begun = job.progress - part * job.epoch
        return sum(part / g for g in gains) - begun / gains[0]
