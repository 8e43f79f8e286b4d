from pathlib import Path

import pytest

from analysis.log.find_logs import NoRuns, find_logs
from analysis.log.frames import read
from tests.fixtures.logs import good_run, save, written


def test_logs_are_found_at_any_depth_and_a_run_is_not_searched_further(tmp_path: Path) -> None:
    records = written(good_run())
    first = save(records, tmp_path / "b")
    second = save(records, tmp_path / "sweep" / "a")
    save(records, tmp_path / "b" / "jobs" / "not-a-run")
    (tmp_path / "nothing").mkdir()
    assert find_logs(tmp_path) == [first, second]
    assert find_logs(tmp_path / "b") == [first]
    assert find_logs(first) == [first]


def test_a_run_that_lost_its_log_is_found_and_reported(tmp_path: Path) -> None:
    (tmp_path / "run" / "outbox").mkdir(parents=True)
    (path,) = find_logs(tmp_path)
    (fault,) = read(path).faults
    assert "No such file" in fault


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_place_without_runs_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoRuns, match=name):
        find_logs(tmp_path / name)
