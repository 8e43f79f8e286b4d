"""What the round-based worlds share: how their jobs follow orders, and what they report of themselves."""

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
from services.simulator.worlds.interface import COLLECTOR, WorldEvent

NO_BATCH = JobConfig(atomic_batch=0)


@dataclass
class SimulatedJob:
    """A job of a fleet, with or without slots."""

    spec: JobSpec
    clock_s: float = 0.0
    delay_s: float = 0.0
    """Seconds that remain of its restart."""
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
    """Whether the current group has made a step."""
    points: dict[tuple[int, int, int], ProfilePoint] = field(default_factory=dict)
    parameters: ThroughputParameters | None = None
    statistics: GradientStatistics | None = None
    steps: float = 0.0
    examples: float = 0.0
    measured: tuple[float, float, float] = (0.0, 0.0, 1.0)
    """Step time (s), synchronization time (s) and gain of the current configuration."""
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
        """What an evaluation returns."""
        return float(self.epoch)


FitModel: TypeAlias = Callable[[tuple[ProfilePoint, ...]], tuple[ThroughputParameters, float]]
"""A model of these points, and its root mean squared logarithmic error."""

Member = TypeVar("Member", bound=SimulatedJob)


class Fleet(ABC, Generic[Member]):
    """All jobs of a world. A subclass says how they train."""

    def __init__(
        self, restart_s: float, memory: Memory | None = None, perturbation: Perturbation = UNPERTURBED
    ) -> None:
        """With `memory`, jobs start from what jobs of their application have shown. `perturbation` adds
        errors to what policies see."""
        self.memory = memory
        self.perturbation = perturbation
        self.restart_s = restart_s
        self.now_s = 0.0
        self.jobs: dict[str, Member] = {}
        """By id."""
        self.running: dict[str, Member] = {}
        """Those that hold slots, by id, in order of their starts."""
        self._events: list[WorldEvent] = []

    def isolation_key(self, spec: JobSpec) -> Hashable:
        """By default every job is different."""
        return spec.id

    def overhead_s(self, spec: JobSpec) -> float:
        return 0.0

    @abstractmethod
    def train(self, job: Member, seconds: float) -> None:
        """Let a job that holds slots run for `seconds`, including its restart delay."""

    def effective_config(self, job: Member, ordered: JobConfig) -> JobConfig:
        """The batch with which a job trains when its order says `ordered`."""
        return ordered

    # ------------------------------------------------------------------ orders

    def apply(self, orders: Orders, now_s: float) -> Sequence[WorldEvent]:
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
        return self._take_events()

    def _order(self, job: Member, order: JobOrder, now_s: float) -> None:
        job.generation = order.generation
        if not order.allocation:
            self._stop(job, now_s)
            saved = JobSaved(
                job_id=job.spec.id, generation=job.generation, checkpoint="", progress=job.progress
            )
            self._emit(now_s, order.leaving[0].node, saved)
        elif order.group > job.group:
            job.state_from = ("survivor" if job.placement else "checkpoint") if job.steps else "scratch"
            job.old_replicas = job.replicas
            self._stop(job, now_s)
            job.group, job.allocation = order.group, order.allocation
            job.placement = tuple(p.replicas for p in order.allocation)
            job.clock_s, job.delay_s, job.started = now_s, self.restart_s, False
            job.config = self.effective_config(job, order.config)
            self.running[job.spec.id] = job
        else:
            self.change_batch(job, self.effective_config(job, order.config))

    def _stop(self, job: Member, now_s: float) -> None:
        """End the current group."""
        if job.placement:
            self.sample(job, now_s)
            self._leave(job)

    def _leave(self, job: Member) -> None:
        job.allocation, job.placement = (), ()
        self.running.pop(job.spec.id, None)

    def _verify(self, order: VerifyOrder, now_s: float) -> None:
        """Compare the claim with what the job has really done."""
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
        self._emit(now_s, order.node, verified)
        done = VerificationDone(job_id=job.spec.id, metric=job.metric, findings=findings)
        self._emit(now_s, order.node, done)

    # ------------------------------------------------------------------ time

    def advance(self, until_s: float) -> tuple[float, Sequence[WorldEvent]]:
        seconds = until_s - self.now_s
        for job in list(self.running.values()):
            self.train(job, seconds)
        self.now_s = until_s
        return until_s, self._take_events()

    def wait_for_restart(self, job: Member, seconds: float) -> float:
        """Returns what remains of `seconds` after the rest of the job's restart."""
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
        self._emit_for(job, started)
        running = GenerationRunning(job_id=job.spec.id, generation=job.generation, progress=job.progress)
        self._emit_for(job, running)

    def trained(self, job: Member, seconds: float, steps: float, progress: float) -> None:
        """Record `seconds` of training in the current configuration, up to this progress."""
        job.progress = progress
        job.clock_s += seconds
        job.window_s += seconds
        job.steps += steps
        job.examples += steps * job.config.total_batch(job.replicas)

    def evaluated(self, job: Member, reached: bool) -> None:
        """Record an evaluation of the job. If it has `reached` its target, its slots become free."""
        done = Evaluated(
            job_id=job.spec.id,
            progress=job.progress,
            step=int(job.steps),
            metric=job.metric,
            reached=reached,
        )
        self._emit_for(job, done)
        if reached:
            claim = TargetReached(
                job_id=job.spec.id,
                generation=job.generation,
                checkpoint="",
                metric=job.metric,
                progress=job.progress,
            )
            self._emit_for(job, claim)
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
            self._emit_for(job, changed)

    def sample(self, job: Member, now_s: float) -> None:
        if job.window_s <= 0:
            return
        step_s, sync_s, gain = job.measured
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
            statistics=self._perturbed_statistics(job),
        )
        self._emit(now_s, job.allocation[0].node, sample)
        job.window_s, job.sampled = 0.0, (job.steps, job.progress)

    # ------------------------------------------------------------------ what is measured

    def observe(self, job: Member, step_s: float, sync_s: float) -> bool:
        """Record the times of the current configuration. Returns whether they are new."""
        key = (len(job.placement), job.replicas, job.config.atomic_batch)
        if key in job.points:
            return False
        step_s, sync_s = self.perturbation.perturbed_times(job.spec.id, key, step_s, sync_s)
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

    def _fitted(self, job: Member, parameters: ThroughputParameters, error: float) -> None:
        job.parameters = parameters
        fitted = ModelFitted(
            job_id=job.spec.id,
            parameters=parameters,
            statistics=self._perturbed_statistics(job),
            error=error,
            points=len(job.points),
            fit_s=0.0,
        )
        self._emit(job.clock_s, COLLECTOR, fitted)

    def refit(self, job: Member, fit: FitModel) -> None:
        """Fit the job's model again: to its own points by `fit`, or with a memory to its application's."""
        points = tuple(job.points.values())
        if self.memory is None:
            self._fitted(job, *fit(points))
            return
        self.memory.learn_points(job.spec.application, job.spec.id, points)
        if statistics := self._perturbed_statistics(job):
            self.memory.learn_statistics(job.spec.application, job.spec.id, statistics)
        parameters, _ = self.model(job)
        assert parameters is not None, "the memory has learned at least this job's points"
        self._fitted(job, parameters, fit_error(parameters, points))

    def model(self, job: Member) -> tuple[ThroughputParameters | None, GradientStatistics | None]:
        """What a job knows when it chooses its batch."""
        if self.memory is None:
            return job.parameters, self._perturbed_statistics(job)
        profile = self._profile(job)
        return profile.parameters, profile.statistics

    def _perturbed_statistics(self, job: Member) -> GradientStatistics | None:
        return job.statistics and self.perturbation.perturbed_statistics(job.statistics)

    def profiles(self, job_ids: Sequence[str]) -> tuple[JobProfile, ...]:
        known = [job for job_id in job_ids if (job := self.jobs.get(job_id))]
        return tuple(self._profile(job) for job in known if job.points or self.memory)

    def _profile(self, job: Member) -> JobProfile:
        own = JobProfile(
            job_id=job.spec.id,
            points=tuple(job.points.values()),
            parameters=job.parameters,
            statistics=self._perturbed_statistics(job),
            progress=job.progress,
            max_profiled_replicas=job.max_profiled_replicas,
            restart_s=self.restart_s,
        )
        return self.memory.recall(job.spec.application, job.spec.id, own) if self.memory else own

    # ------------------------------------------------------------------ events

    def _emit_for(self, job: Member, content: Fact | Event) -> None:
        self._emit(job.clock_s, job.allocation[0].node, content)

    def _emit(self, t_s: float, source: str, content: Fact | Event) -> None:
        self._events.append(WorldEvent(t_s, source, content))

    def _take_events(self) -> Sequence[WorldEvent]:
        events, self._events = self._events, []
        return sorted(events, key=lambda event: event.t_s)
