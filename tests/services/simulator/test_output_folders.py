"""A run's folder appears when its log is complete, and only one process may write it."""

from pathlib import Path

import pytest

from common.eventlog import EVENTS_FILE
from common.lifecycle import UserError
from services.simulator.output_folders import LOCK_FILE, LogWriteError, claimed, open_log
from tests.fixtures.logs import good_run, written


def test_a_runs_folder_appears_with_the_complete_log(tmp_path: Path) -> None:
    records = written(good_run())
    with claimed(tmp_path, ["run"]):
        with open_log(tmp_path, "run") as log:
            assert log is not None
            log(records)
            assert not (tmp_path / "run").exists()
        assert len((tmp_path / "run" / EVENTS_FILE).read_bytes().splitlines()) == len(records)
    assert {path.name for path in tmp_path.iterdir()} == {"run", LOCK_FILE}


def test_an_interrupted_run_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), claimed(tmp_path, ["run"]), open_log(tmp_path, "run"):
        raise KeyboardInterrupt
    assert {path.name for path in tmp_path.iterdir()} == {LOCK_FILE}


def test_what_a_killed_process_left_is_removed_and_a_complete_run_is_kept(tmp_path: Path) -> None:
    (tmp_path / ".run" / "123").mkdir(parents=True)
    with claimed(tmp_path, ["run"]):
        assert not (tmp_path / ".run").exists()
        (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="run is there already"), claimed(tmp_path, ["run"]):
        pass


def test_a_log_that_cannot_be_written_is_not_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogWriteError, match="cannot be written"), open_log(tmp_path / "file", "run"):
        pass
    assert LogWriteError.exit_code == 1


def test_without_a_folder_there_is_no_log() -> None:
    with claimed(None, ["run"]), open_log(None, "run") as log:
        assert log is None
