"""Clients when no scheduler is there: one line, exit 3 in time, and nothing that arrives later."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.config import Config, EndpointsConfig, config_environment
from common.lifecycle import StopFlag
from common.messaging.reactor import Reactor
from common.messaging.request_reply import ReplyServer
from common.protocol import Done, Reply, Request
from services.launcher.stack import free_endpoints

ROOT = Path(__file__).parents[2]
COMMANDS = (["submit", "--app", "matfac", "--wait"], ["cancel", "any"], ["watch"])


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_without_a_scheduler_a_command_says_so_in_time_and_leaves_no_ghost(arguments):
    endpoints = free_endpoints(EndpointsConfig())
    environment = {**os.environ, **config_environment(Config(endpoints=endpoints))}
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    start_s = time.monotonic()
    client = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert time.monotonic() - start_s < 5.0
    assert (client.returncode, client.stdout) == (3, "")
    (line,) = client.stderr.splitlines()
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
