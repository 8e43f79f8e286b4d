"""`coadapt compare`: policies against each other, over paired runs."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import path_of

COMPLETE, INCOMPLETE = 0, 1


def compare(
    place: Annotated[
        Path, typer.Argument(parser=path_of, metavar="DIR", help="Folder of an experiment's runs.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_of, metavar="DIR", help="Write comparison.json, comparison.md and figures there."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what comparison.json holds.")] = False,
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
    from analysis.report.comparison_report import make_report, to_json, write
    from analysis.report.comparison_tables import show, to_markdown
    from analysis.report.run_report import stdout_console
    from common.lifecycle import UserError
    from services.simulator.isolated_model import calibrated, source

    if as_json and markdown:
        raise typer.BadParameter("--json, --markdown: one of them at a time")
    report = make_report(
        place,
        baselines or [],
        calibrated(profiles),
        source(profiles),
        may_fall_back=profiles is None,
        shown=_followed,
    )
    if not report.is_calibrated:
        print(f"compare: rho goes by {report.rho_from}", file=sys.stderr)
    text = to_json(report)
    if out is not None:
        try:
            write(report, out)
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error

    screen = stdout_console()
    if as_json:
        screen.out(text, end="")
    elif markdown:
        screen.out(to_markdown(report), end="")
    else:
        show(screen, report)
    return INCOMPLETE if report.comparison.left_out else COMPLETE


def _followed(folders: Sequence[Path]) -> Iterable[Path]:
    """With a progress bar where somebody looks on."""
    from rich.console import Console
    from rich.progress import track

    return track(
        folders, "reading", console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )
