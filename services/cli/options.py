"""Options that several commands share, and the parsers behind all options.

A parser refuses a bad value with one line that repeats the value and says what is allowed. The functions
`..._option` build a typer option whose help always ends with the allowed values.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

MAX_PROCESSES = 1024
MAX_SEED = 2**31 - 1

# --------------------------------------------------------------------------- parsers


def path_of(text: str) -> Path:
    """A path. An empty one is refused: it would mean the working directory, and usually comes from a shell
    variable that is not set."""
    if not text:
        raise typer.BadParameter("'': allowed: a path")
    return Path(text)


def integer(text: str) -> int:
    """Any whole number: the check of the whole job decides whether it is allowed."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: allowed: whole numbers") from None


def real(text: str) -> float:
    """Any number, also nan: the check of the whole job decides whether it is allowed."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: allowed: numbers") from None


def whole(low: int, high: int) -> Callable[[str], int]:
    """A parser of whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise typer.BadParameter(f"{text!r}: allowed: whole numbers from {low} to {high}")
        return value

    return parse


def number(low: float, high: float, allowed: str) -> Callable[[str], float]:
    """A parser of numbers from `low` to `high`; `allowed` describes the range to the user."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise typer.BadParameter(f"{text!r}: allowed: {allowed}")
        return value

    return parse


def one_of(allowed: Sequence[str]) -> Callable[[str], str]:
    """A parser of one of these words."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise typer.BadParameter(f"{text!r}: allowed: {', '.join(allowed)}")
        return text

    return parse


# --------------------------------------------------------------------------- option builders


def path_option(name: str, help: str, metavar: str = "DIR") -> Any:
    return typer.Option(name, parser=path_of, metavar=metavar, help=help)


def path_argument(help: str, metavar: str = "DIR") -> Any:
    return typer.Argument(parser=path_of, metavar=metavar, help=help)


def whole_option(*names: str, low: int, high: int, help: str, metavar: str = "N") -> Any:
    return typer.Option(
        *names, parser=whole(low, high), metavar=metavar, help=f"{help} Allowed: {low} to {high}."
    )


def integer_option(help: str) -> Any:
    return typer.Option(parser=integer, metavar="N", help=help)


def real_option(help: str) -> Any:
    return typer.Option(parser=real, metavar="X", help=help)


def repeated_option(name: str, help: str, metavar: str = "NAME") -> Any:
    """An option for a list of words."""
    return typer.Option(name, metavar=metavar, help=f"{help} Can be repeated.")


def number_option(name: str, low: float, high: float, unit: str, help: str) -> Any:
    """`unit` follows the bounds in help and errors, for instance "seconds"; it may be empty."""
    allowed = f"{low:g} to {high:.7g} {unit}".rstrip()
    return typer.Option(
        name, parser=number(low, high, allowed), metavar="X", help=f"{help} Allowed: {allowed}."
    )


def choice_option(name: str, allowed: Sequence[str], help: str) -> Any:
    """The shell completes the allowed words."""
    return typer.Option(
        name,
        parser=one_of(allowed),
        autocompletion=lambda: list(allowed),
        metavar="NAME",
        help=f"{help} Allowed: {', '.join(allowed)}.",
    )


# --------------------------------------------------------------------------- shared options

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]
ProfilesOption = Annotated[
    Path | None,
    path_option(
        "--profiles",
        "Folder of measured profiles, as `coadapt calibrate` writes it. Default: the profiles that come with "
        "coadapt.",
    ),
]
TracesOption = Annotated[
    Path | None,
    path_option(
        "--traces",
        "Folder of the Pollux artifact, which contains `traces`; only for the world osdi21. Default: the "
        "folder in the environment variable COADAPT_OSDI21.",
    ),
]
JobsParallelOption = Annotated[
    int | None,
    whole_option(
        "--jobs-parallel",
        "-j",
        low=1,
        high=MAX_PROCESSES,
        help="Number of simulations that run at the same time. Default: one for each usable core.",
    ),
]
