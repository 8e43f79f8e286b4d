"""The training state of a job: everything that must survive a resize, a lost replica or a preemption."""

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch

from common.types import ApplicationSpec, JobSpec
from workloads.applications.interface import Task
from workloads.trainer.checkpoint import CheckpointError
from workloads.trainer.gradient_statistics.adascale import rescale_averages, scale_of, scaling_rule
from workloads.trainer.gradient_statistics.flat_gradients import FlatGradients, PreviousStep, StepSums
from workloads.trainer.gradient_statistics.noise_scale import EfficiencyEstimator, GradientNoiseScale
from workloads.trainer.sample_ledger import Fingerprints, SampleLedger, from_limbs, mix
from workloads.trainer.sampler import Sampler, StepBatch

LOAD_ERRORS = (
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
)
"""What loading raises for data that is not a training state, or is that of another job."""
MAX_BAD_STEPS = 10
"""After this many steps in a row without a finite loss and gradient, a job has diverged."""

# The first optimizer that a process creates imports 800 modules of torch, which takes more than a second.
# Create and step one here: replicas are forked from a process that has imported this module.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0).step()


class JobError(Exception):
    """The job itself is at fault, not the machine. The text is shown to its user."""


class TrainingState:
    """The state of a job after `steps` completed steps. It is the same on every rank of a group."""

    def __init__(self, spec: JobSpec, application: ApplicationSpec, task: Task) -> None:
        self.spec, self.application, self.task = spec, application, task
        self.gradients = FlatGradients(task.model, task.optimizer)
        self.estimator: EfficiencyEstimator = GradientNoiseScale(spec.min_batch_size)
        self.sampler = Sampler(task.train_examples, spec.seed)
        self.fingerprints = Fingerprints(task.train_examples)
        self.ledger = SampleLedger()
        self.steps = 0
        self.examples = 0
        self.progress = 0.0
        self.next_evaluation = application.evaluate_every
        """Progress at which the next evaluation is due."""
        self.best_metric: float | None = None
        self.bad_steps = 0
        """How many of the latest steps in a row were skipped because they were not finite."""
        self.last_scale = 1.0
        """Scale of the last update, at which the optimizer's averages are expressed."""
        self.rule = scaling_rule(application.optimizer)
        """How the learning rate follows gain and scale."""
        self._initial_rates = [group["lr"] for group in task.optimizer.param_groups]

    @property
    def position(self) -> int:
        """A number that grows with training: of two states of a job, the one with the larger number is
        further on. When a group breaks, some ranks may have completed a step or an evaluation that others
        have not."""
        return 2 * self.steps + (self.progress < self.next_evaluation)

    def seed_pass(self, indices: torch.Tensor) -> None:
        """Seed torch's generator for the next pass (dropout, augmentation) from (seed, step, first example of
        the pass), so that no generator state has to be kept.

        The numbers that a step draws depend on how its examples are cut into passes, not on which replica
        computes them: 4 replicas x 1 pass, 2 x 2 and 1 x 4 draw the same numbers, and so does a step that is
        repeated after a replica was lost. The same total batch cut into other passes draws other numbers from
        the same distribution.
        """
        first = int(indices[0])
        torch.default_generator.manual_seed(mix(mix(mix(self.spec.seed) + self.steps) + first) & 0xFFFFFFFF)

    def compute(self, batch: StepBatch, between: Callable[[], None] = lambda: None) -> float:
        """Compute the gradients of this rank's part of a step, pass by pass, and return its share of the
        step's loss. `between` is called after every pass except the last."""
        self.gradients.start()
        loss_share = 0.0
        for number, indices in enumerate(batch.passes, start=1):
            weight, last = len(indices) / batch.total, number == len(batch.passes)
            self.seed_pass(indices)
            loss = self.task.loss(self.task.model, indices) * weight
            loss.backward()  # type: ignore[no-untyped-call]
            self.gradients.end_pass(weight, alone=batch.groups == 1, last=last)
            loss_share += loss.item()
            if not last:
                between()
        return loss_share

    def advance(self, batch: StepBatch, sums: StepSums) -> float:
        """Complete a step, once its gradients and `sums` are summed over all ranks: set the learning rate by
        AdaScale, update the weights, and record the examples as used.

        Returns the gain: how many steps at M0 this step was worth. A step whose loss or gradient is not
        finite uses up its examples, changes no weight and gains 0; raises JobError after MAX_BAD_STEPS in a
        row.
        """
        estimate = self.gradients.estimate(batch, sums.local_sqr)
        scale = scale_of(batch.total, self.spec.min_batch_size)
        if estimate is not None:
            self.estimator.update(estimate, scale)
        gain = 0.0
        if math.isfinite(sums.loss) and (estimate is None or math.isfinite(estimate.sqr)):
            gain = self.estimator.gain(scale)
            factor = self.rule(gain, scale) * self.task.rate(self.progress)
            for group, rate in zip(self.task.optimizer.param_groups, self._initial_rates, strict=True):
                group["lr"] = rate * factor
            if scale != self.last_scale:
                old_factor = self.rule(self.estimator.gain(self.last_scale), self.last_scale)
                rate_ratio = old_factor / self.rule(gain, scale)
                known = self.estimator.statistics()
                rescale_averages(self.task.optimizer, known, self.last_scale, scale, rate_ratio)
            self.task.optimizer.step()
            self.last_scale = scale
        self.ledger.add(int(sums.used), from_limbs(sums[-5:]))
        if self.sampler.advance(batch.total):
            self.ledger.end_epoch()
        self.steps += 1
        self.examples += batch.total
        self.progress += gain
        self.bad_steps = 0 if gain else self.bad_steps + 1
        if self.bad_steps >= MAX_BAD_STEPS:
            raise JobError(
                f"diverged: loss or gradient not finite in {self.bad_steps} steps in a row "
                f"(loss {sums.loss:g} in step {self.steps})"
            )
        return gain

    def note_evaluation(self, metric: float) -> bool:
        """Record the metric of the current state and return whether it meets the target."""
        better = max if self.application.metric_mode == "max" else min
        if math.isfinite(metric):
            self.best_metric = metric if self.best_metric is None else better(metric, self.best_metric)
        every = self.application.evaluate_every
        self.next_evaluation = (math.floor(self.progress / every) + 1) * every
        return meets(self.application, metric, self.spec.target)

    def to_bytes(self) -> bytes:
        """The whole state, as `load_bytes` reads it."""
        content = {
            "job": identity(self.spec),
            "model": self.task.model.state_dict(),
            "optimizer": self.task.optimizer.state_dict(),
            "estimator": self.estimator.state(),
            "previous": [tuple(step) for step in self.gradients.previous],
            "sampler": self.sampler.state(),
            "ledger": self.ledger.state(),
            "steps": self.steps,
            "examples": self.examples,
            "progress": self.progress,
            "last_scale": self.last_scale,
            "next_evaluation": self.next_evaluation,
            "best_metric": self.best_metric,
            "bad_steps": self.bad_steps,
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        return buffer.getvalue()

    def load_bytes(self, data: bytes) -> None:
        """Replace the state. Raises CheckpointError for data that is not a state of this job. Runs no code
        from `data`."""
        try:
            content: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
            self._check(content)
            self.task.model.load_state_dict(content["model"])
            self.task.optimizer.load_state_dict(content["optimizer"])
            self.gradients.previous = [PreviousStep(*step) for step in content["previous"]]
            self.estimator.load(content["estimator"])
            self.sampler.load(content["sampler"])
            self.ledger.load(content["ledger"])
            for name in (
                "steps",
                "examples",
                "progress",
                "last_scale",
                "next_evaluation",
                "best_metric",
                "bad_steps",
            ):
                setattr(self, name, content[name])
        except LOAD_ERRORS as error:
            raise CheckpointError(f"does not fit this job: {type(error).__name__}: {error}") from error

    def _check(self, content: dict[str, Any]) -> None:
        mine = identity(self.spec)
        if content["job"] != mine:
            raise CheckpointError(f"belongs to {content['job']}, not to {mine}")


def meets(application: ApplicationSpec, metric: float, target: float) -> bool:
    """Whether the metric meets the target; NaN never does."""
    return metric >= target if application.metric_mode == "max" else metric <= target


def identity(spec: JobSpec) -> dict[str, object]:
    """The parts of a job's specification that must be equal for a state to belong to it."""
    return {
        "id": spec.id,
        "application": spec.application,
        "seed": spec.seed,
        "settings": dict(spec.settings),
        "initial_batch_size": spec.min_batch_size,
    }
