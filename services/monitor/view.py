"""Shows a JobTable to people: as a table on terminals, as plain lines elsewhere. Pure.

Names and reasons come from users and from errors of their jobs. They are therefore never read as markup, and
characters that could move the cursor of a terminal are replaced.
"""

import math
from collections import Counter
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.codec import printable
from common.protocol import JobRow, JobTable
from common.types import JobState, Node, replicas_of

BAR_WIDTH = 12
LINES_AROUND = 4
"""Lines other than jobs and nodes: the title, the heading and its rule, and the line about hidden jobs."""
NARROW_WIDTH = 70
DECISION_WIDTH = 80
WIDE_WIDTH = 110
STYLES = {
    JobState.PENDING: "dim",
    JobState.RUNNING: "cyan",
    JobState.COMPLETED: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "yellow",
}


@dataclass(frozen=True)
class JobColumn:
    name: str
    from_width: int
    """Shown on terminals that are at least this many characters wide."""


COLUMNS = (
    JobColumn("job", 0),
    JobColumn("application", WIDE_WIDTH),
    JobColumn("state", 0),
    JobColumn("slots", 0),
    JobColumn("batch", NARROW_WIDTH),
    JobColumn("budget", WIDE_WIDTH),
    JobColumn("metric", WIDE_WIDTH),
    JobColumn("last decision", DECISION_WIDTH),
)


def render(table: JobTable, width: int, height: int) -> RenderableType:
    """The whole table in `height` lines of `width` characters: active jobs first, then the newest ended
    ones."""
    nodes = _node_lines(table, max(height // 4, 1))
    columns = [column for column in COLUMNS if width >= column.from_width]
    grid = Table(box=SIMPLE_HEAD, show_edge=False, expand=width >= DECISION_WIDTH)
    for column in columns:
        rest = 1 if column.name == "last decision" else None
        grid.add_column(column.name, no_wrap=True, overflow="ellipsis", ratio=rest)
    rows = _active_first(table.jobs)
    room = max(height - len(nodes) - LINES_AROUND, 1)
    for row in rows[:room]:
        cells = _cells(row)
        grid.add_row(*(cells[column.name] for column in columns))
    hidden = rows[room:]
    more = [f"... and {len(hidden)} more jobs: {_states(hidden)}"] if hidden else []
    title = f"{printable(table.run_id)}  {summary_line(table)}"
    return Group(*map(_line, [title, *nodes]), grid, *map(_line, more))


def job_lines(table: JobTable) -> list[str]:
    """A heading and one line per job, in columns, ended jobs first; one line counts the jobs left out."""
    heading = ("JOB", "APPLICATION", "STATE", "SLOTS", "BATCH", "PROGRESS", "METRIC", "LAST DECISION")
    cells = [heading, *map(_texts, table.jobs)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heading))]
    head, *lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    older = [f"({table.left_out} that ended earlier)"] if table.left_out else []
    return [head, *older, *lines]


def change_lines(old: JobTable | None, new: JobTable) -> list[str]:
    """One line for each job that is new or whose state, slots or batch has changed since the older table."""
    before = {row.id: _key_facts(row) for row in old.jobs} if old else {}
    lines = []
    for row in new.jobs:
        if before.get(row.id) != _key_facts(row):
            job, _, state, slots, batch, progress, metric, reason = _texts(row)
            facts = (state, slots, f"batch {batch}" if batch else "", f"progress {progress}", metric)
            text = "  ".join(fact for fact in facts if fact)
            lines.append(f"{_elapsed(new)}  {job}  {text}" + (f"  ({reason})" if reason else ""))
    return lines


def status_line(table: JobTable) -> str:
    """The state of the run in one line."""
    nodes = ", ".join(f"{printable(node.name)} {used}/{node.slots}" for node, used in _slots_in_use(table))
    return f"{_elapsed(table)}  {summary_line(table)}; slots in use: {nodes or 'no nodes'}"


def summary_line(table: JobTable) -> str:
    older = f", and {table.left_out} that ended earlier" if table.left_out else ""
    return f"{printable(table.policy)}, round {table.rounds}: {_states(table.jobs)}{older}"


def _active_first(jobs: tuple[JobRow, ...]) -> list[JobRow]:
    active = [row for row in jobs if not row.state.terminal]
    ended = [row for row in jobs if row.state.terminal]
    return active + sorted(ended, key=lambda row: row.ended_s or 0.0, reverse=True)


def _slots_in_use(table: JobTable) -> list[tuple[Node, int]]:
    used: Counter[str] = Counter()
    for row in table.jobs:
        for placement in row.allocation if not row.state.terminal else ():
            used[placement.node] += placement.replicas
    return [(node, used[node.name]) for node in table.nodes]


def _node_lines(table: JobTable, room: int) -> list[str]:
    """The slots of each node as a bar. Nodes that do not fit are summed up in the last line."""
    nodes = _slots_in_use(table)
    shown = nodes if len(nodes) <= room else nodes[: room - 1]
    lines = [
        f"{printable(node.name)}  {'■' * min(used, node.slots)}{'□' * max(node.slots - used, 0)}  "
        f"{used}/{node.slots}  speed {node.slot_speed:g}"
        for node, used in shown
    ]
    rest = nodes[len(shown) :]
    if rest:
        used, slots = sum(used for _, used in rest), sum(node.slots for node, _ in rest)
        lines.append(f"{len(rest)} {'more ' if shown else ''}nodes  {used}/{slots}")
    return lines


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _cells(row: JobRow) -> dict[str, RenderableType]:
    job, application, state, slots, batch, _, metric, reason = map(Text, _texts(row))
    state.stylize(STYLES.get(row.state, ""))
    return {
        "job": job,
        "application": application,
        "state": state,
        "slots": slots,
        "batch": batch,
        "budget": ProgressBar(total=1.0, completed=_spent(row), width=BAR_WIDTH),
        "metric": metric,
        "last decision": reason,
    }


def _texts(row: JobRow) -> tuple[str, str, str, str, str, str, str, str]:
    """id, application, state, slots, batch, progress, metric, reason."""
    replicas = replicas_of(row.allocation)
    batch = str(row.config.total_batch(replicas)) if row.config and replicas else ""
    metric = f"{row.metric:.4g} of {row.target:g}" if row.metric is not None else f"target {row.target:g}"
    progress = f"{row.progress:.0f}/{row.max_progress:.0f}"
    slots = printable(" ".join(f"{placement.node}:{placement.replicas}" for placement in row.allocation))
    job, application, reason = printable(row.id), printable(row.application), printable(row.reason)
    return job, application, row.state, slots, batch, progress, metric, reason


def _spent(row: JobRow) -> float:
    """Fraction of the budget that the job's progress has used, 0 to 1."""
    spent = row.progress / row.max_progress if row.max_progress > 0 else 0.0
    return min(max(spent, 0.0), 1.0) if math.isfinite(spent) else 0.0


def _states(jobs: tuple[JobRow, ...] | list[JobRow]) -> str:
    count = Counter(row.state for row in jobs)
    return ", ".join(f"{count[state]} {state}" for state in JobState if count[state]) or "no jobs"


def _key_facts(row: JobRow) -> tuple[object, ...]:
    return row.state, row.allocation, row.config


def _elapsed(table: JobTable) -> str:
    """Seconds since the first submission in the table."""
    start_s = min((row.submitted_s for row in table.jobs), default=table.now_s)
    return f"{table.now_s - start_s:6.1f}s"
