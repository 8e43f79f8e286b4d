"""How the training of one job goes in the calibrated world, and what its rank 0 tells of it. Pure."""

import math
from dataclasses import dataclass, field

from msgspec import structs

from common.config import TrainerConfig
from common.protocol import ReplicaOrder, TrainingSample
from common.types import GradientStatistics, JobSpec
from services.simulator.perturbation import Perturbation
from workloads.files.measured_profile import MeasuredProfile
from workloads.trainer.gradient_statistics.noise_scale import MIN_ESTIMATES

TRAINER = TrainerConfig()


@dataclass(frozen=True)
class SimulatedStep:
    seconds: float
    examples: int
    gain: float
    """Steps at M0 that it is worth."""


@dataclass(eq=False)
class SimulatedTraining:
    """The state that the replicas of a job share, and rank 0's window since its last sample."""

    spec: JobSpec
    measured: MeasuredProfile
    errors: Perturbation
    progress: float = 0.0
    done: float = 0.0
    """What has been done of the need, as a fraction: at each batch of the need at that batch."""
    steps: int = 0
    examples: int = 0
    epoch: int = 0
    cursor: int = 0
    """Examples of the present epoch that have been used."""
    next_evaluation: float = field(init=False)
    steps_so: int = 0
    """Steps under the present order."""
    gain: float = 0.0
    """Of the last step."""
    window_from_s: float = 0.0
    window_steps: int = 0
    window_timed: int = 0

    def __post_init__(self) -> None:
        self.next_evaluation = self.measured.spec.evaluate_every

    def next_step(self, order: ReplicaOrder) -> SimulatedStep:
        """The last one of an epoch takes what is left of it."""
        measured, config, replicas = self.measured, order.config, order.world_size
        batch = config.total_batch(replicas)
        total = min(batch, measured.spec.examples - self.cursor)
        atomic = math.ceil(total / (replicas * (config.accumulation + 1)))
        placement = tuple(placement.replicas for placement in order.allocation)
        step_s = measured.mean_step_s(placement, atomic, config.accumulation)
        scale = max(total / self.spec.min_batch_size, 1.0)
        return SimulatedStep(step_s, total, measured.gain(batch, self.progress, scale))

    def take(self, step: SimulatedStep, order: ReplicaOrder) -> None:
        batch = order.config.total_batch(order.world_size)
        self.progress += step.gain
        self.done += step.gain / self.measured.needed_progress(batch, self.spec.target)
        self.gain = step.gain
        self.steps += 1
        self.steps_so += 1
        self.examples += step.examples
        self.cursor += step.examples
        if self.cursor >= self.measured.spec.examples:
            self.epoch, self.cursor = self.epoch + 1, 0
        self.window_steps += 1
        self.window_timed += self.steps_so > TRAINER.warmup_steps
        if self.progress > self.spec.max_progress:
            self.next_evaluation = self.progress

    def evaluate(self, order: ReplicaOrder) -> tuple[float, bool]:
        """The metric, and whether it meets the target: that of the evaluation nearest to the need does."""
        application, target = self.measured.spec, self.spec.target
        every = application.evaluate_every
        self.next_evaluation = (math.floor(self.progress / every) + 1) * every
        batch = order.config.total_batch(order.world_size)
        need = self.measured.needed_progress(batch, target)
        if self.done > 0 and self.done >= 1.0 - every / (2.0 * need):
            return target, True
        short = math.nextafter(target, -math.inf if application.metric_mode == "max" else math.inf)
        nearer = min if application.metric_mode == "max" else max
        return nearer(self.measured.metric(batch, self.progress), short), False

    def remaining_steps(self) -> float:
        """Of the requested batch, at least 1."""
        measured, batch, progress = self.measured, self.spec.batch_size, self.progress
        scale, every = batch / self.spec.min_batch_size, measured.spec.evaluate_every
        need = min(measured.needed_progress(batch, self.spec.target), self.spec.max_progress)
        steps = 0.0
        while progress < need:
            part = min((math.floor(progress / every) + 1) * every, need) - progress
            steps += part / measured.gain(batch, progress, scale)
            progress += part
        return max(steps, 1.0)

    # ------------------------------------------------------------------ what is told

    def begin_window(self, now_s: float, *, new_order: bool = False) -> None:
        self.window_from_s, self.window_steps, self.window_timed = now_s, 0, 0
        if new_order:
            self.steps_so = 0

    def sample_due(self, now_s: float) -> bool:
        return now_s - self.window_from_s >= TRAINER.sample_every_s

    def sample(self, order: ReplicaOrder, now_s: float) -> TrainingSample | None:
        """Of the steps since the last one, where there are any."""
        if not self.window_steps:
            return None
        config, timed = order.config, self.window_timed > 0
        accumulation_s, step_s, sync_s = self._told_times(order) if timed else (0.0, 0.0, 0.0)
        sample = TrainingSample(
            job_id=self.spec.id,
            generation=order.generation,
            nodes=order.nodes,
            replicas=order.world_size,
            config=config,
            window_s=now_s - self.window_from_s,
            steps=self.window_steps,
            timed_steps=self.window_timed,
            accumulation_s=accumulation_s,
            step_s=step_s,
            sync_s=sync_s,
            total_steps=self.steps,
            total_examples=self.examples,
            progress=self.progress,
            epoch=self.epoch,
            loss=math.nan,
            gain=self.gain,
            statistics=self._told_statistics(config.total_batch(order.world_size)),
        )
        self.begin_window(now_s)
        return sample

    def _told_times(self, order: ReplicaOrder) -> tuple[float, float, float]:
        """Of a pass by itself, of the last one of a step, and of the synchronisation in that."""
        placement = tuple(placement.replicas for placement in order.allocation)
        atomic = order.config.atomic_batch
        step_s, sync_s = self.measured.times(placement, atomic)
        beside_s = max(step_s - self.measured.pass_s(placement, atomic), 0.0)
        configuration = order.nodes, order.world_size, atomic
        told_s, told_beside_s = self.errors.told_times(self.spec.id, configuration, step_s, beside_s)
        return told_s - told_beside_s, told_s, sync_s

    def _told_statistics(self, batch: int) -> GradientStatistics | None:
        if self.steps < 2:
            return None
        told = self.errors.told_statistics(self.measured.statistics(batch, self.progress))
        return structs.replace(told, trusted=told.trusted and self.steps >= MIN_ESTIMATES)
