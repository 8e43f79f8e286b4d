"""A reactor in the thread of the test, and a handler that remembers its requests."""

import pytest

from common.lifecycle import StopFlag
from common.messaging.reactor import Reactor
from tests.fixtures.messaging_servers import Recorder


@pytest.fixture
def reactor():
    stop = StopFlag()
    reactor = Reactor(stop)
    yield reactor
    reactor.close()
    stop.close()


@pytest.fixture
def recorder():
    return Recorder()
