"""Runs through a backend of joblib, one of its own or one that is registered with it."""

from collections.abc import Iterator, Sequence

from joblib import Parallel, delayed, parallel
from joblib.externals.loky import get_reusable_executor

from common.lifecycle import UserError
from services.experiment.runner import RunOutcome, RunTask, perform


def check_engine(name: str) -> None:
    """Raises UserError for a backend that joblib does not know, or that is not installed."""
    if name not in (allowed := sorted({*parallel.BACKENDS, *parallel.EXTERNAL_BACKENDS})):
        raise UserError(f"--engine {name!r}: allowed: {', '.join(allowed)}")
    try:
        Parallel(n_jobs=1, backend=name)
    except (ImportError, ValueError) as error:
        raise UserError(f"--engine {name}: cannot be used: {error}") from error


def outcomes(tasks: Sequence[RunTask], engine: str, count: int) -> Iterator[RunOutcome]:
    """Outcomes in the order of the tasks. `count` tasks run in parallel; the next ones start when all of them
    are done."""
    work = Parallel(n_jobs=count, backend=engine)
    try:
        for first in range(0, len(tasks), count):
            yield from work(delayed(perform)(task) for task in tasks[first : first + count])
    finally:
        if engine == "loky" and count > 1:  # otherwise idle processes stay
            get_reusable_executor().shutdown(kill_workers=True)
