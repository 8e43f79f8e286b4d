"""`coadapt calibrate`: its options, and the order in which it measures."""

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import number, path_of, whole

PROFILES = Path(__file__).resolve().parents[2] / "workloads" / "profiles"


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
    busy_before: Annotated[
        float,
        typer.Option(
            parser=number(0.0, 1.0, "0 to 1"),
            metavar="SHARE",
            help="Measure nothing when others use more of the CPU than this.",
        ),
    ] = 0.1,
) -> None:
    """Measure our applications on this machine: step times, ways to the target, costs of starts and ends.

    What is measured is kept at once: a second start goes on where the first one stopped. Run it on an
    otherwise idle machine: it is watched for two seconds before the first measurement.

    Exit 3: the machine is busy."""
    from common.lifecycle import signals_as_interrupt
    from services.calibration.calibrate import run_calibration

    with signals_as_interrupt():
        run_calibration(app or [], out, seeds, busy_before, fresh=fresh)
