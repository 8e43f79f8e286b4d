"""`python -m services.metrics_collector`."""

from common.lifecycle import service_main
from services.metrics_collector.service import SERVICE, run


def main() -> int:
    return service_main(SERVICE, run)


if __name__ == "__main__":
    raise SystemExit(main())
