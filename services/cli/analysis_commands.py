"""Commands that read the event logs of finished runs: summarize, export. (compare: compare_command.py)"""

from pathlib import Path
from typing import Annotated

from services.cli.errors import out_errors
from services.cli.options import JsonOption, choice_option, path_argument, path_option

FORMATS = ("parquet", "csv")


def summarize(
    logs: Annotated[Path, path_argument("Folder of a run, or a folder of runs.")],
    as_json: JsonOption = False,
) -> int:
    """Summarize and audit finished runs from their event logs.

    With --json the output is a list with one object for each run.

    Exit codes: 0 all audits are clean; 1 an audit found a problem; 2 bad input."""
    from analysis.summarize import main as summarize_logs

    return summarize_logs([str(logs), *(["--json"] if as_json else [])])


def export(
    run: Annotated[Path, path_argument("Folder of a run.", metavar="RUN")],
    to: Annotated[str, choice_option("--to", FORMATS, "File format of the tables.")],
    out: Annotated[Path, path_option("--out", "Folder for the tables; created if it does not exist.")],
) -> None:
    """Write the event log of a run as tables.

    There is one file for each table (frame). The output lists the written files.

    Exit codes: 0 success; 2 bad input."""
    from analysis.log.export import export as write_tables

    with out_errors(out):
        paths = write_tables(run, to, out)
    for path in paths:
        print(path)
