"""`python analysis/summarize.py logs/`: what every run did, and whether its log is consistent.

Exit codes: 0 all audits are clean; 1 an audit found something; 2 bad input.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

if not __package__:  # run as a script: the packages are next to this folder, not in it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import msgspec
import typer
from typer.exceptions import TyperException

from analysis.log.audit import Audit, audit
from analysis.log.find_logs import NoRuns, find_logs
from analysis.log.frames import Frames, from_records, read
from analysis.log.history import RunHistory, history
from analysis.log.plain_text import plain
from analysis.report.run_report import show
from analysis.report.tables import stdout_console
from analysis.run.fairness import IsolatedTime
from analysis.run.measures import RunSummary, summary

CLEAN, NOT_CLEAN, BAD_INPUT = 0, 1, 2

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code. `arguments`: those of the command line if None."""
    try:
        code: int = app(arguments, prog_name="summarize", standalone_mode=False)
        sys.stdout.flush()
        return code
    except TyperException as error:
        print(f"summarize: {plain(error.format_message())}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of our output has gone
        return NOT_CLEAN


@app.command(help=__doc__)
def summarize_logs(
    places: Annotated[
        list[str] | None,
        typer.Argument(metavar="PLACES", help="Folders of runs, runs, or events.jsonl files. Default: logs"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of runs as JSON.")] = False,
) -> int:
    try:
        paths = [path for place in places or ["logs"] for path in find_logs(Path(place))]
    except (NoRuns, ValueError) as error:  # ValueError: a path with a NUL
        print(f"summarize: {plain(str(error))}", file=sys.stderr)
        return BAD_INPUT
    console = None if as_json else stdout_console()
    summaries = []
    for path in dict.fromkeys(paths):
        run, run_summary = summarize(read(path))
        summaries.append(run_summary)
        if console:
            show(console, path, run, run_summary)
    if as_json:
        # msgspec writes what is not a number as null; json keeps to ASCII, whatever stdout's encoding.
        print(json.dumps(msgspec.json.decode(msgspec.json.encode(summaries)), indent=2))
    return CLEAN if all(run.audit.ok for run in summaries) else NOT_CLEAN


def summarize(
    frames: Frames, isolated: Callable[[RunHistory], IsolatedTime | None] = lambda _: None
) -> tuple[RunHistory, RunSummary]:
    """Measures and verdict of one log, as far as it could be read. `isolated` may give the times that the
    jobs of a run take alone (`analysis.run.fairness`)."""
    try:
        run = history(frames)
        return run, summary(run, audit(run), isolated(run))
    except ArithmeticError as error:  # valid records with absurd numbers
        empty = history(from_records([], frames.path))
        findings = (*frames.faults, f"{frames.path}: numbers out of any range: {error}")
        verdict = Audit(ok=False, events=len(frames.events), gaps=0, findings=findings)
        return empty, summary(empty, verdict)


if __name__ == "__main__":
    sys.exit(main())
