"""The learning curve of one training, for the measured profile of an application."""

from typing import NamedTuple

from workloads.applications import applications
from workloads.trainer.standalone.train_alone import TrainingCase, train
from workloads.trainer.training_state import TrainingState, meets

BEYOND = 2.0
"""For harder targets, train up to this many times the progress that the application's own target took."""


class Evaluation(NamedTuple):
    progress: float
    iteration: int
    """Completed steps."""
    metric: float
    sqr: float | None
    """Gradient statistics, see `GradientStatistics`; None before there are any."""
    var: float | None
    trusted: float
    """1 if the statistics were trusted, else 0."""


def evaluations(case: TrainingCase) -> tuple[list[Evaluation], bool]:
    """All evaluations until the case's target is met, and whether it was.

    Training ends early at BEYOND times the progress that the application's own target took, or at the
    application's progress budget.
    """
    application = applications(case.modules)[case.application]
    seen: list[Evaluation] = []
    last_progress = application.max_progress

    def enough(state: TrainingState, metric: float) -> bool:
        nonlocal last_progress
        known = state.estimator.statistics()
        seen.append(
            Evaluation(
                state.progress,
                state.steps,
                metric,
                known.sqr if known else None,
                known.var if known else None,
                float(known is not None and known.trusted),
            )
        )
        if meets(application, metric, application.target):
            last_progress = min(last_progress, BEYOND * state.progress)
        return state.progress >= last_progress

    outcome = train(case, enough)
    return seen, outcome.ended == "target"
