"""One training as seen from its evaluations, for the measured profile of an application."""

from typing import NamedTuple

from workloads.applications import applications
from workloads.trainer.standalone.train_alone import TrainingCase, train
from workloads.trainer.training_state import TrainingState, meets

BEYOND = 2.0
"""So many times the progress to the application's own target is trained for harder ones."""


class Evaluation(NamedTuple):
    progress: float
    iteration: int
    metric: float
    sqr: float | None
    """Gradient statistics; None before there are any."""
    var: float | None
    trusted: float
    """1 where they were, else 0."""


def evaluations(case: TrainingCase) -> tuple[list[Evaluation], bool]:
    """Every evaluation until the case's target, and whether it was met; at most until BEYOND times the
    progress that the application's own target took, or its declared budget."""
    application = applications(case.modules)[case.application]
    seen: list[Evaluation] = []
    bound = application.max_progress

    def enough(state: TrainingState, metric: float) -> bool:
        nonlocal bound
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
            bound = min(bound, BEYOND * state.progress)
        return state.progress >= bound

    outcome = train(case, enough)
    return seen, outcome.ended == "target"
