"""A job inside one replica: its training state, its folder, and its reports to the agent."""

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
from workloads.trainer.evaluation import evaluate
from workloads.trainer.pacer import Pacer
from workloads.trainer.process_group import Group
from workloads.trainer.progress_reporter import ProgressReporter
from workloads.trainer.step_timer import StepTimer
from workloads.trainer.training_state import JobError, TrainingState


class TrainingJob:
    """Creating it runs the application's own code, and raises whatever that code raises."""

    def __init__(self, start: ReplicaStart, pacer: Pacer, send: Callable[[ReplicaMessage], None]) -> None:
        self.spec, self.config, self.pacer, self._send = start.spec, start.trainer, pacer, send
        self.folder = Path(start.job_dir)
        self.reporter = ProgressReporter(self.spec.id, self.config, self.folder, send)
        application = applications(start.application_modules)[self.spec.application]
        task = build_task(
            self.spec.application, self.spec.seed, self.spec.settings, start.application_modules
        )
        task.model.train()
        self.state = TrainingState(self.spec, application, task)
        self.state_from = ""
        """Where the state came from: "survivor", "checkpoint" or "scratch"; "" while it is still untrained
        and not shared with a group."""
        self.metric = math.nan
        """The metric of the last evaluation."""
        self.lock = checkpoint.StateLock(self.folder)
        self._named_checkpoint = start.checkpoint
        self._last_save_s = time.monotonic()

    @property
    def has_state(self) -> bool:
        return self.state_from != ""

    def evaluate(self, group: Group) -> bool:
        """Evaluate on the held-out data and return whether the target is met.

        Raises GroupBroken, and JobError when the progress budget is spent without meeting the target.
        """
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

    def after_step(self, group: Group, timer: StepTimer, loss: float, gain: float) -> None:
        self.reporter.step(self.state, timer, loss, gain)
        if self.state.progress > self.spec.max_progress:
            self.state.next_evaluation = self.state.progress
        if group.rank == 0 and time.monotonic() - self._last_save_s > self.config.checkpoint_every_s:
            self.try_save("periodic")

    def try_save(self, reason: str) -> None:
        """Save if possible. If not, training goes on; the event CheckpointFellBack reports the problem."""
        with contextlib.suppress(checkpoint.CheckpointError):
            self.save(reason)

    def save(self, reason: str) -> Path:
        """Write the state to disk and return the checkpoint. If that fails, send CheckpointFellBack and raise
        CheckpointError."""
        self._last_save_s = time.monotonic()
        try:
            saved = checkpoint.save(self.folder, self.state.steps, self.state.to_bytes())
        except OSError as error:
            previous = next(iter(checkpoint.saved_in(self.folder)), "")
            problem = f"the {reason} checkpoint could not be saved: {error.strerror}"
            self._report_fallback(str(self.folder), str(previous), problem)
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
        """Load the newest checkpoint that can be used; keep the untrained state if there is none."""
        untrained = self.state.to_bytes()
        found = checkpoint.load_newest(
            self.folder, self._named_checkpoint, self.state.load_bytes, self._report_fallback
        )
        if found is None:
            # A checkpoint that did not fit may have been loaded in part.
            self.state.load_bytes(untrained)
            self.state_from = "scratch"
        else:
            self.state_from = "checkpoint"
            age_s = max(time.time() - found.stat().st_mtime, 0.0)
            self.reporter.trained_until(time.monotonic() - age_s)

    def _report_fallback(self, path: str, fallback: str, reason: str) -> None:
        self._send(CheckpointFellBack(job_id=self.spec.id, path=path, fallback=fallback, reason=reason))
