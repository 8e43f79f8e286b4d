"""`coadapt compare`: compares policies over paired runs."""

import sys
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the content of comparison.json.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    baselines: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline", metavar="POLICY", help="Compare only with this policy. May be given several times."
        ),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(
            parser=path_of,
            metavar="DIR",
            help="Measured profiles for rho and step times. Default: the profiles of coadapt.",
        ),
    ] = None,
) -> int:
    """Compare policies over the runs of an experiment.

    Pairs the runs of the same jobs by set and seed. Ratios have 95% bootstrap intervals; fewer than 5 pairs
    have a range instead, and no verdict. Lists every run that is left out.

    Exit codes: 0 every run counts; 1 a run was left out or has no partner; 2 bad input."""
    from analysis.report import comparison_report
    from analysis.report.tables import stdout_console
    from services.simulator.isolated_model import load_isolated_model, model_source

    if as_json and as_markdown:
        raise typer.BadParameter("--json, --markdown: only one of them is allowed")
    report = comparison_report.make_report(
        place,
        baselines or [],
        load_isolated_model(profiles),
        model_source(profiles),
        may_fall_back=profiles is None,
        progress=comparison_report.with_progress_bar,
    )
    if not report.is_calibrated:
        print(f"compare: rho comes from {report.rho_from}", file=sys.stderr)
    if out is not None:
        comparison_report.write(report, out)
    if as_json:
        stdout_console().out(comparison_report.to_json(report), end="")
    elif as_markdown:
        stdout_console().out(comparison_report.markdown(report), end="")
    else:
        comparison_report.print_report(report)
    return INCOMPLETE if report.comparison.left_out else COMPLETE
