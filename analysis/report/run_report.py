"""One run for people: its measures, the verdict of the audit, and a table of its jobs."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.log.history import JobHistory, RunHistory
from analysis.log.plain_text import plain
from analysis.report.tables import Table, decimal, percent, seconds, to_console
from analysis.run.measures import JobSummary, RunSummary

if TYPE_CHECKING:
    from rich.console import Console

MAX_REASON_CHARS = 200
TEXT_COLUMNS = ("application", "end")
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
        to_console(console, Table("", COLUMNS, rows, TEXT_COLUMNS))
    console.print()


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
    yield (
        "JCT",
        f"mean {seconds(jct.mean)}, p50 {seconds(jct.p50)}, p90 {seconds(jct.p90)}, p99 {seconds(jct.p99)}",
    )
    yield "time", f"makespan {seconds(result.makespan_s)}, queueing {seconds(result.queue_s.mean)} a job"
    over_realised = decimal(result.goodput.modelled_over_realised, 3)
    yield (
        "goodput",
        f"{decimal(result.goodput.cluster_mean)} useful examples/s of "
        f"{decimal(result.throughput.cluster_mean)} examples/s, efficiency "
        f"{decimal(result.efficiency_mean, 3)}, modelled/realised {over_realised}",
    )
    batch_changes = sum(job.batch_changes for job in run.jobs.values())
    yield (
        "slots",
        f"{percent(result.slot_utilisation)} used, {result.rescales.count} rescales "
        f"({seconds(result.rescales.seconds)} lost), {batch_changes} changes of batch alone",
    )
    yield (
        "fairness",
        f"rho worst {decimal(fair.worst_rho, 2)}, mean {decimal(fair.mean_rho, 2)}, above 1 "
        f"{percent(fair.unfair_fraction)}, Jain {decimal(fair.jain, 3)}",
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
        decimal(job.jct_s),
        decimal(job.queue_s),
        decimal(job.replicas_mean, 2),
        decimal(job.batch_mean, 0),
        str(job.rescales),
        decimal(job.metric, 4),
        decimal(job.target, 4),
        decimal(job.rho, 2),
        end,
    )
