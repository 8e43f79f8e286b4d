"""`coadapt compare DIR`, or `python analysis/compare.py DIR`: policies against each other, over paired runs.

Exit 0: every run counts. 1: one was left out, or has no partner. 2: bad input.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if not __package__:  # run as a script: the packages stand beside this folder, not in it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer

from common.options import path_of

if TYPE_CHECKING:
    from analysis.comparison import Comparison
    from analysis.report import Report

COMPLETE, INCOMPLETE, BAD_INPUT = 0, 1, 2
JSON_FILE, MARKDOWN_FILE = "comparison.json", "comparison.md"


def compare(
    place: Annotated[
        Path, typer.Argument(parser=path_of, metavar="DIR", help="Folder of an experiment's runs.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_of, metavar="DIR", help=f"Write {JSON_FILE}, {MARKDOWN_FILE} and figures there."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=f"Print what {JSON_FILE} holds.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    baselines: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            metavar="POLICY",
            help="Compare with this policy only; several: give the option again.",
        ),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(
            parser=path_of,
            metavar="DIR",
            help="Measured profiles for rho and step times; without it, those of the project.",
        ),
    ] = None,
) -> int:
    """Compare policies over the runs of an experiment.

    Runs of the same jobs are paired by set and seed. Ratios have 95% bootstrap intervals, over the pairs of
    all sets as one pool, and by sets, which are resampled first there. What is left out is listed.

    Exit 1 when a run was left out or has no partner."""
    from common.lifecycle import UserError

    if as_json and markdown:
        raise typer.BadParameter("--json, --markdown: one of them at a time")
    report = make_report(place, baselines or [], profiles)
    if not report.is_calibrated:
        print(f"compare: rho goes by {report.rho_from}", file=sys.stderr)
    text = to_json(report)
    if out is not None:
        try:
            write(report, out)
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error
    from analysis.summarize import stdout_console

    screen = stdout_console()
    if as_json:
        screen.out(text, end="")
    elif markdown:
        from analysis.report import to_markdown

        screen.out(to_markdown(report), end="")
    else:
        from analysis.report import show

        show(screen, report)
    return INCOMPLETE if report.comparison.left_out else COMPLETE


def make_report(place: Path, baselines: Sequence[str], profiles: Path | None) -> "Report":
    """Read and compare. Raises UserError for what the user has to mend."""
    from analysis import comparison, isolated
    from analysis.experiment import gather
    from analysis.load import NoRuns
    from analysis.report import Report
    from common.lifecycle import UserError

    rho_from, is_calibrated = isolated.source(profiles), True
    try:
        model = isolated.calibrated(profiles)
        try:
            experiment = gather(place, model, model.step_time, _followed)
        except UserError as error:
            if profiles is not None:
                raise
            # Without a profile of its applications, or of its slots, a run can still be judged by itself.
            is_calibrated = False
            rho_from = f"the models in each run's own log, as in summarize ({error})"
            experiment = gather(place, shown=_followed)
    except (NoRuns, ValueError) as error:  # ValueError: a path with a NUL
        raise UserError(str(error)) from error
    result = comparison.compare(experiment.runs, experiment.left_out, baselines)
    _check(result, place, baselines)
    return Report(experiment, result, rho_from, is_calibrated)


def _check(result: "Comparison", place: Path, baselines: Sequence[str]) -> None:
    from common.lifecycle import UserError

    why = "; ".join(f"{entry.run}: {entry.why}" for entry in result.left_out[:3])
    more = f" (left out: {why}{'; ...' if len(result.left_out) > 3 else ''})" if why else ""
    if len(result.policies) < 2:
        found = ", ".join(result.policies) or "none"
        raise UserError(f"{place}: usable runs of two policies or more are needed; there: {found}{more}")
    for baseline in baselines:
        if baseline not in result.policies:
            allowed = ", ".join(result.policies)
            raise UserError(f"--baseline {baseline!r}: no usable run of it; allowed: {allowed}{more}")
    if not any(contrast.pairs for contrast in result.contrasts):
        raise UserError(f"{place}: no two usable runs of the same set and seed{more}")


def _followed(folders: Sequence[Path]) -> Iterable[Path]:
    """With a progress bar where somebody looks on."""
    from rich.console import Console
    from rich.progress import track

    return track(
        folders, "reading", console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )


def to_json(report: "Report") -> str:
    import json

    import msgspec

    from analysis.comparison import METHOD, SCOPE, as_json

    content = {
        **as_json(report.comparison),
        "left_out": report.left_out,
        "isolated": report.experiment.alone,
        "memory": report.experiment.memory,
        "rho": report.rho_from,
        "method": METHOD,
        "scope": SCOPE,
        "noise": report.noise,
        **report.experiment.made_by,
        "date": report.experiment.date,
    }
    # msgspec writes what is not a number as null; json keeps to ASCII, whatever stdout's encoding.
    return json.dumps(msgspec.json.decode(msgspec.json.encode(content)), indent=2) + "\n"


def write(report: "Report", out: Path) -> None:
    """Raises OSError."""
    from analysis.figures import write_all
    from analysis.report import to_markdown

    out.mkdir(parents=True, exist_ok=True)
    figures = write_all(report.experiment, report.comparison, out)
    shown = "".join(f"\n![{path.stem}]({path.name})\n" for path in figures)
    (out / JSON_FILE).write_text(to_json(report), encoding="utf-8")
    (out / MARKDOWN_FILE).write_text(to_markdown(report) + shown, encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """As a script: the same options, exit codes and errors as `coadapt compare`."""
    from typer.exceptions import TyperException

    from common.lifecycle import UserError

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(compare)
    try:
        return int(app(list(argv), prog_name="compare", standalone_mode=False) or COMPLETE)
    except TyperException as error:
        text = error.format_message()
    except UserError as error:
        text = str(error)
    from analysis.summarize import plain

    print(f"compare: {plain(text)}", file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
