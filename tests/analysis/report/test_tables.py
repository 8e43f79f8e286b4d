import io

import pytest
from rich.console import Console

from analysis.report.tables import (
    PLAIN_WIDTH,
    Table,
    decimal,
    format_or_dash,
    percent,
    seconds,
    stdout_console,
    to_console,
    to_markdown,
    to_text,
)

TABLE = Table("JCT", ("policy", "mean s"), [("fixed", "20.0 [19, 21]"), ("long|name", "7.5")])


def on_console(*, terminal: bool, table: Table = TABLE) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, color_system=None, width=60)
    to_console(console, table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_markdown_has_the_title_in_bold_and_numbers_on_the_right():
    assert to_markdown(TABLE).splitlines() == [
        "**JCT**",
        "",
        "| policy | mean s |",
        "| --- | ---: |",
        "| fixed | 20.0 [19, 21] |",
        "| long/name | 7.5 |",
    ]


def test_plain_text_aligns_names_left_and_numbers_right():
    table = Table("Times", ["name", "ms"], [["a", "10"], ["long", "7"]])
    assert to_text(table) == "Times\n\nname  ms\na     10\nlong   7"


def test_an_empty_title_is_not_shown():
    untitled = Table("", ["name", "ms"], [["a", "10"]])
    assert to_text(untitled) == "name  ms\na     10"
    assert to_markdown(untitled).startswith("| name")
    assert on_console(terminal=False, table=untitled)[0].split() == ["name", "ms"]


def test_a_table_without_rows_shows_its_columns():
    empty = Table("", ["name", "ms"], [])
    assert to_text(empty) == "name  ms"
    assert to_markdown(empty) == "| name | ms |\n| --- | ---: |"


def test_a_terminal_shows_bounds_below_their_figure_and_a_file_on_one_line():
    assert "20.0 [19, 21]" in "\n".join(on_console(terminal=False))
    terminal = "\n".join(on_console(terminal=True))
    assert "20.0 [19, 21]" not in terminal
    assert "[19, 21]" in terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_cells_and_columns_are_never_read_as_markup(terminal: bool):
    table = Table("[red]t", ["[bold]c", "d"], [["[/]", "[link]"]])
    shown = "\n".join(on_console(terminal=terminal, table=table))
    assert all(text in shown for text in ("[red]t", "[bold]c", "[/]", "[link]"))


def test_stdout_that_is_no_terminal_gets_long_lines_without_colors():
    console = stdout_console()
    assert (console.width, console.is_terminal, console.color_system) == (PLAIN_WIDTH, False, None)


def test_a_missing_number_is_a_dash():
    assert [decimal(None), seconds(None), percent(None), format_or_dash(None, "+.1%")] == ["-"] * 4
    assert [decimal(1.25, 2), seconds(1.25), percent(0.254)] == ["1.25", "1.2 s", "25%"]
    assert format_or_dash(0.1, "+.1%") == "+10.0%"
