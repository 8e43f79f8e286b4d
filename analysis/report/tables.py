"""The project's one table renderer: a table of strings on a console, in Markdown and as plain text.

The first column names the row and is aligned left; all others are aligned right, unless the table says that
they hold text.
"""

import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 10_000
"""Characters per line when stdout is not a terminal: nothing is wrapped or cut."""


@dataclass(frozen=True)
class Table:
    """Cells are finished strings; every row has one cell per column. An empty title is not shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[str] = ()
    """Columns that are aligned left, in addition to the first."""

    def is_text(self, number: int) -> bool:
        return number == 0 or self.columns[number] in self.text_columns


def to_console(console: "Console", table: Table) -> None:
    """Print the table. Cells may come from logs, so they are never read as markup.

    A terminal has short lines, so there the bounds of a figure go on a line of their own below it. Elsewhere
    the table is padded text: rich takes a millisecond for each row."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    if not console.is_terminal:
        console.out(to_text(table))
        return
    grid = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1))
    for number, column in enumerate(table.columns):
        justify: Literal["left", "right"] = "left" if table.is_text(number) else "right"
        grid.add_column(Text(column), justify=justify, overflow="fold", no_wrap=not number)
    for row in table.rows:
        grid.add_row(*(Text(_break_before_bounds(cell)) for cell in row))
    if table.title:
        console.print(Text(table.title, style="bold"))
    console.print(grid)


def to_markdown(table: Table) -> str:
    """A Markdown table below its title in bold; no newline at the end. A `|` in a cell becomes `/`."""
    rule = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = [_markdown_row(cells) for cells in (table.columns, rule, *table.rows)]
    return "\n".join([f"**{table.title}**", "", *lines] if table.title else lines)


def to_text(table: Table) -> str:
    """Columns of plain text below the title, two spaces apart; no newline at the end."""
    rows = [table.columns, *table.rows]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if table.is_text(number) else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([table.title, "", *lines] if table.title else lines)


def stdout_console() -> "Console":
    """A console on stdout that never reads text as markup; on a terminal it has colors and the real width."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names in logs may not fit stdout's encoding
    return Console(
        file=sys.stdout,
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        width=None if terminal else PLAIN_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _break_before_bounds(cell: str) -> str:
    """As in `0.58 [0.52, 0.66]`; other texts stay as they are."""
    return re.sub(r"^([+-]?[\d.]+%?) (?=[\[(])", r"\1\n", cell)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


# --------------------------------------------------------------------------- number formats


def format_or_dash(value: float | None, spec: str) -> str:
    """`value` by a format specification such as `.1f` or `+.1%`; a dash for None."""
    return "-" if value is None else format(value, spec)


def decimal(value: float | None, digits: int = 1) -> str:
    return format_or_dash(value, f".{digits}f")


def seconds(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s:.1f} s"


def percent(fraction: float | None) -> str:
    return format_or_dash(fraction, ".0%")
