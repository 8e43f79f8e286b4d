"""Parsers of the command line's numbers: what they refuse is named with its value and what is allowed."""

import math
from collections.abc import Callable

import typer


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
