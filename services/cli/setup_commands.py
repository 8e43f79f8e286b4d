"""Commands that prepare files before a run: init, keys, workload generate."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from services.cli.command_group import CommandGroup
from services.cli.errors import out_errors
from services.cli.options import (
    MAX_SEED,
    ProfilesOption,
    choice_option,
    path_argument,
    path_option,
    whole_option,
)

ALL = "all"
SETS = ("steady", "burst", "tail", "diurnal", ALL)
REQUESTS = ("tuned", "realistic", ALL)
NODES, SLOTS = 2, 4
KEYS_ADVICE = """
Give each process the files it needs, in the folder that its endpoints.keys_dir names:
  scheduler, metrics-collector, event-logger: server.key, server.key_secret, the NAME.key of every client and
    agent, and one pair NAME.key and NAME.key_secret for their own connections
  agents and clients: server.key, and one pair NAME.key and NAME.key_secret
Keep every .key_secret private; a .key is public."""

workload = typer.Typer(name="workload", cls=CommandGroup, help="Make workload files.")
NEXT_COMMANDS = """
Next, in {folder}:
  honcho start                          # starts the services and two agents; Ctrl-C stops them
  coadapt submit workload.toml --wait   # in a second terminal: submits two jobs, waits for their end
  coadapt summarize logs/               # shows the results of each run and checks its event log

`coadapt run workload.toml` does all of this in one command, on a stack of its own."""


def init(
    folder: Annotated[
        Path,
        path_argument("Folder for the files, created if it does not exist."),
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


def keys(
    folder: Annotated[Path, path_argument("Folder for the keys; created if it does not exist.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME ...", help="Makes one key pair for each name. Default: client."),
    ] = None,
) -> None:
    """Make CURVE keys for encrypted endpoints.

    Endpoints that other machines can reach require them. Existing keys are kept. The server's pair is
    always made. The output lists the new files and says which process needs which file.

    Exit codes: 0 success; 2 bad input."""
    from common.messaging.curve_keys import make_keys

    _check_key_names(names or [])
    try:
        made = make_keys(folder, names or ["client"])
    except OSError as error:
        raise typer.BadParameter(f"{folder}: cannot be written: {error.strerror}") from error
    for path in made:
        print(path)
    if not made:
        print(f"{folder}: all of these keys exist already")
    print(KEYS_ADVICE)


def _check_key_names(names: list[str]) -> None:
    from common.messaging.curve_keys import SERVER
    from common.types import MAX_NAME_CHARS, NAME_PATTERN

    for name in names:
        if len(name) > MAX_NAME_CHARS or name == SERVER or not NAME_PATTERN.fullmatch(name):
            raise typer.BadParameter(
                f"NAME {name[:MAX_NAME_CHARS]!r}: allowed: at most {MAX_NAME_CHARS} letters, digits, '_', "
                f"'.', '-', first and last a letter or digit; not {SERVER!r}, which is always made"
            )


@workload.callback()
def _workload() -> None:
    pass


@workload.command()
def generate(
    set_name: Annotated[str, choice_option("--set", SETS, "Recipe of the set.")],
    requests: Annotated[
        str,
        choice_option(
            "--requests",
            REQUESTS,
            "Resources that jobs request: tuned (what suits the job best) or realistic (what users "
            "typically ask for).",
        ),
    ] = "tuned",
    seed: Annotated[
        int,
        whole_option(
            "--seed",
            low=0,
            high=MAX_SEED,
            help="Seed of arrivals, applications and targets.",
        ),
    ] = 1,
    profiles: ProfilesOption = None,
    nodes: Annotated[
        int, whole_option("--nodes", low=1, high=10_000, help="Nodes of the cluster the set is made for.")
    ] = NODES,
    slots: Annotated[int, whole_option("--slots", low=1, high=4096, help="Slots of each node.")] = SLOTS,
    out: Annotated[
        Path | None,
        path_option(
            "--out",
            "File to write, or for several sets the folder for the files SET-REQUESTS.toml. Default: print "
            "the set.",
            metavar="PATH",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing files that have other contents.")
    ] = False,
) -> None:
    """Make workload files from a recipe, a seed and measured profiles.

    Sets with the same name and seed have the same jobs at the same times, whatever the jobs request.
    Either all files are written or none.

    Exit codes: 0 success; 2 bad input, or a file exists with other contents."""
    from common.codec import printable
    from common.config import load_config
    from workloads.applications import applications
    from workloads.files.file_writer import write_files
    from workloads.files.generate import RECIPES, to_toml
    from workloads.files.generate import generate as make
    from workloads.files.measured_profile import PROFILES, read_profiles

    names = SETS[:-1] if set_name == ALL else (set_name,)
    kinds = REQUESTS[:-1] if requests == ALL else (requests,)
    several = len(names) * len(kinds) > 1
    if several and out is None:
        raise typer.BadParameter(f'"{ALL}" makes several files: give --out DIR')
    measured = read_profiles(profiles or PROFILES, applications(load_config(os.environ).applications.modules))
    quoted = shlex.quote(str(profiles))
    options = f" --profiles {printable(quoted, len(quoted))}" if profiles else ""
    options += f" --nodes {nodes}" if nodes != NODES else ""
    options += f" --slots {slots}" if slots != SLOTS else ""
    texts = {
        f"{name}-{kind}.toml": to_toml(make(RECIPES[name], kind, seed, measured, nodes, slots), options)
        for name in names
        for kind in kinds
    }
    if out is None:
        print(*texts.values(), end="")
        return
    paths = {out / file if several or out.is_dir() else out: text for file, text in texts.items()}
    with out_errors(out):
        written = write_files(paths, overwrite=overwrite)
    for path in paths:
        print(f"{path}: {'written' if path in written else 'unchanged'}")
