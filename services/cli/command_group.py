"""A group of commands whose error for an unknown command lists the known ones."""

from typing import Any

import typer
from typer.core import TyperGroup


class CommandGroup(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            known = ", ".join(self.list_commands(ctx))
            raise typer.BadParameter(f"command {args[0]!r}: allowed: {known}", ctx=ctx)
        return super().resolve_command(ctx, args)
