"""Many simulations in several processes, with a progress bar on a terminal and lines elsewhere."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from common.lifecycle import EXIT_FAILED, UserError, blocked_signals

if TYPE_CHECKING:
    from services.simulator.cases import SimulationCase
    from services.simulator.results import Result

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that set the number of threads of numpy's libraries."""


class WorkerLost(UserError):
    """A simulating process was killed."""

    exit_code = EXIT_FAILED


def limit_to_one_thread() -> None:
    """Limit numpy to one thread in this process and its children: the matrices of a round are so small that
    threads would only wait for each other. Call it before numpy is loaded and processes are started."""
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, "1")


def simulate_all(
    cases: "Sequence[SimulationCase]", processes: int | None = None, line_every_s: float = 0.0
) -> "Iterator[Result]":
    """Simulate the cases. Yields results in the order of the cases, as soon as they are available.

    Without a terminal it prints a line for each run, at most one every `line_every_s` seconds.

    Raises UserError for what is wrong with a case, and WorkerLost."""
    from services.simulator.run_case import simulate

    count = min(processes or len(os.sched_getaffinity(0)), len(cases))
    if count == 1:
        yield from _with_progress((simulate(case) for case in cases), len(cases), line_every_s)
        return
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    warnings.filterwarnings("ignore", module="joblib")  # it warns of interrupts and of lost processes
    parallel = Parallel(n_jobs=count, return_as="generator")
    missing = len(cases)
    try:
        with blocked_signals(signal.SIGINT):  # otherwise each process prints a traceback
            results = parallel(delayed(simulate)(case) for case in cases)
        for result in _with_progress(results, len(cases), line_every_s):
            missing -= 1
            yield result
    except TerminatedWorkerError as error:
        raise WorkerLost(
            f"a simulating process was killed from outside (out of memory? -j 1 needs less): "
            f"{missing} of {len(cases)} runs are missing"
        ) from error
    finally:  # otherwise idle processes keep the files that they inherited
        get_reusable_executor(reuse=True).shutdown(kill_workers=True)


def _with_progress(results: "Iterator[Result]", count: int, line_every_s: float) -> "Iterator[Result]":
    """The same results; shows how far they are, unless there is only one."""
    if count == 1:
        yield from results
        return
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(results, "simulating", count, console=console)
        return
    start_s = time.monotonic()
    printed_s = -line_every_s
    for done, result in enumerate(results, start=1):
        spent_s = time.monotonic() - start_s
        if done == count or spent_s - printed_s >= line_every_s:
            printed_s = spent_s
            jct = "none completed" if result.mean_jct_s is None else f"mean JCT {result.mean_jct_s:.1f} s"
            left = f", {spent_s * (count - done) / done:.0f} s left" if done < count else ""
            text = f"{done}/{count} {result.run_id}: {jct}, {result.cpu_s:.1f} CPU s{left}"
            print(text, file=sys.stderr, flush=True)
        yield result
