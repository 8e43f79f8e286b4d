"""Commands without a scheduler: one line and exit 3 in time, and no request that is carried out later."""

import time

import pytest

from common.config import Config, EndpointsConfig, config_environment
from common.lifecycle import StopFlag
from common.messaging.reactor import Reactor
from common.messaging.request_reply import ReplyServer
from common.protocol import Done, Reply, Request
from services.launcher.stack import free_endpoints
from tests.fixtures.command import clean_environment, start_command

COMMANDS = (["submit", "--app", "matfac", "--wait"], ["cancel", "any"], ["watch"])


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_without_a_scheduler_a_command_says_so_in_time_and_leaves_no_request(arguments):
    endpoints = free_endpoints(EndpointsConfig())
    environment = clean_environment(**config_environment(Config(endpoints=endpoints)))
    start_s = time.monotonic()
    with start_command(*arguments, environment=environment) as command:
        output, errors = command.communicate(timeout=20)
    assert time.monotonic() - start_s < 5.0
    assert (command.returncode, output) == (3, "")
    (line,) = errors.splitlines()
    assert line.startswith("coadapt: ")
    assert endpoints.scheduler_requests in line

    late: list[object] = []

    def handle(request: Request) -> Reply:
        late.append(request)
        return Done()

    reactor = Reactor(StopFlag())
    server = ReplyServer(reactor, endpoints.scheduler_requests, handle, keys=None, on_bad=late.append)
    reactor.run_until(lambda: bool(late), timeout_s=0.5)
    server.close()
    reactor.close()
    assert late == []
