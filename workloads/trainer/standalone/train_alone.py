"""Train one job to its target in this process, at one batch size and with one scaling rule.

`coadapt bench scaling` and `coadapt calibrate` measure such trainings. There is no agent, no pacing and no
group, but state, sampler, gradient statistics and evaluation are the same code as in a replica.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from common.types import ApplicationSpec, GradientStatistics, JobSpec
from workloads.applications import applications, build_task
from workloads.trainer.evaluation import evaluate
from workloads.trainer.gradient_statistics.noise_scale import StepEstimate
from workloads.trainer.loop import step_alone
from workloads.trainer.pacer import Pacer
from workloads.trainer.process_group import single_member_group
from workloads.trainer.training_state import JobError, TrainingState

GROUPS = 4
"""Passes in a step above M0, for as many groups of the gradient statistics as four replicas would give."""


class TrainingCase(NamedTuple):
    application: str
    seed: int
    multiple: int
    """Total batch size / M0."""
    rule: str
    """"adascale": the rule that replicas use for the application's optimizer. "linear": learning rate and
    progress grow in proportion to the batch. "none": neither grows."""
    budget_examples: int
    target: float | None = None
    """None: the application's own target."""
    modules: tuple[str, ...] = ()
    """Modules with the user's own applications."""


class TrainingOutcome(NamedTuple):
    case: TrainingCase
    ended: str
    """"target", "enough" (the caller ended it), "budget" (examples used up before the target) or
    "diverged"."""
    progress: float
    """In steps at M0, as the rule counts them."""
    examples: int
    steps: int
    metric: float
    """The metric of the last evaluation."""
    cpu_s: float


class AssumedEfficiency:
    """An `EfficiencyEstimator` that ignores the gradients: a step is worth scale ** `power` steps at M0."""

    def __init__(self, power: float) -> None:
        self._power = power

    def update(self, estimate: StepEstimate, scale: float) -> None:
        pass

    def gain(self, scale: float) -> float:
        return float(scale**self._power)

    def statistics(self) -> GradientStatistics | None:
        return None

    def state(self) -> dict[str, float]:
        return {}

    def load(self, state: dict[str, float]) -> None:
        pass


ASSUMED = {"linear": AssumedEfficiency(1.0), "none": AssumedEfficiency(0.0)}


def train(
    case: TrainingCase, enough: Callable[[TrainingState, float], bool] = lambda state, metric: False
) -> TrainingOutcome:
    """Train until the target is met or the budget is spent. `enough` is called with the state and the metric
    after each evaluation and ends the training by returning True. Sets torch to one thread."""
    torch.set_num_threads(1)
    start_s = time.process_time()
    application = applications(case.modules)[case.application]
    task = build_task(case.application, case.seed, modules=case.modules)
    spec = _spec(application, case)
    state = TrainingState(spec, application, task)
    if case.rule in ASSUMED:
        state.estimator = ASSUMED[case.rule]
        state.rule = lambda gain, scale: gain
    passes = 1 if case.multiple == 1 else max(GROUPS, -(-spec.batch_size // spec.max_atomic_batch))
    alone, pacer, metric = single_member_group(), Pacer(1.0), float("nan")
    task.model.train()
    ended = ""
    while not ended:
        if state.progress >= state.next_evaluation:
            metric = evaluate(task, spec.max_atomic_batch, alone, pacer)
            reached = state.note_evaluation(metric)
            ended = "enough" if enough(state, metric) else ""
            ended = "target" if reached else ended
        if not ended and state.examples >= case.budget_examples:
            ended = "budget"
        if not ended:
            try:
                step_alone(state, spec.batch_size, passes)
            except JobError:
                ended = "diverged"
    return TrainingOutcome(
        case, ended, state.progress, state.examples, state.steps, metric, time.process_time() - start_s
    )


def _spec(application: ApplicationSpec, case: TrainingCase) -> JobSpec:
    batch = case.multiple * application.initial_batch_size
    return JobSpec(
        id="alone",
        application=application.name,
        seed=case.seed,
        target=application.target if case.target is None else case.target,
        max_progress=application.max_progress,
        replicas=1,
        batch_size=batch,
        min_batch_size=application.initial_batch_size,
        max_batch_size=max(batch, application.max_batch_size),
        min_atomic_batch=application.min_atomic_batch,
        max_atomic_batch=application.max_atomic_batch,
        max_replicas=1,
    )
