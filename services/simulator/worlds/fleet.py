"""What the jobs of every world have in common: the orders that they get, and what they tell of themselves."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from common.protocol import (
    BatchChanged,
    Evaluated,
    Event,
    Fact,
    GenerationRunning,
    GenerationStarted,
    JobOrder,
    JobSaved,
    ModelFitted,
    Orders,
    TargetReached,
    TrainingSample,
    VerificationDone,
    Verified,
    VerifyOrder,
)
from common.types import (
    Allocation,
    GradientStatistics,
    JobConfig,
    JobProfile,
    JobSpec,
    ProfilePoint,
    ThroughputParameters,
)
from services.metrics_collector.memory import Memory, fit_error
from services.simulator.perturbation import UNPERTURBED, Perturbation
from services.simulator.worlds.interface import COLLECTOR, Happening

NO_BATCH = JobConfig(atomic_batch=0)


@dataclass
class SimulatedJob:
    """A job with slots, or with state from when it had some."""

    spec: JobSpec
    clock_s: float = 0.0
    delay_s: float = 0.0
    """What is left of its restart."""
    epoch: int = 0
    progress: float = 0.0
    generation: int = 0
    group: int = 0
    allocation: Allocation = ()
    placement: tuple[int, ...] = ()
    """Replicas on each of its nodes."""
    config: JobConfig = NO_BATCH
    state_from: str = "scratch"
    old_replicas: int = 0
    started: bool = False
    """Whether its present group has made a step."""
    points: dict[tuple[int, int, int], ProfilePoint] = field(default_factory=dict)
    parameters: ThroughputParameters | None = None
    statistics: GradientStatistics | None = None
    steps: float = 0.0
    examples: float = 0.0
    shown: tuple[float, float, float] = (0.0, 0.0, 1.0)
    """Step time, synchronisation time and gain of the present configuration."""
    window_s: float = 0.0
    """Seconds of training since the last sample."""
    sampled: tuple[float, float] = (0.0, 0.0)
    """Steps and progress at the last sample."""
    max_profiled_replicas: int = 0
    verified: bool = False

    @property
    def replicas(self) -> int:
        return sum(self.placement)

    @property
    def metric(self) -> float:
        """What an evaluation of it would say."""
        return float(self.epoch)


OwnFit: TypeAlias = Callable[[tuple[ProfilePoint, ...]], tuple[ThroughputParameters, float]]
"""A model of these points, and its root mean squared logarithmic error."""

Member = TypeVar("Member", bound=SimulatedJob)


class Fleet(ABC, Generic[Member]):
    """All jobs of a world, by id. `running` are those that hold slots, in order of their starts."""

    def __init__(
        self, restart_s: float, memory: Memory | None = None, errors: Perturbation = UNPERTURBED
    ) -> None:
        """With a `memory`, jobs start from what jobs of their application have shown. `errors` are in what
        is known of them."""
        self.memory = memory
        self.errors = errors
        self.restart_s = restart_s
        self.now_s = 0.0
        self.jobs: dict[str, Member] = {}
        self.running: dict[str, Member] = {}
        self._happened: list[Happening] = []

    def kind(self, spec: JobSpec) -> Hashable:
        """Every job is different, unless a world says otherwise."""
        return spec.id

    def fixed_s(self, spec: JobSpec) -> float:
        return 0.0

    @abstractmethod
    def train(self, job: Member, seconds: float) -> None:
        """Let a job that holds slots run for so long, its restart delay included."""

    def wanted_batch(self, job: Member, ordered: JobConfig) -> JobConfig:
        """What a job makes of the batch that it is ordered to train with."""
        return ordered

    # ------------------------------------------------------------------ orders

    def apply(self, orders: Orders, now_s: float) -> Sequence[Happening]:
        named = set()
        for order in orders.jobs:
            named.add(order.spec.id)
            job = self.jobs[order.spec.id]
            if order.generation > job.generation:
                self._order(job, order, now_s)
        for job_id in [job_id for job_id in self.running if job_id not in named]:
            self._stop(self.running[job_id], now_s)
        for verify in orders.verifications:
            job = self.jobs[verify.spec.id]
            if not job.verified:
                job.verified = True
                self._verify(verify, now_s)
        return self.take_happened()

    def _order(self, job: Member, order: JobOrder, now_s: float) -> None:
        job.generation = order.generation
        if not order.allocation:
            self._stop(job, now_s)
            saved = JobSaved(
                job_id=job.spec.id, generation=job.generation, checkpoint="", progress=job.progress
            )
            self.tell(now_s, order.leaving[0].node, saved)
        elif order.group > job.group:
            job.state_from = ("survivor" if job.placement else "checkpoint") if job.steps else "scratch"
            job.old_replicas = job.replicas
            self._stop(job, now_s)
            job.group, job.allocation = order.group, order.allocation
            job.placement = tuple(p.replicas for p in order.allocation)
            job.clock_s, job.delay_s, job.started = now_s, self.restart_s, False
            job.config = self.wanted_batch(job, order.config)
            self.running[job.spec.id] = job
        else:
            self.change_batch(job, self.wanted_batch(job, order.config))

    def _stop(self, job: Member, now_s: float) -> None:
        """The end of its present group."""
        if job.placement:
            self.sample(job, now_s)
            self._leave(job)

    def _leave(self, job: Member) -> None:
        job.allocation, job.placement = (), ()
        self.running.pop(job.spec.id, None)

    def _verify(self, order: VerifyOrder, now_s: float) -> None:
        """The world checks its own books: what the job has really done."""
        job = self.jobs[order.spec.id]
        findings = (
            () if job.metric == order.metric else (f"{job.metric:g} reached, {order.metric:g} reported",)
        )
        verified = Verified(
            job_id=job.spec.id,
            ok=not findings,
            metric=job.metric,
            reported_metric=order.metric,
            epochs=job.epoch,
            findings=findings,
        )
        self.tell(now_s, order.node, verified)
        done = VerificationDone(job_id=job.spec.id, metric=job.metric, findings=findings)
        self.tell(now_s, order.node, done)

    # ------------------------------------------------------------------ time

    def advance(self, until_s: float) -> tuple[float, Sequence[Happening]]:
        seconds = until_s - self.now_s
        for job in list(self.running.values()):
            self.train(job, seconds)
        self.now_s = until_s
        return until_s, self.take_happened()

    def wait_for_restart(self, job: Member, seconds: float) -> float:
        """What is left of `seconds` after the rest of the job's restart."""
        delay_s = min(job.delay_s, seconds)
        job.delay_s -= delay_s
        job.clock_s += delay_s
        if seconds > delay_s and not job.started:
            self._start(job)
        return seconds - delay_s

    def _start(self, job: Member) -> None:
        job.started = True
        started = GenerationStarted(
            job_id=job.spec.id,
            generation=job.group,
            old_replicas=job.old_replicas,
            allocation=job.allocation,
            config=job.config,
            state_from=job.state_from,
            seconds_lost=self.restart_s,
            progress=job.progress,
        )
        self.tell_of(job, started)
        running = GenerationRunning(job_id=job.spec.id, generation=job.generation, progress=job.progress)
        self.tell_of(job, running)

    def trained(self, job: Member, seconds: float, steps: float, progress: float) -> None:
        """Book a stretch in the present configuration, up to this progress."""
        job.progress = progress
        job.clock_s += seconds
        job.window_s += seconds
        job.steps += steps
        job.examples += steps * job.config.total_batch(job.replicas)

    def evaluated(self, job: Member, reached: bool) -> None:
        """The job has been evaluated; with its target `reached`, its slots become free."""
        done = Evaluated(
            job_id=job.spec.id,
            progress=job.progress,
            step=int(job.steps),
            metric=job.metric,
            reached=reached,
        )
        self.tell_of(job, done)
        if reached:
            claim = TargetReached(
                job_id=job.spec.id,
                generation=job.generation,
                checkpoint="",
                metric=job.metric,
                progress=job.progress,
            )
            self.tell_of(job, claim)
            self._leave(job)

    def change_batch(self, job: Member, config: JobConfig) -> None:
        if config == job.config:
            return
        self.sample(job, job.clock_s)
        job.config = config
        if job.started:
            changed = BatchChanged(
                job_id=job.spec.id,
                generation=job.generation,
                config=config,
                total_batch=config.total_batch(job.replicas),
                step=int(job.steps),
            )
            self.tell_of(job, changed)

    def sample(self, job: Member, now_s: float) -> None:
        if job.window_s <= 0:
            return
        step_s, sync_s, gain = job.shown
        steps = int(job.steps) - int(job.sampled[0])
        sample = TrainingSample(
            job_id=job.spec.id,
            generation=job.generation,
            nodes=len(job.placement),
            replicas=job.replicas,
            config=job.config,
            window_s=job.window_s,
            steps=steps,
            timed_steps=steps,
            accumulation_s=step_s - sync_s,
            step_s=step_s,
            sync_s=sync_s,
            total_steps=int(job.steps),
            total_examples=int(job.examples),
            progress=job.progress,
            epoch=job.epoch,
            loss=math.nan,
            gain=gain,
            statistics=self._told_statistics(job),
        )
        self.tell(now_s, job.allocation[0].node, sample)
        job.window_s, job.sampled = 0.0, (job.steps, job.progress)

    # ------------------------------------------------------------------ what is measured

    def observe(self, job: Member, step_s: float, sync_s: float) -> bool:
        """Note the times of the present configuration. Whether they are new."""
        key = (len(job.placement), job.replicas, job.config.atomic_batch)
        if key in job.points:
            return False
        step_s, sync_s = self.errors.told_times(job.spec.id, key, step_s, sync_s)
        job.points[key] = ProfilePoint(
            nodes=key[0],
            replicas=key[1],
            atomic_batch=key[2],
            accumulation_s=step_s - sync_s,
            step_s=step_s,
            samples=1,
        )
        job.max_profiled_replicas = max(job.max_profiled_replicas, job.replicas)
        return True

    def fitted(self, job: Member, parameters: ThroughputParameters, error: float) -> None:
        job.parameters = parameters
        fitted = ModelFitted(
            job_id=job.spec.id,
            parameters=parameters,
            statistics=self._told_statistics(job),
            error=error,
            points=len(job.points),
            fit_s=0.0,
        )
        self.tell(job.clock_s, COLLECTOR, fitted)

    def refit(self, job: Member, fit: OwnFit) -> None:
        """The job's model anew: by `fit` from its own points, or with a memory its application's."""
        points = tuple(job.points.values())
        if self.memory is None:
            self.fitted(job, *fit(points))
            return
        self.memory.learn_points(job.spec.application, job.spec.id, points)
        if statistics := self._told_statistics(job):
            self.memory.learn_statistics(job.spec.application, job.spec.id, statistics)
        parameters, _ = self.model(job)
        assert parameters is not None, "the memory has learned at least this job's points"
        self.fitted(job, parameters, fit_error(parameters, points))

    def model(self, job: Member) -> tuple[ThroughputParameters | None, GradientStatistics | None]:
        """By which a job chooses its batch."""
        if self.memory is None:
            return job.parameters, self._told_statistics(job)
        profile = self._profile(job)
        return profile.parameters, profile.statistics

    def _told_statistics(self, job: Member) -> GradientStatistics | None:
        return job.statistics and self.errors.told_statistics(job.statistics)

    def profiles(self, job_ids: Sequence[str]) -> tuple[JobProfile, ...]:
        known = [job for job_id in job_ids if (job := self.jobs.get(job_id))]
        return tuple(self._profile(job) for job in known if job.points or self.memory)

    def _profile(self, job: Member) -> JobProfile:
        own = JobProfile(
            job_id=job.spec.id,
            points=tuple(job.points.values()),
            parameters=job.parameters,
            statistics=self._told_statistics(job),
            progress=job.progress,
            max_profiled_replicas=job.max_profiled_replicas,
            restart_s=self.restart_s,
        )
        return self.memory.recall(job.spec.application, job.spec.id, own) if self.memory else own

    # ------------------------------------------------------------------ what is told

    def tell_of(self, job: Member, what: Fact | Event) -> None:
        self.tell(job.clock_s, job.allocation[0].node, what)

    def tell(self, t_s: float, source: str, what: Fact | Event) -> None:
        self._happened.append(Happening(t_s, source, what))

    def take_happened(self) -> Sequence[Happening]:
        happened, self._happened = self._happened, []
        return sorted(happened, key=lambda happening: happening.t_s)
