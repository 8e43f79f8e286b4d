"""The training of one job in the calibrated world, and the samples that its rank 0 reports. Pure."""

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
    """Progress of the step: the number of steps at M0 that it is worth."""


@dataclass(eq=False)
class SimulatedTraining:
    """The state that the replicas of a job share, and rank 0's window since its last sample."""

    spec: JobSpec
    measured: MeasuredProfile
    perturbation: Perturbation
    progress: float = 0.0
    completed_fraction: float = 0.0
    """Of the progress that the target needs. Each step counts by the need at its own batch size."""
    steps: int = 0
    examples: int = 0
    epoch: int = 0
    cursor: int = 0
    """Examples of the current epoch that have been used."""
    next_evaluation: float = field(init=False)
    """Progress at which it is due."""
    steps_under_order: int = 0
    gain: float = 0.0
    """Of the last step."""
    window_from_s: float = 0.0
    window_steps: int = 0
    window_timed_steps: int = 0

    def __post_init__(self) -> None:
        self.next_evaluation = self.measured.spec.evaluate_every

    def next_step(self, order: ReplicaOrder) -> SimulatedStep:
        """The last step of an epoch takes the examples that are left."""
        measured, config, replicas = self.measured, order.config, order.world_size
        batch = config.total_batch(replicas)
        total = min(batch, measured.spec.examples - self.cursor)
        atomic = math.ceil(total / (replicas * (config.accumulation + 1)))
        step_s = measured.mean_step_s(_placement(order), atomic, config.accumulation)
        scale = max(total / self.spec.min_batch_size, 1.0)
        return SimulatedStep(step_s, total, measured.gain(batch, self.progress, scale))

    def take(self, step: SimulatedStep, order: ReplicaOrder) -> None:
        batch = order.config.total_batch(order.world_size)
        self.progress += step.gain
        self.completed_fraction += step.gain / self.measured.needed_progress(batch, self.spec.target)
        self.gain = step.gain
        self.steps += 1
        self.steps_under_order += 1
        self.examples += step.examples
        self.cursor += step.examples
        if self.cursor >= self.measured.spec.examples:
            self.epoch, self.cursor = self.epoch + 1, 0
        self.window_steps += 1
        self.window_timed_steps += self.steps_under_order > TRAINER.warmup_steps
        if self.progress > self.spec.max_progress:
            self.next_evaluation = self.progress

    def evaluate(self, order: ReplicaOrder) -> tuple[float, bool]:
        """The metric, and whether it meets the target. The evaluation nearest to the needed progress does."""
        application, target = self.measured.spec, self.spec.target
        every = application.evaluate_every
        self.next_evaluation = (math.floor(self.progress / every) + 1) * every
        batch = order.config.total_batch(order.world_size)
        needed = self.measured.needed_progress(batch, target)
        if self.completed_fraction > 0 and self.completed_fraction >= 1.0 - every / (2.0 * needed):
            return target, True
        higher_is_better = application.metric_mode == "max"
        just_short = math.nextafter(target, -math.inf if higher_is_better else math.inf)
        worse = min if higher_is_better else max
        return worse(self.measured.metric(batch, self.progress), just_short), False

    def remaining_steps(self) -> float:
        """Steps at the requested batch size, at least 1."""
        measured, batch, progress = self.measured, self.spec.batch_size, self.progress
        scale, every = batch / self.spec.min_batch_size, measured.spec.evaluate_every
        needed = min(measured.needed_progress(batch, self.spec.target), self.spec.max_progress)
        steps = 0.0
        while progress < needed:
            part = min((math.floor(progress / every) + 1) * every, needed) - progress
            steps += part / measured.gain(batch, progress, scale)
            progress += part
        return max(steps, 1.0)

    # ------------------------------------------------------------------ samples

    def begin_window(self, now_s: float, *, new_order: bool = False) -> None:
        self.window_from_s, self.window_steps, self.window_timed_steps = now_s, 0, 0
        if new_order:
            self.steps_under_order = 0

    def sample_due(self, now_s: float) -> bool:
        return now_s - self.window_from_s >= TRAINER.sample_every_s

    def sample(self, order: ReplicaOrder, now_s: float) -> TrainingSample | None:
        """The sample of the steps in the window, which ends here; None without steps."""
        if not self.window_steps:
            return None
        config = order.config
        times_s = self._perturbed_times(order) if self.window_timed_steps else (0.0, 0.0, 0.0)
        accumulation_s, step_s, sync_s = times_s
        sample = TrainingSample(
            job_id=self.spec.id,
            generation=order.generation,
            nodes=order.nodes,
            replicas=order.world_size,
            config=config,
            window_s=now_s - self.window_from_s,
            steps=self.window_steps,
            timed_steps=self.window_timed_steps,
            accumulation_s=accumulation_s,
            step_s=step_s,
            sync_s=sync_s,
            total_steps=self.steps,
            total_examples=self.examples,
            progress=self.progress,
            epoch=self.epoch,
            loss=math.nan,
            gain=self.gain,
            statistics=self._perturbed_statistics(config.total_batch(order.world_size)),
        )
        self.begin_window(now_s)
        return sample

    def _perturbed_times(self, order: ReplicaOrder) -> tuple[float, float, float]:
        """Of an accumulating pass, of the last pass of a step, and of the synchronization in it."""
        placement, atomic = _placement(order), order.config.atomic_batch
        step_s, sync_s = self.measured.times(placement, atomic)
        beyond_pass_s = max(step_s - self.measured.pass_s(placement, atomic), 0.0)
        configuration = order.nodes, order.world_size, atomic
        perturbed_s, perturbed_beyond_s = self.perturbation.perturbed_times(
            self.spec.id, configuration, step_s, beyond_pass_s
        )
        return perturbed_s - perturbed_beyond_s, perturbed_s, sync_s

    def _perturbed_statistics(self, batch: int) -> GradientStatistics | None:
        if self.steps < 2:
            return None
        statistics = self.perturbation.perturbed_statistics(self.measured.statistics(batch, self.progress))
        return structs.replace(statistics, trusted=statistics.trusted and self.steps >= MIN_ESTIMATES)


def _placement(order: ReplicaOrder) -> tuple[int, ...]:
    return tuple(placement.replicas for placement in order.allocation)
