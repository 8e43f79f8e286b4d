"""`python -m services.job_agent --node NAME`: the agent of one node."""

import sys
from typing import Annotated

import typer

from common.config import Config
from common.lifecycle import StopFlag, UserError, service_main
from common.types import MAX_NAME_CHARS, NAME_PATTERN


def main(
    node: Annotated[str, typer.Option(metavar="NAME", help="Name of the node, unique in the cluster.")],
) -> None:
    """Run the agent of one node until it is asked to stop."""

    def body(config: Config, stop: StopFlag) -> int:
        if len(node) > MAX_NAME_CHARS or not NAME_PATTERN.fullmatch(node):
            raise UserError(
                f"--node {node[:MAX_NAME_CHARS]!r}: allowed: at most {MAX_NAME_CHARS} letters, digits, "
                "'_', '.', '-', first and last a letter or digit"
            )
        from services.job_agent.service import run

        return run(node, config, stop)

    sys.exit(service_main("agent", body))


if __name__ == "__main__":
    typer.run(main)
