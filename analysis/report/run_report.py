"""One run for people: its measures, the verdict of the audit, and a table of its jobs."""

import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.log.history import JobHistory, RunHistory
from analysis.log.plain_text import plain
from analysis.run.measures import JobSummary, RunSummary

if TYPE_CHECKING:
    from rich.console import Console

MAX_REASON_CHARS = 200
PLAIN_WIDTH = 10_000
"""Characters that a line may have when stdout is not a terminal: nothing is wrapped or cut."""
TEXT_COLUMNS = ("job", "application", "end")
COLUMNS = (
    "job",
    "application",
    "JCT s",
    "queue s",
    "replicas",
    "batch",
    "rescales",
    "metric",
    "target",
    "rho",
    "end",
)


def show(console: "Console", path: Path, run: RunHistory, result: RunSummary) -> None:
    """Print one run. Text from the log is never read as markup."""
    from rich.text import Text

    console.print(Text(plain(f"run {result.run_id}"), style="bold"), Text(plain(f"({path})"), style="dim"))
    verdict = result.audit
    if verdict.events:
        measures = list(_measures(run, result))
        width = max(len(name) for name, _ in measures)
        for name, value in measures:
            console.print(Text(f"  {name:<{width}}  ", style="dim") + Text(plain(value), style="not dim"))
    counted = f"{verdict.events} events, {verdict.gaps} missing"
    if verdict.ok:
        console.print(Text(f"  audit: clean ({counted})", style="green"))
    else:
        console.print(Text(f"  audit: NOT CLEAN ({counted})", style="bold red"))
        for finding in verdict.findings:
            console.print(Text(f"    - {plain(finding)}"))
    if result.per_job:
        rows = []
        for job in result.per_job:
            stopped = run.ended and job.id in run.active_at_end
            rows.append([plain(cell) for cell in _job_row(job, run.jobs[job.id], stopped)])
        _print_table(console, rows)
    console.print()


def stdout_console() -> "Console":
    """A console on stdout that never reads text as markup."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names in a log may not fit stdout's encoding
    return Console(
        file=sys.stdout,
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        width=None if terminal else PLAIN_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _print_table(console: "Console", rows: Sequence[Sequence[str]]) -> None:
    """Without a terminal a table is padded text: rich takes a millisecond for each row."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not console.is_terminal:
        widths = [max(map(len, cells)) for cells in zip(COLUMNS, *rows, strict=True)]
        for row in (COLUMNS, *rows):
            cells = [
                cell.ljust(width) if name in TEXT_COLUMNS else cell.rjust(width)
                for name, cell, width in zip(COLUMNS, row, widths, strict=True)
            ]
            console.out(" " + "  ".join(cells).rstrip())
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True, padding=(0, 1))
    for name in COLUMNS:
        number = name not in TEXT_COLUMNS
        table.add_column(name, overflow="fold", justify="right" if number else "left", no_wrap=number)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _measures(run: RunHistory, result: RunSummary) -> Iterator[tuple[str, str]]:
    """(name, value) of each line."""
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


def _n(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
