"""`coadapt init`: a project folder to start from."""

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import path_of

NEXT_COMMANDS = """
Next, in {folder}:
  honcho start                          # starts the services and two agents; Ctrl-C stops them
  coadapt submit workload.toml --wait   # in a second terminal: submits two jobs, waits for their end
  coadapt summarize logs/               # shows the results of each run and checks its event log

`coadapt run workload.toml` does all of this in one command, on a stack of its own."""


def init(
    folder: Annotated[
        Path,
        typer.Argument(
            parser=path_of,
            metavar="DIR",
            help="Folder for the files, created if it does not exist.",
        ),
    ] = Path(),
) -> None:
    """Write coadapt.toml, Procfile and workload.toml to start from.

    coadapt.toml has every setting with its default and meaning, the Procfile the processes of a stack, and
    workload.toml two short jobs. Existing files are never overwritten.

    Exit 2: one of the files exists already, or the folder cannot be used; then nothing is written."""
    from services.launcher.project_files import create_project

    for file in create_project(folder):
        print(file)
    print(NEXT_COMMANDS.format(folder="this folder" if folder == Path() else folder))
