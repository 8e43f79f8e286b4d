"""What a replica reports about its training: step times, samples, and the start of each generation.

Rank 0 reports for its group. The exception is GenerationStarted: the rank that brought the state sends it,
since only that rank knows how long no replica was training.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.config import TrainerConfig
from common.protocol import (
    BatchChanged,
    GenerationRunning,
    GenerationStarted,
    ReplicaMessage,
    ReplicaOrder,
    TrainingSample,
)
from workloads.trainer.checkpoint import note_progress
from workloads.trainer.step_timer import Clock, StepTimer
from workloads.trainer.training_state import TrainingState


@dataclass
class SampleWindow:
    """The steps since the last sample."""

    start_s: float
    steps: int = 0
    loss: float = 0.0
    gain: float = 0.0
    accumulation_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    sync_s: list[float] = field(default_factory=list)


class ProgressReporter:
    """Sends the reports of one replica, each as one call of `send`.

    Call `switch` when the replica starts to follow an order, `step` after each step, and `flush` before it
    follows another order.
    """

    def __init__(
        self,
        job_id: str,
        config: TrainerConfig,
        folder: Path,
        send: Callable[[ReplicaMessage], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self._job_id, self._config, self._folder, self._send = job_id, config, folder, send
        self._clock = clock
        self.last_step_s = clock()
        """End of the last step, or the start of this process."""
        self._window = SampleWindow(self.last_step_s)
        self._beginning: GenerationStarted | None = None
        self._order: ReplicaOrder | None = None
        self._steps = 0
        """Steps under the current order."""

    def trained_until(self, t_s: float) -> None:
        """Other replicas made the last step at `t_s`; ignored if that is before this process started."""
        self.last_step_s = max(self.last_step_s, t_s)

    def switch(self, order: ReplicaOrder, step: int, beginning: GenerationStarted | None = None) -> None:
        """Follow `order` from now on, after `step` completed steps of the job.

        `beginning`, on the rank that brought the state of a new group, is completed and sent after the
        group's first step.
        """
        same_group = self._order is not None and self._order.group == order.group
        self._order, self._beginning, self._steps = order, beginning, 0
        self._window = SampleWindow(self._clock())
        if same_group and order.rank == 0:
            self._send(
                BatchChanged(
                    job_id=self._job_id,
                    generation=order.generation,
                    config=order.config,
                    total_batch=order.config.total_batch(order.world_size),
                    step=step,
                )
            )

    def step(self, state: TrainingState, timer: StepTimer, loss: float, gain: float) -> None:
        assert self._order is not None
        now_s = self._clock()
        self._steps += 1
        if self._steps == 1:
            self._first_step(state, now_s - self.last_step_s - timer.total_s, timer.total_s)
        self.last_step_s = now_s
        if self._order.rank != 0:
            return
        window = self._window
        window.steps += 1
        window.loss += loss
        window.gain = gain
        if self._steps > self._config.warmup_steps:
            window.accumulation_s.extend(timer.passes_s)
            window.step_s.append(timer.last_pass_s)
            window.sync_s.append(timer.sync_s)
        if now_s - window.start_s >= self._config.sample_every_s:
            self.flush(state)

    def flush(self, state: TrainingState) -> None:
        """Send a sample of the steps since the last one, if there are any."""
        order, window = self._order, self._window
        if order is None or order.rank != 0 or window.steps == 0:
            return
        now_s = self._clock()
        self._send(
            TrainingSample(
                job_id=self._job_id,
                generation=order.generation,
                nodes=order.nodes,
                replicas=order.world_size,
                config=order.config,
                window_s=now_s - window.start_s,
                steps=window.steps,
                timed_steps=len(window.step_s),
                accumulation_s=_median(window.accumulation_s),
                step_s=_median(window.step_s),
                sync_s=_median(window.sync_s),
                total_steps=state.steps,
                total_examples=state.examples,
                progress=state.progress,
                epoch=state.sampler.epoch,
                loss=window.loss / window.steps,
                gain=window.gain,
                statistics=state.estimator.statistics(),
            )
        )
        note_progress(self._folder, state.progress)
        self._window = SampleWindow(now_s)

    def _first_step(self, state: TrainingState, lost_s: float, step_s: float) -> None:
        assert self._order is not None
        if self._beginning is not None:
            self._send(
                msgspec.structs.replace(
                    self._beginning,
                    seconds_lost=max(lost_s, 0.0),
                    progress=state.progress,
                    first_step_s=step_s,
                )
            )
        if self._order.rank == 0:
            self._send(
                GenerationRunning(
                    job_id=self._job_id, generation=self._order.generation, progress=state.progress
                )
            )


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
