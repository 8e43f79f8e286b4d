"""Many simulations in several processes, with a bar on a terminal and lines elsewhere."""

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

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerLost(UserError):
    """A process that simulated was ended."""

    exit_code = EXIT_FAILED


def one_thread_each() -> None:
    """A round's matrices are tiny: threads of numpy's would only wait for each other. To be called before it
    is loaded, and before processes are started."""
    for name in THREADS:
        os.environ.setdefault(name, "1")


def simulated(
    cases: "Sequence[SimulationCase]", processes: int | None = None, line_every_s: float = 0.0
) -> "Iterator[Result]":
    """Results in the order of the cases, each as soon as it and all before it are there. Off a terminal a
    line a run, but none within `line_every_s` after another.

    Raises UserError for what the user of a case got wrong, and WorkerLost."""
    from services.simulator.cases import simulate

    wanted = min(processes or len(os.sched_getaffinity(0)), len(cases))
    if wanted == 1:
        yield from _shown((simulate(case) for case in cases), len(cases), line_every_s)
        return
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    warnings.filterwarnings("ignore", module="joblib")  # of an interrupt, and of processes that are lost
    parallel = Parallel(n_jobs=wanted, return_as="generator")
    missing = len(cases)
    try:
        with blocked_signals(signal.SIGINT):  # each would print a traceback
            results = parallel(delayed(simulate)(case) for case in cases)
        for result in _shown(results, len(cases), line_every_s):
            missing -= 1
            yield result
    except TerminatedWorkerError as error:
        raise WorkerLost(
            f"a process that simulated was ended from outside (for want of memory? -j 1 takes less): "
            f"{missing} of {len(cases)} runs are missing"
        ) from error
    finally:  # else its processes wait for more to do, and hold what they inherited
        get_reusable_executor(reuse=True).shutdown(kill_workers=True)


def _shown(results: "Iterator[Result]", count: int, line_every_s: float) -> "Iterator[Result]":
    """The same; nothing is shown for one run."""
    if count == 1:
        yield from results
        return
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(results, "simulating", count, console=console)
        return
    begun_s = time.monotonic()
    told_s = -line_every_s
    for done, result in enumerate(results, start=1):
        spent_s = time.monotonic() - begun_s
        if done == count or spent_s - told_s >= line_every_s:
            told_s = spent_s
            jct = "none completed" if result.mean_jct_s is None else f"mean JCT {result.mean_jct_s:.1f} s"
            left = f", {spent_s * (count - done) / done:.0f} s left" if done < count else ""
            text = f"{done}/{count} {result.run_id}: {jct}, {result.cpu_s:.1f} CPU s{left}"
            print(text, file=sys.stderr, flush=True)
        yield result
