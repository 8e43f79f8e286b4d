"""`coadapt experiment`: its options, what it does in which order, and how its progress is shown."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import path_of, whole

if TYPE_CHECKING:
    from services.experiment.folder import Folder, RunRecord
    from services.experiment.plan import PlannedRun, Workloads
    from services.experiment.runner import RunOutcome, RunTask

MAX_SEEDS = 1000
MAX_PARALLEL = 1024


def experiment(
    file: Annotated[
        Path, typer.Argument(parser=path_of, metavar="FILE", help="Definition of the experiment (TOML).")
    ],
    policies: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME", help="Only this policy; several: give the option again."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME", help="Only this set; several: give the option again."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, MAX_SEEDS),
            metavar="N",
            help="So many seeds: those of FILE, and then the numbers after them.",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Backend of joblib that runs go through.")
    ] = "sequential",
    parallel: Annotated[
        int,
        typer.Option(
            "--jobs-parallel",
            "-j",
            parser=whole(1, MAX_PARALLEL),
            metavar="N",
            help="So many runs at once, for an engine that has a machine for each.",
        ),
    ] = 1,
    alone: Annotated[
        bool,
        typer.Option(
            "--isolated",
            help="Instead, runs of one job alone, of each application and with 1, 2 and 4 replicas: what "
            "compare judges the model of rho by.",
        ),
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Repeat runs that were kept though they were not clean.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and the time it will take; run nothing.")
    ] = False,
) -> int:
    """Run policies x sets x seeds on real jobs, one stack after the other.

    Results are kept in a folder of the experiment's name in logs. The same command goes on where an
    interrupted one stopped, and does nothing where all is done. Runs that a busy machine disturbed, or that
    went wrong, are put aside in lost/ and repeated.

    Exit 0: every run is there and clean; 1: some are not; 3: the machine is busy, or a stack does not
    come up."""
    from common.config import load_config
    from common.lifecycle import signals_as_interrupt
    from services.experiment.folder import Folder, code_digest
    from services.experiment.parallel_runs import check_engine
    from services.experiment.plan import (
        configured,
        isolated,
        only,
        planned,
        read_definition,
        with_seeds,
        workloads_of,
    )
    from services.experiment.runner import RunTask, check_cluster, check_policies
    from workloads.applications import applications

    definition = read_definition(file)
    definition = with_seeds(definition, seeds) if seeds else definition
    config = configured(load_config(os.environ), definition)
    known = applications(config.applications.modules)
    if alone:
        plan, jobs = isolated(definition, known)
    else:
        plan, jobs = planned(definition), workloads_of(definition, known)
    runs = only(plan, policies or [], sets or [])
    if policies and not alone:  # these take turns among themselves
        runs = only(planned(definition, policies), [], sets or [])
    check_cluster(definition)
    check_policies({run.policy: None for run in runs})
    check_engine(engine)
    folder = Folder(Path(config.run.logs_dir) / definition.name, definition)
    workloads = _texts(runs, jobs)
    if dry_run:
        _show_plan(folder, runs)
        return 0
    with signals_as_interrupt(), folder.claimed():
        if count := folder.end_leftovers():
            _say(f"{count} processes that a killed experiment had left running were ended")
        for name in folder.lose_halves(plan):
            _say(f"{name}: was interrupted, is put aside in lost/, and repeated")
        folder.settle(config)
        folder.check_workloads(plan, workloads)
        if again:
            folder.lose_unclean(runs)
        done, code = folder.records(runs), code_digest()
        tasks = [
            RunTask(
                run=run,
                workload=workloads[run.set, run.seed],
                folder=str(folder.path),
                definition=definition,
                config=config,
                command=os.getpid(),
                code=code,
            )
            for run in runs
            if run not in done
        ]
        try:
            _work(folder, runs, tasks, engine, parallel)
        except KeyboardInterrupt:
            _say("interrupted: the same command goes on from here")
            raise
        finally:  # of an engine's processes, which may have been killed in the middle of a run
            folder.end_leftovers()
            folder.lose_halves(runs)
        return _conclude(folder, runs)


def _texts(runs: "Sequence[PlannedRun]", workloads: "Workloads") -> dict[tuple[str, int], str]:
    """The workload files by set and seed; so what is wrong with one is told before the first run."""
    return {(run.set, run.seed): workloads(run.set, run.seed)[1] for run in runs}


def _work(
    folder: "Folder", runs: "Sequence[PlannedRun]", tasks: "Sequence[RunTask]", engine: str, parallel: int
) -> None:
    """Do the tasks, and show how far that is."""
    from services.bench.quiet_machine import require_quiet
    from services.experiment.parallel_runs import outcomes

    if not tasks:
        return
    require_quiet(folder.definition.guard, "raise the bounds of [guard]")
    with _bar(folder, runs, tasks, parallel) as advance:
        for number, outcome in enumerate(outcomes(tasks, engine, parallel), start=1):
            _say(f"{len(runs) - len(tasks) + number}/{len(runs)} {_line(outcome)}")
            advance()


def _line(outcome: "RunOutcome") -> str:
    jct = "none completed" if outcome.mean_jct_s is None else f"mean JCT {outcome.mean_jct_s:.1f} s"
    record = outcome.record
    verdict = "clean" if record.clean else f"NOT CLEAN, kept: {record.reason}"
    return f"{outcome.run.name}: {jct}, {record.wall_s or 0.0:.0f} s in all, {verdict}"


@contextmanager
def _bar(
    folder: "Folder", runs: "Sequence[PlannedRun]", tasks: "Sequence[RunTask]", parallel: int
) -> "Iterator[Callable[[], None]]":
    """What to call when a run is done; a bar with the time left on a terminal, nothing elsewhere."""
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
            return Text(f"about {_duration(left_s)} left")

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        TimeLeft(),
    )
    with progress.Progress(*columns, console=console, redirect_stdout=sys.stdout.isatty()) as bar:
        shown = bar.add_task("", total=len(runs), end_s=0.0)

        def show() -> None:
            records = folder.records(runs)
            left = [task.run for task in tasks if task.run not in records]
            bar.update(
                shown,
                completed=len(runs) - len(left),
                description=left[0].name if left else "done",
                end_s=time.monotonic() + _expected_s(folder, left, records) / parallel,
            )

        show()
        yield show


def _show_plan(folder: "Folder", runs: "Sequence[PlannedRun]") -> None:
    records = folder.records(runs)
    width = max(len(run.name) for run in runs)
    for number, run in enumerate(runs, start=1):
        record = records.get(run)
        state = "to do" if record is None else "done" if record.clean else f"done, not clean: {record.reason}"
        print(f"{number:4}  {run.name:{width}}  {state}")
    left = [run for run in runs if run not in records]
    duration = _duration(_expected_s(folder, left, records))
    print(f"{len(left)} of {len(runs)} runs to do, about {duration}, into {folder.path}")


def _expected_s(
    folder: "Folder", left: "Sequence[PlannedRun]", records: "dict[PlannedRun, RunRecord]"
) -> float:
    from services.experiment.plan import ISOLATED_S, expected_s

    run_s = ISOLATED_S if left and left[0].alone else folder.definition.run_s
    walls_s = {run: record.wall_s for run, record in records.items() if record.wall_s is not None}
    watches_s = len(left) * folder.definition.guard.watch_s
    return expected_s(left, walls_s, run_s) + watches_s


def _conclude(folder: "Folder", runs: "Sequence[PlannedRun]") -> int:
    records = folder.records(runs)
    unclean = [run for run, record in records.items() if not record.clean]
    for run in unclean:
        _complain(f"{run.name}: not clean: {records[run].reason}")
    clean = len(runs) - len(unclean)
    print(f"{clean} of {len(runs)} runs are clean: {folder.path}")
    print(f"next: coadapt compare {_shortest(folder.path)}")
    return 1 if unclean else 0


def _shortest(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _say(text: str) -> None:
    print(text, flush=True)


def _complain(text: str) -> None:
    print(f"coadapt: {text}", file=sys.stderr, flush=True)
