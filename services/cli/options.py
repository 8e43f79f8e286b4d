"""Parsers of the command line's numbers and paths: what they refuse is named with its value and what is
allowed."""

import math
from collections.abc import Callable
from pathlib import Path

import typer


def path_of(text: str) -> Path:
    """An empty one would be the present folder: a variable that was not set, rather than meant."""
    if not text:
        raise typer.BadParameter("'': allowed: a path")
    return Path(text)


def integer(text: str) -> int:
    """Any; what a job may ask for is judged with the rest of it."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: allowed: whole numbers") from None


def real(text: str) -> float:
    """Any, not a number included; what a job may ask for is judged with the rest of it."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: allowed: numbers") from None


def whole(low: int, high: int) -> Callable[[str], int]:
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
    """`allowed` says what the bounds mean."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise typer.BadParameter(f"{text!r}: allowed: {allowed}")
        return value

    return parse
