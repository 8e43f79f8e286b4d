"""One run for people: its measures, the verdict of the audit, and a table of its jobs."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.log.history import JobHistory, RunHistory
from analysis.log.plain_text import plain
from analysis.run.measures import JobSummary, RunSummary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_REASON_CHARS = 200
PLAIN_WIDTH = 10_000
"""Characters that a line may have when stdout is not a terminal: nothing is wrapped or cut."""


def show(console: "Console", path: Path, run: RunHistory, result: RunSummary) -> None:
    """Print one run. Text from the log is never read as markup."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(plain(f"run {result.run_id}"), style="bold"), Text(plain(f"({path})"), style="dim"))
    if result.audit.events:
        figures = Table.grid(padding=(0, 2))
        for name, value in _figures(run, result):
            figures.add_row(Text(f"  {name}", style="dim"), Text(plain(value)))
        console.print(figures)
    verdict = result.audit
    counted = f"{verdict.events} events, {verdict.gaps} missing"
    if verdict.ok:
        console.print(Text(f"  audit: clean ({counted})", style="green"))
    else:
        console.print(Text(f"  audit: NOT CLEAN ({counted})", style="bold red"))
        for finding in verdict.findings:
            console.print(Text(f"    - {plain(finding)}"))
    if result.per_job:
        console.print(_job_table(console, run, result))
    console.print()


def _figures(run: RunHistory, result: RunSummary) -> Iterator[tuple[str, str]]:
    jobs, jct, fair = result.jobs, result.jct_s, result.fairness
    yield (
        "run",
        f"policy {result.policy or '-'}, workload {result.workload or '-'}, "
        f"seed {'-' if result.seed is None else result.seed}",
    )
    yield (
        "jobs",
        f"{jobs.submitted} submitted, {jobs.completed} completed, {jobs.verified} verified, "
        f"{jobs.failed} failed, {jobs.cancelled} cancelled",
    )
    yield "JCT", f"mean {_s(jct.mean)}, p50 {_s(jct.p50)}, p90 {_s(jct.p90)}, p99 {_s(jct.p99)}"
    yield "time", f"makespan {_s(result.makespan_s)}, queueing {_s(result.queue_s.mean)} a job"
    yield (
        "goodput",
        f"{_n(result.goodput.cluster_mean)} useful examples/s "
        f"of {_n(result.throughput.cluster_mean)} examples/s, efficiency {_n(result.efficiency_mean, 3)}, "
        f"modelled/realised {_n(result.goodput.modelled_over_realised, 3)}",
    )
    batch_changes = sum(job.batch_changes for job in run.jobs.values())
    yield (
        "slots",
        f"{_percent(result.slot_utilisation)} used, {result.rescales.count} rescales "
        f"({_s(result.rescales.seconds)} lost), {batch_changes} changes of batch alone",
    )
    yield (
        "fairness",
        f"rho worst {_n(fair.worst_rho, 2)}, mean {_n(fair.mean_rho, 2)}, above 1 "
        f"{_percent(fair.unfair_fraction)}, Jain {_n(fair.jain, 3)}",
    )


def _job_table(console: "Console", run: RunHistory, result: RunSummary) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=True, padding=(0, 1))
    for column in ("job", "application"):
        table.add_column(column, overflow="fold")
    for column in ("JCT s", "queue s", "replicas", "batch", "rescales", "metric", "target", "rho"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("end", overflow="fold")
    for job in result.per_job:
        stopped = run.ended and job.id in run.active_at_end
        table.add_row(*(Text(plain(cell)) for cell in _job_row(job, run.jobs[job.id], stopped)))
    return table


def _job_row(job: JobSummary, history: JobHistory, stopped: bool) -> tuple[str, ...]:
    """`stopped`: the stack was stopped while the job was under way; its state in the log is pending."""
    end = str(history.end or ("stopped" if stopped else history.state))
    if job.verified:
        end = "verified"
    elif history.reason:
        end = f"{end}: {history.reason[:MAX_REASON_CHARS]}"
    return (
        job.id,
        job.application,
        _n(job.jct_s),
        _n(job.queue_s),
        _n(job.replicas_mean, 2),
        _n(job.batch_mean, 0),
        str(job.rescales),
        _n(job.metric, 4),
        _n(job.target, 4),
        _n(job.rho, 2),
        end,
    )


def stdout_console() -> "Console":
    """A console on stdout that never reads text as markup."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(
        file=sys.stdout,
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        width=None if terminal else PLAIN_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _n(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
