"""Shows the scheduler's job table until a condition holds or the user stops it."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.live import Live

from common.protocol import JobTable
from services.monitor.view import change_lines, job_lines, render, status_line

REFRESH_S = 0.25
STATUS_EVERY_S = 5.0
"""Time between two plain status lines, when the output is not a terminal."""

Show = Callable[[JobTable], None]


def follow(ask: Callable[[], JobTable], show: Show, until: Callable[[JobTable], bool]) -> JobTable:
    """Show the table again and again. Returns the first table for which `until` holds."""
    while True:
        table = ask()
        show(table)
        if until(table):
            return table
        time.sleep(REFRESH_S)


@contextmanager
def screen() -> Iterator[Show]:
    """A live table if standard output is a terminal, else plain lines."""
    console = Console(highlight=False)
    if not console.is_terminal:
        yield ChangeLines()
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield lambda table: live.update(render(table, console.width, console.height), refresh=True)


def print_table(table: JobTable) -> None:
    """Show the present table once, in the form that `screen` uses."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(render(table, console.width, max(console.height, len(table.jobs) + 20)))
    else:
        print(status_line(table), *job_lines(table), sep="\n", flush=True)


class JobChanges:
    """Prints a line for each change of a job; only of the named jobs if `job_ids` is given."""

    def __init__(self, job_ids: Collection[str] | None = None) -> None:
        self._job_ids = job_ids
        self._last: JobTable | None = None

    def __call__(self, table: JobTable) -> None:
        if self._job_ids is not None:
            named = tuple(row for row in table.jobs if row.id in self._job_ids)
            table = msgspec.structs.replace(table, jobs=named)
        for line in change_lines(self._last, table):
            print(line, flush=True)
        self._last = table


class ChangeLines(JobChanges):
    """Also prints a status line of the whole run every STATUS_EVERY_S seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._next_status_s = 0.0

    def __call__(self, table: JobTable) -> None:
        super().__call__(table)
        if table.now_s >= self._next_status_s:
            print(status_line(table), flush=True)
            self._next_status_s = table.now_s + STATUS_EVERY_S
