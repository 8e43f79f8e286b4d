"""Fleets of real replicas that share one store."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from common.config import TrainerConfig
    from tests.fixtures.replica_fleet import Fleet

NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def store_port() -> Iterator[int]:
    from tests.fixtures.replica_fleet import running_store

    with running_store() as store:
        yield store.port


@pytest.fixture
def make_fleet(tmp_path: Path, store_port: int) -> "Iterator[Callable[..., Fleet]]":
    """`make_fleet(trainer_config, **fields_of_the_job)`; each fleet has a folder and a job id of its own."""
    from tests.fixtures.replica_fleet import EVERY_STEP, Fleet, tiny_spec

    fleets: list[Fleet] = []

    def make(config: "TrainerConfig" = EVERY_STEP, **changes: Any) -> Fleet:
        folder = tmp_path / str(len(fleets))
        folder.mkdir()
        fleets.append(Fleet(folder, tiny_spec(id=f"job-{next(NUMBERS)}", **changes), store_port, config))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()
