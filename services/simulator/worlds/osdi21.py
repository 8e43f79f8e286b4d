"""The world in which the artifact of the Pollux paper compared policies (OSDI'21, branch `osdi21-artifact`).

Jobs run at measured step times and gradient statistics. This world reproduces the artifact's simulator in
every detail, so that it reproduces the published completion times; all of that simulator's peculiarities are
in this file and nowhere else. Jobs advance in whole rounds, the end of an epoch is rounded to a whole second,
and arrivals and finishes wait for the next round. Under a policy that adapts batch sizes, a job chooses its
own batch after every stretch of training, by a throughput model fitted to its own exact step times. A job
completes when it has trained its epochs; their number is its metric.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import structs

from common.goodput.fit import fit_throughput
from common.goodput.model import BatchBounds, FloatArray, best_batch
from common.lifecycle import UserError
from common.types import (
    ApplicationSpec,
    GradientStatistics,
    JobConfig,
    JobSpec,
    ProfilePoint,
    ThroughputParameters,
)
from services.metrics_collector.memory import Memory
from services.simulator.perturbation import UNPERTURBED, Perturbation
from services.simulator.worlds.fleet import Fleet, SimulatedJob
from services.simulator.worlds.interface import WorldEvent
from workloads.files.measured_profile import StepTimes, packed, read_columns, validation_files

OPTIMIZERS: dict[str, Literal["sgd", "adam", "adamw"]] = {
    "bert": "adamw",
    "cifar10": "sgd",
    "deepspeech2": "sgd",
    "imagenet": "sgd",
    "ncf": "adam",
    "yolov3": "sgd",
}
EPOCHS = {"bert": 2, "cifar10": 100, "deepspeech2": 80, "imagenet": 90, "ncf": 10, "yolov3": 50}
LARGEST_LOCAL = {"yolov3": 8}
"""The largest local batch, if it is not the largest one measured."""
FIXED_BATCH = {"ncf": 32_768}
"""Applications that have one replica and this batch size under every policy."""
MAX_REPLICAS = 64
MAX_NODES = 16
MAX_SLOTS = 4
"""What the traces measured. More nodes take as long as MAX_NODES; a node has at most MAX_SLOTS replicas."""
ROUNDING = 1e-8
RESTART_S = 30.0
SAMPLES = 32
"""A job reports a sample about this many times or more during its training."""


class _Times(StepTimes):
    """Placements that were not measured are interpolated as in the artifact: by triangulating all points."""

    _triangulated: Callable[[list[list[int]]], FloatArray] | None = None

    def elsewhere(self, placement: tuple[int, ...], atomic: int) -> tuple[float, ...]:
        if self._triangulated is None:
            from scipy.interpolate import LinearNDInterpolator

            points = np.array(self.points)
            self._triangulated = LinearNDInterpolator(points[:, :3], points[:, 3:])
        nodes = min(len(placement), MAX_NODES)
        times: list[float] = self._triangulated([[nodes, sum(placement), atomic]])[0].tolist()
        return tuple(times)


class Application:
    """The traces of one application. Times are in seconds, progress is in steps at M0."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises UserError, which names the missing or broken file."""
        self.epochs = EPOCHS[name]
        self._times = _Times(folder / name)
        files = validation_files(folder / name)
        self.batches = list(files)
        rows = [
            read_columns(files[b], "progress,iteration,grad_sqr,grad_var")[: self.epochs]
            for b in self.batches
        ]
        if short := [b for b, epochs in zip(self.batches, rows, strict=True) if len(epochs) < self.epochs]:
            raise UserError(f"{files[short[0]]}: fewer than {self.epochs} rows, one an epoch")
        self._validation = np.array(rows)  # [batches, epochs, columns]
        self.progress = [0.0, *self._validation[:, :, 0].min(axis=0).tolist()]
        """By number of trained epochs."""
        initial, largest = self.batches[0], self.batches[-1]
        local = self._times.local_sizes
        self.min_local, self.max_local = min(local), LARGEST_LOCAL.get(name, max(local))
        self.fixed_batch = FIXED_BATCH.get(name)
        self.max_replicas = 1 if self.fixed_batch else min(MAX_REPLICAS, largest // self.min_local)
        self.spec = ApplicationSpec(
            name=name,
            optimizer=OPTIMIZERS[name],
            metric="epochs",
            metric_mode="max",
            target=self.epochs,
            target_min=self.epochs,
            target_max=self.epochs,
            initial_batch_size=initial,
            max_batch_size=largest,
            min_atomic_batch=self.min_local,
            max_atomic_batch=self.max_local,
            examples=int(initial * self.progress[1]),
            max_progress=self.epochs * self.progress[1],
            evaluate_every=self.progress[1],
        )
        self.bounds = BatchBounds(
            initial=initial,
            maximum=largest,
            min_atomic=self.min_local,
            max_atomic=self.max_local,
            accumulates_alone=True,
        )
        self._statistics: dict[tuple[int, int], GradientStatistics] = {}
        self._iterations: dict[tuple[int, int], float] = {}

    def times(self, placement: tuple[int, ...], atomic: int) -> tuple[float, float]:
        """Step and synchronization time (s). `placement` is the number of replicas on each node."""
        step_s, sync_s, *_ = self._times.times(placement, atomic)
        return step_s, sync_s

    def statistics(self, batch: int, epoch: int) -> GradientStatistics:
        known = self._statistics.get((batch, epoch))
        if known is None:
            sqr, var = self._validated(batch, epoch, 2), self._validated(batch, epoch, 3)
            known = self._statistics[batch, epoch] = GradientStatistics(sqr=sqr, var=var)
        return known

    def iterations(self, batch: int, epoch: int) -> float:
        """Steps with this batch size in all epochs up to and including number `epoch`, counted from 0."""
        if (batch, epoch) not in self._iterations:
            self._iterations[batch, epoch] = self._validated(batch, epoch, 1)
        return self._iterations[batch, epoch]

    def _validated(self, batch: int, epoch: int, column: int) -> float:
        return float(np.interp(batch, self.batches, self._validation[:, epoch, column]))

    def split(self, target: int, replicas: int) -> JobConfig:
        """The configuration for a total batch size; a single replica above M0 accumulates at least once."""
        local = math.ceil(target / replicas - ROUNDING)
        accumulation = math.ceil(local / self.max_local - ROUNDING) - 1
        if replicas == 1 and target > self.bounds.initial:
            accumulation = max(accumulation, 1)
        atomic = math.ceil(local / (accumulation + 1) - ROUNDING)
        return self._capped(JobConfig(atomic_batch=atomic, accumulation=accumulation), replicas)

    def ordered(self, config: JobConfig, replicas: int) -> JobConfig:
        """The configuration with which a job trains when a policy orders `config`."""
        if replicas == 1 and config.atomic_batch > self.bounds.initial and not config.accumulation:
            config = JobConfig(atomic_batch=math.ceil(config.atomic_batch / 2), accumulation=1)
        return self._capped(config, replicas)

    def _capped(self, config: JobConfig, replicas: int) -> JobConfig:
        most = self.bounds.maximum // (replicas * (config.accumulation + 1))
        return config if config.atomic_batch <= most else structs.replace(config, atomic_batch=most)


@lru_cache(maxsize=32)
def read_application(folder: Path, name: str) -> Application:
    """Read once in a process, so that several runs share what has been interpolated."""
    return Application(folder, name)


# --------------------------------------------------------------------------- the world


class Osdi21World(Fleet[SimulatedJob]):
    """Jobs of the artifact's workloads."""

    event_driven = False
    accumulates_alone = True

    def __init__(
        self,
        traces: Path,
        *,
        adapts: bool,
        fits_models: bool = True,
        slots: int = MAX_SLOTS,
        restart_s: float = RESTART_S,
        interference: float = 0.0,
        perturbation: Perturbation = UNPERTURBED,
        memory: Memory | None = None,
    ) -> None:
        """`traces` is the artifact's folder of that name. `adapts`: whether jobs choose their batch size by
        goodput, or train with the batch size of their orders. `fits_models`: whether models are fitted even
        if the jobs do not need them, for the policy or the log.

        Raises UserError if the traces are missing, or did not measure so many `slots` on a node."""
        if not 1 <= slots <= MAX_SLOTS:
            raise UserError(
                f"slots {slots}: allowed in osdi21: 1 to {MAX_SLOTS}, which the traces have measured"
            )
        self.traces = {name: read_application(traces, name) for name in EPOCHS}
        super().__init__(restart_s, memory, perturbation)
        self.applications = {name: application.spec for name, application in self.traces.items()}
        self.adapts, self.fits_models = adapts, fits_models or adapts
        self.slots, self.interference = slots, interference
        self.oracle = self
        self._oracle_s: dict[tuple[str, int, int], float] = {}
        self._crowded: set[str] = set()
        """Nodes that hold two or more jobs which span nodes."""

    def isolation_key(self, spec: JobSpec) -> Hashable:
        return spec.application

    def add_job(self, spec: JobSpec) -> JobSpec:
        most = self.traces[spec.application].max_replicas
        spec = structs.replace(spec, max_replicas=most)
        self.jobs[spec.id] = SimulatedJob(spec)
        return spec

    def step_time_s(self, job_id: str, replicas: int) -> float:
        spec = self.jobs[job_id].spec
        key = (spec.application, spec.batch_size, replicas)
        if key not in self._oracle_s:
            application = self.traces[spec.application]
            config = application.split(spec.batch_size, replicas)
            step_s, sync_s = application.times(packed(replicas, self.slots), config.atomic_batch)
            self._oracle_s[key] = step_s + (step_s - sync_s) * config.accumulation
        return self._oracle_s[key]

    def remaining_steps(self, job_id: str) -> float:
        job = self.jobs[job_id]
        application, batch = self.traces[job.spec.application], job.spec.batch_size
        last = application.epochs - 1
        if job.epoch >= last:
            return 1.0
        return application.iterations(batch, last) - application.iterations(batch, job.epoch)

    def effective_config(self, job: SimulatedJob, ordered: JobConfig) -> JobConfig:
        application = self.traces[job.spec.application]
        if not self.adapts:
            return application.ordered(ordered, job.replicas)
        if application.fixed_batch:
            return application.split(application.fixed_batch, job.replicas)
        parameters, statistics = self.model(job)
        if parameters is None:
            smallest = application.min_local * job.replicas
            return application.split(max(application.bounds.initial, smallest), job.replicas)
        nodes = len(job.placement)
        return _best_config(application.bounds, parameters, statistics, nodes, job.replicas)

    def advance(self, until_s: float) -> tuple[float, Sequence[WorldEvent]]:
        spread = [job for job in self.running.values() if len(job.placement) > 1]
        guests = Counter(placement.node for job in spread for placement in job.allocation)
        self._crowded = {node for node, jobs in guests.items() if jobs > 1}
        return super().advance(until_s)

    def _speed(self, job: SimulatedJob) -> float:
        slowed = len(job.placement) > 1 and any(p.node in self._crowded for p in job.allocation)
        return 1.0 - self.interference if slowed else 1.0

    def train(self, job: SimulatedJob, seconds: float) -> None:
        application, speed = self.traces[job.spec.application], self._speed(job)
        seconds = self.wait_for_restart(job, seconds)
        while seconds > 0 and job.placement:
            config = job.config
            batch = config.total_batch(job.replicas)
            job.statistics = application.statistics(batch, job.epoch)
            sqr, var = job.statistics.sqr, job.statistics.var
            gain = (var + sqr) / (var / (batch / application.bounds.initial) + sqr)
            step_s, sync_s = application.times(job.placement, config.atomic_batch)
            job.measured = step_s, sync_s, gain
            if self.observe(job, step_s, sync_s) and self.fits_models:
                self.refit(job, fit)
            total_s = step_s + (step_s - sync_s) * config.accumulation
            rate = gain / total_s * speed
            epoch_end = application.progress[job.epoch + 1]
            if job.progress + rate * seconds < epoch_end:
                self.trained(job, seconds, seconds / total_s * speed, job.progress + rate * seconds)
                seconds = 0
            else:
                spent_s = min(round((epoch_end - job.progress) / rate), seconds)
                self.trained(job, spent_s, spent_s / total_s * speed, epoch_end)
                seconds -= spent_s
                self._end_epoch(job, application)
            if self.adapts and job.placement:
                self.change_batch(job, self.effective_config(job, config))

    def _end_epoch(self, job: SimulatedJob, application: Application) -> None:
        job.epoch += 1
        done = job.epoch == application.epochs
        if done or job.progress - job.sampled[1] >= application.progress[-1] / SAMPLES:
            self.sample(job, job.clock_s)
            if self.fits_models:
                self.refit(job, fit)
        self.evaluated(job, reached=done)


@lru_cache(maxsize=10_000)
def fit(points: tuple[ProfilePoint, ...]) -> tuple[ThroughputParameters, float]:
    """Jobs of one application often have the same exact times, so each set of points is fitted once."""
    fitted = fit_throughput(points)
    return fitted.parameters, fitted.error


@lru_cache(maxsize=100_000)
def _best_config(
    bounds: BatchBounds,
    parameters: ThroughputParameters,
    statistics: GradientStatistics | None,
    nodes: int,
    replicas: int,
) -> JobConfig:
    best = best_batch(bounds, parameters, statistics, nodes, replicas)
    return JobConfig(atomic_batch=int(best.atomic_batch), accumulation=int(best.accumulation))
