"""A job as one replica has it: its state, its folder, and what it says to its agent."""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path

from common.protocol import (
    CheckpointFellBack,
    CheckpointSaved,
    Evaluated,
    ReplicaMessage,
    ReplicaStart,
)
from workloads.applications import applications, build_task
from workloads.trainer import checkpoint
from workloads.trainer.elastic import Group
from workloads.trainer.evaluation import evaluate
from workloads.trainer.pacer import Pacer
from workloads.trainer.reports import Reporter, StepWatch
from workloads.trainer.training_state import JobError, TrainingState


class TrainingJob:
    """Building it runs the application's own code: any exception of that is the job's."""

    def __init__(self, start: ReplicaStart, pacer: Pacer, send: Callable[[ReplicaMessage], None]) -> None:
        self.spec, self.config, self.pacer, self._send = start.spec, start.trainer, pacer, send
        self.folder = Path(start.job_dir)
        self.reporter = Reporter(self.spec.id, self.config, self.folder, send)
        application = applications(start.application_modules)[self.spec.application]
        task = build_task(
            self.spec.application, self.spec.seed, self.spec.settings, start.application_modules
        )
        task.model.train()
        self.state = TrainingState(self.spec, application, task)
        self.state_from = ""
        """Where the state came from: "", as long as there is none that means anything to others."""
        self.metric = math.nan
        """Of the last evaluation."""
        self.lock = checkpoint.StateLock(self.folder)
        self._named_checkpoint = start.checkpoint
        self._last_save_s = time.monotonic()

    @property
    def has_state(self) -> bool:
        return self.state_from != ""

    def evaluate(self, group: Group) -> bool:
        """Whether the target is met, on held-out data. Raises JobError when the budget is spent."""
        state = self.state
        self.metric = metric = evaluate(state.task, self.spec.max_atomic_batch, group, self.pacer)
        reached = state.note_evaluation(metric)
        if group.rank == 0:
            self._send(
                Evaluated(
                    job_id=self.spec.id,
                    progress=state.progress,
                    step=state.steps,
                    metric=metric,
                    reached=reached,
                )
            )
        if state.progress > self.spec.max_progress and not reached:
            best = "none" if state.best_metric is None else f"{state.best_metric:g}"
            raise JobError(
                f"progress budget of {self.spec.max_progress:g} spent short of the target "
                f"{self.spec.target:g}; best metric {best}"
            )
        return reached

    def after_step(self, group: Group, watch: StepWatch, loss: float, gain: float) -> None:
        self.reporter.step(self.state, watch, loss, gain)
        if self.state.progress > self.spec.max_progress:
            self.state.next_evaluation = self.state.progress
        if group.rank == 0 and time.monotonic() - self._last_save_s > self.config.checkpoint_every_s:
            self.try_save("periodic")

    def try_save(self, reason: str) -> None:
        """Save where that is possible; training goes on in any case, and the event tells of it."""
        with contextlib.suppress(checkpoint.CheckpointError):
            self.save(reason)

    def save(self, reason: str) -> Path:
        """Write the state to disk. Raises CheckpointError, after the event, where that is not possible."""
        self._last_save_s = time.monotonic()
        try:
            saved = checkpoint.save(self.folder, self.state.steps, self.state.to_bytes())
        except OSError as error:
            former = next(iter(checkpoint.saved_in(self.folder)), "")
            problem = f"the {reason} checkpoint could not be saved: {error.strerror}"
            self._say_fallback(str(self.folder), str(former), problem)
            raise checkpoint.CheckpointError(problem) from error
        self._send(
            CheckpointSaved(
                job_id=self.spec.id,
                path=str(saved.path),
                digest=saved.digest,
                size_bytes=saved.size_bytes,
                save_s=saved.save_s,
                progress=self.state.progress,
                reason=reason,
            )
        )
        return saved.path

    def resume(self) -> None:
        """The state from the newest checkpoint that is good, or the untrained one where there is none."""
        untrained = self.state.to_bytes()
        found = checkpoint.load_newest(
            self.folder, self._named_checkpoint, self.state.load_bytes, self._say_fallback
        )
        if found is None:
            # What did not fit may have been loaded in part.
            self.state.load_bytes(untrained)
            self.state_from = "scratch"
        else:
            self.state_from = "checkpoint"
            age_s = max(time.time() - found.stat().st_mtime, 0.0)
            self.reporter.trained_until(time.monotonic() - age_s)

    def _say_fallback(self, path: str, fallback: str, reason: str) -> None:
        self._send(CheckpointFellBack(job_id=self.spec.id, path=path, fallback=fallback, reason=reason))
