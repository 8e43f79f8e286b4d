"""`python -m services.job_agent --node NAME`: the agent of one node."""

import argparse
import sys

from common.config import Config
from common.lifecycle import StopFlag, UserError, service_main
from common.types import MAX_NAME_CHARS, NAME_PATTERN


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.job_agent", description=__doc__)
    parser.add_argument(
        "--node", required=True, metavar="NAME", help="name of the node, unique in the cluster"
    )
    node: str = parser.parse_args().node

    def body(config: Config, stop: StopFlag) -> int:
        if len(node) > MAX_NAME_CHARS or not NAME_PATTERN.fullmatch(node):
            raise UserError(
                f"--node {node[:MAX_NAME_CHARS]!r}: at most {MAX_NAME_CHARS} letters, digits, '_', '.', '-', "
                "with a letter or digit first and last"
            )
        from services.job_agent.service import run

        return run(node, config, stop)

    return service_main("agent", body)


if __name__ == "__main__":
    sys.exit(main())
