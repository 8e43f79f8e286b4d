"""`coadapt calibrate`: its options, and the order in which it measures."""

from pathlib import Path
from typing import Annotated

import typer

from common.options import path_of, whole

PROFILES = Path(__file__).resolve().parents[3] / "workloads" / "profiles"


def calibrate(
    app: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Application; all if none.")] = None,
    out: Annotated[
        Path, typer.Option(parser=path_of, metavar="DIR", help="Where the profiles go.")
    ] = PROFILES,
    seeds: Annotated[
        int, typer.Option(parser=whole(1, 1000), metavar="N", help="Trainings at each total batch.")
    ] = 5,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure all of it again, whatever is there.")
    ] = False,
) -> None:
    """Measure our applications on this machine: step times, ways to the target, costs of starts and ends.

    What is measured is kept at once: a second start goes on where the first one stopped. Run it on an
    otherwise idle machine."""
    from common.lifecycle import signals_raise
    from services.bench.calibration.run import run

    with signals_raise():
        run(app or [], out, seeds, fresh=fresh)
