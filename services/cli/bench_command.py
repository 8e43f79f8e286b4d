"""`coadapt bench NAME`: each benchmark is a module of this package, and its `command` takes the options.

A module is only loaded when its benchmark, or the list of all, is asked for.
"""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

BENCHMARKS = (
    "resize",
    "overhead",
    "pacing",
    "scaling",
    "decision",
)


class Benchmarks(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(BENCHMARKS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in BENCHMARKS:
            raise typer.BadParameter(f"{cmd_name!r}: allowed: {', '.join(BENCHMARKS)}")
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name)(import_module(f"services.bench.{cmd_name}").command)
        return typer.main.get_command(single)


app = typer.Typer(name="bench", cls=Benchmarks, help="Measure what this installation reaches.")
