"""Replication without runs; `coadapt fidelity` with runs is tested with the cases that are made from them."""

from pathlib import Path

import pytest

from common.lifecycle import UserError
from services.simulator.replication import replicate, twins
from tests.fixtures.logs import good_run, save, written
from tests.fixtures.profiles import write_profiles


def test_a_folder_without_runs_is_refused_and_nothing_is_left_behind(tmp_path: Path) -> None:
    profiles = write_profiles(tmp_path / "profiles")
    (tmp_path / "experiment").mkdir()
    with pytest.raises(UserError, match="no run in it"):
        replicate(tmp_path / "experiment", profiles)
    assert {path.name for path in tmp_path.iterdir()} == {"profiles", "experiment"}


def test_a_run_that_cannot_be_simulated_is_left_out_with_the_reason(tmp_path: Path) -> None:
    save(written(good_run()), tmp_path / "run-1")
    cases, left_out = twins([tmp_path / "run-1"], None, tmp_path / "out", lambda run: ())
    assert cases == []
    assert list(left_out) == ["run-1"]
    assert "config.json: cannot be read" in left_out["run-1"]
