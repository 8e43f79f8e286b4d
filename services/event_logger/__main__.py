"""`python -m services.event_logger`."""

from common.lifecycle import service_main
from services.event_logger.service import SERVICE, run


def main() -> int:
    return service_main(SERVICE, run)


if __name__ == "__main__":
    raise SystemExit(main())
