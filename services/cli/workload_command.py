"""`coadapt workload`: the sets of the experiment, generated."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import path_of, whole

ALL = "all"
MAX_SEED = 2**31 - 1
NODES, SLOTS = 2, 4
MAX_NODES, MAX_SLOTS = 10_000, 4096

app = typer.Typer(name="workload", help="Make workload files.")


@app.callback()
def _workload() -> None:
    pass


@app.command()
def generate(
    set_name: Annotated[
        str, typer.Option("--set", metavar="NAME", help='steady, burst, tail, diurnal, or "all".')
    ],
    requests: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help='What jobs ask for: tuned (to what suits them), realistic (habits), or "all".',
        ),
    ] = "tuned",
    seed: Annotated[
        int,
        typer.Option(parser=whole(0, MAX_SEED), metavar="N", help="Decides arrivals, applications, targets."),
    ] = 1,
    profiles: Annotated[
        Path | None,
        typer.Option(
            parser=path_of, metavar="DIR", help="Measured profiles, instead of those that come with coadapt."
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option(parser=whole(1, MAX_NODES), metavar="N", help="Nodes of the cluster it is for.")
    ] = NODES,
    slots: Annotated[
        int, typer.Option(parser=whole(1, MAX_SLOTS), metavar="M", help="Slots of each node.")
    ] = SLOTS,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_of,
            metavar="PATH",
            help="File to write; for several sets, the folder of SET-KIND.toml. Without: print.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that are there and differ.")
    ] = False,
) -> None:
    """Make a set of jobs from its recipe, a seed and the measured profiles.

    Sets of the same name and seed have the same jobs at the same times, whatever they ask for."""
    from common.codec import printable
    from common.config import load_config
    from workloads.applications import applications
    from workloads.files.generate import RECIPES, REQUESTS, to_toml
    from workloads.files.generate import generate as make
    from workloads.files.measured_profile import PROFILES, read_profiles

    names = _chosen("--set", set_name, list(RECIPES))
    kinds = _chosen("--requests", requests, list(REQUESTS))
    several = len(names) * len(kinds) > 1
    if several and out is None:
        raise typer.BadParameter(f'--out DIR is needed with "{ALL}"')
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
    try:
        _write(paths, overwrite)
    except OSError as error:
        raise typer.BadParameter(f"--out {out}: cannot be written: {error.strerror}") from error


def _chosen(option: str, given: str, allowed: list[str]) -> list[str]:
    if given == ALL:
        return allowed
    if given not in allowed:
        raise typer.BadParameter(f"{option} {given!r}: allowed: {', '.join(allowed)}, {ALL}")
    return [given]


def _write(texts: dict[Path, str], overwrite: bool) -> None:
    """All or none; each file appears whole. A file that says this already is left alone.

    Raises OSError, and typer.BadParameter for a file that says something else."""
    changed = {path: text for path, text in texts.items() if not _says(path, text)}
    taken = [str(path) for path in changed if os.path.lexists(path)]
    if taken and not overwrite:
        raise typer.BadParameter(
            f"--out: {', '.join(taken)}: there already, with other text; --overwrite replaces it"
        )
    for path, text in changed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(text, encoding="utf-8")
        draft.rename(path)
    for path in texts:
        print(f"{path}: {'written' if path in changed else 'unchanged'}")


def _says(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()
