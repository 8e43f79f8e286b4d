"""Fixtures of the scheduler's tests."""

from collections.abc import Iterator

import pytest

from tests.fixtures.scheduler_driver import Driver, two_nodes
from tests.fixtures.scheduler_rig import Rig


@pytest.fixture
def driver() -> Driver:
    return two_nodes()


@pytest.fixture
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("run"))  # a short path: the length of ipc socket paths is limited
    yield rig
    rig.close()
