"""Commands that train real jobs on stacks of their own: run, experiment."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.errors import print_error, report_failures
from services.cli.options import MAX_PROCESSES, number, path_argument, repeated_option, whole_option

if TYPE_CHECKING:
    from services.experiment.conduct import PreparedExperiment


def run(
    file: Annotated[Path, path_argument("Workload file (TOML).", metavar="FILE")],
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Policy. Default: scheduler.policy of the configuration."),
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            parser=number(0.0, math.inf, "seconds, 0 or more"),
            metavar="S",
            help="Seconds after which the run ends and unfinished jobs count as failed. Default: no limit. "
            "Allowed: 0 or more.",
        ),
    ] = None,
) -> int:
    """Run a workload file on a stack of its own.

    The command starts scheduler, collector, logger and agents, submits the jobs at their arrival times
    and shows their state. When all jobs have ended, or on Ctrl-C, it stops everything. At the end it
    prints the summary of the run.

    Exit codes: 0 every job was completed and verified, and the audit of the log is clean; 1 otherwise; 2
    bad input; 3 the stack does not come up; 130 interrupted."""
    from msgspec.structs import replace

    from analysis.summarize import main as summarize
    from common.config import load_config
    from common.lifecycle import signals_as_interrupt
    from services.experiment.runner import check_policies
    from services.launcher.client import Arrivals, Client, workload_reader
    from services.launcher.stack import Stack
    from services.monitor.service import follow, screen

    config = load_config(os.environ)
    read = workload_reader(config, file, {})
    workload = read(None)
    config = replace(
        config,
        run=replace(config.run, workload=workload.name, seed=config.run.seed or workload.seed),
        scheduler=replace(config.scheduler, policy=policy or config.scheduler.policy),
    )
    check_policies([config.scheduler.policy])
    stack = Stack(config, os.environ)
    try:
        with signals_as_interrupt(), stack, Client(stack.config) as client:
            print(f"run {stack.run_id}: the stack is up; its output is in {stack.output}", flush=True)
            arrivals = Arrivals(client, read(client.slots()))
            is_over = arrivals.over(math.inf if timeout_s is None else timeout_s)
            with screen() as show:
                code = report_failures(arrivals.failures(follow(stack.jobs, show, is_over)))
    except KeyboardInterrupt:
        print(f"interrupted: the stack is down; the log of the run is in {stack.run_dir}", flush=True)
        raise
    for process in stack.killed:
        print_error(f"had to be killed: {process}")
    return max(code, summarize([str(stack.run_dir)]))


def experiment(
    file: Annotated[
        Path,
        path_argument(
            "Experiment file (TOML), or the name of one that comes with coadapt: cpu or realistic.",
            metavar="FILE",
        ),
    ],
    policies: Annotated[
        list[str] | None,
        repeated_option("--policy", "Run only this policy."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        repeated_option("--set", "Run only this workload set."),
    ] = None,
    seeds: Annotated[
        int | None,
        whole_option(
            "--seeds",
            low=1,
            high=1000,
            help="Number of seeds: first those of FILE, then the numbers after the largest. Default: those "
            "of FILE.",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="joblib backend that carries out the runs, for instance sequential or loky.",
        ),
    ] = "sequential",
    parallel: Annotated[
        int,
        whole_option(
            "--jobs-parallel",
            "-j",
            low=1,
            high=MAX_PROCESSES,
            help="Number of runs at the same time, for an engine that has a machine for each.",
        ),
    ] = 1,
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolated",
            help="Run single jobs instead: each application alone with 1, 2 and 4 replicas. compare checks "
            "its model of isolated completion times with them.",
        ),
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Repeat runs that were kept although they are not clean.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and the expected duration; run nothing.")
    ] = False,
) -> int:
    """Run policies x sets x seeds on real jobs.

    Each run has a stack of its own. Results go to a folder with the experiment's name in run.logs_dir.
    After an interruption the same command continues; when everything is done it does nothing. Runs that
    failed or were disturbed by a busy machine are moved to lost/ and repeated.

    Exit codes: 0 every run is there and clean; 1 some are not clean; 2 bad input; 3 the machine is busy,
    or a stack does not come up; 130 interrupted."""
    from common.lifecycle import signals_as_interrupt
    from services.experiment.conduct import prepare

    prepared = prepare(
        file,
        os.environ,
        policies=policies or (),
        sets=sets or (),
        seeds=seeds,
        isolated_jobs=isolated,
        engine=engine,
    )
    if dry_run:
        _print_plan(prepared)
        return 0
    with signals_as_interrupt():
        prepared.carry_out(
            parallel,
            repeat_unclean=again,
            report=lambda line: print(line, flush=True),
            progress=lambda: _progress_bar(prepared, parallel),
        )
    unclean = prepared.unclean()
    report_failures([f"{name}: not clean: {reason}" for name, reason in unclean.items()])
    path, total = prepared.folder.path, len(prepared.runs)
    print(f"{total - len(unclean)} of {total} runs are clean: {path}")
    print(
        f"next: coadapt compare {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
    )
    return int(bool(unclean))


def _print_plan(prepared: "PreparedExperiment") -> None:
    width = max(len(run.name) for run in prepared.runs)
    for place, (name, state) in enumerate(prepared.states(), start=1):
        print(f"{place:4}  {name:{width}}  {state}")
    left = len(prepared.remaining())
    duration = readable_duration(prepared.expected_s())
    print(f"{left} of {len(prepared.runs)} runs to do, about {duration}, into {prepared.folder.path}")


@contextmanager
def _progress_bar(prepared: "PreparedExperiment", parallel: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each run; on a terminal it updates a bar with the time left."""
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return

    class TimeLeft(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            left_s = max(task.fields["end_s"] - time.monotonic(), 0.0)
            return Text(f"about {readable_duration(left_s)} left")

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        TimeLeft(),
    )
    with progress.Progress(*columns, console=console, redirect_stdout=sys.stdout.isatty()) as bar:
        shown = bar.add_task("", total=len(prepared.runs), end_s=0.0)

        def update() -> None:
            left = prepared.remaining()
            bar.update(
                shown,
                completed=len(prepared.runs) - len(left),
                description=left[0].name if left else "done",
                end_s=time.monotonic() + prepared.expected_s() / parallel,
            )

        update()
        yield update


def readable_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
