"""`python -m services.scheduler`: the scheduler's process."""

import sys

from common.config import Config
from common.lifecycle import StopFlag, UserError, service_main
from common.messaging.reactor import Reactor
from services.scheduler.policies.registry import UnknownPolicy, make_live_policy
from services.scheduler.service import SchedulerService, make_core


def body(config: Config, stop: StopFlag) -> int:
    try:
        policy = make_live_policy(config.scheduler.policy)
        core = make_core(config, policy)
    except UnknownPolicy as error:
        raise UserError(str(error)) from error
    reactor = Reactor(stop)
    service = SchedulerService(config, core, reactor)
    reactor.run()
    service.close("stopped")
    reactor.close()
    return stop.exit_code


if __name__ == "__main__":
    sys.exit(service_main("scheduler", body))
