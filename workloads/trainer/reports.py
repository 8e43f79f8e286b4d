"""What a replica tells of its training: step times, samples, beginnings of generations.

Rank 0 speaks for its group, but for GenerationStarted: that comes from the rank that brought the state, which
alone knows how long nobody trained.
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
from workloads.trainer.training_state import TrainingState

Clock = Callable[[], float]


class StepWatch:
    """Times of one step of a replica that has a slot of this speed.

    A pass takes what it would take by itself, over and over: its CPU time over the speed, or its wall time
    where it waits for something. Not what it just took, for it may use up at once what its slot has saved
    while the replica waited for the others; that part of the waiting costs the step nothing."""

    def __init__(
        self, speed: float, clock: Clock = time.perf_counter, cpu_clock: Clock = time.process_time
    ) -> None:
        self._speed, self._clock, self._cpu_clock = speed, clock, cpu_clock
        self.start()

    def start(self) -> None:
        self.passes_s: list[float] = []
        self.sync_s = 0.0
        self.total_s = 0.0
        """Pauses included."""
        self.start_pass()
        self._start_s = self._pass_from_s

    def start_pass(self) -> None:
        self._pass_from_s, self._used_s = self._clock(), self._cpu_clock()

    def end_pass(self) -> None:
        """Before the pause that follows it."""
        wall_s, used_s = self._clock() - self._pass_from_s, self._cpu_clock() - self._used_s
        self.passes_s.append(max(wall_s, used_s / self._speed))

    def start_sync(self) -> None:
        self._sync_start_s = self._clock()

    def end_sync(self) -> None:
        self.sync_s = self._clock() - self._sync_start_s

    def end(self) -> None:
        self.total_s = self._clock() - self._start_s

    @property
    def step_s(self) -> float:
        """The last pass with the all-reduce, the update and all else: what the passes before it leave of
        the whole step."""
        return self.total_s - sum(self.passes_s[:-1])


@dataclass
class _Window:
    """Steps since the last sample."""

    start_s: float
    steps: int = 0
    loss: float = 0.0
    gain: float = 0.0
    accumulation_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    sync_s: list[float] = field(default_factory=list)


class Reporter:
    """`send` takes one message. Call `switch` whenever an order begins to be followed, `step` after each
    step, `flush` before anything else is followed."""

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
        self._window = _Window(self.last_step_s)
        self._beginning: GenerationStarted | None = None
        self._order: ReplicaOrder | None = None
        self._steps = 0
        """Steps under the present order."""

    def trained_until(self, t_s: float) -> None:
        """Others have trained until then, where that is later than the start of this process."""
        self.last_step_s = max(self.last_step_s, t_s)

    def switch(self, order: ReplicaOrder, step: int, beginning: GenerationStarted | None = None) -> None:
        """`beginning` is what to complete and send after the first step of a new group, by the rank that
        brought its state."""
        grouped = self._order is not None and self._order.group == order.group
        self._order, self._beginning, self._steps = order, beginning, 0
        self._window = _Window(self._clock())
        if grouped and order.rank == 0:
            self._send(
                BatchChanged(
                    job_id=self._job_id,
                    generation=order.generation,
                    config=order.config,
                    total_batch=order.config.total_batch(order.world_size),
                    step=step,
                )
            )

    def step(self, state: TrainingState, watch: StepWatch, loss: float, gain: float) -> None:
        assert self._order is not None
        now_s = self._clock()
        self._steps += 1
        if self._steps == 1:
            self._first_step(state, now_s - self.last_step_s - watch.total_s, watch.total_s)
        self.last_step_s = now_s
        if self._order.rank != 0:
            return
        window = self._window
        window.steps += 1
        window.loss += loss
        window.gain = gain
        if self._steps > self._config.warmup_steps:
            window.accumulation_s.extend(watch.passes_s)
            window.step_s.append(watch.step_s)
            window.sync_s.append(watch.sync_s)
        if now_s - window.start_s >= self._config.sample_every_s:
            self.flush(state)

    def flush(self, state: TrainingState) -> None:
        """Send what has been seen since the last sample, if anything."""
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
        self._window = _Window(now_s)

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
