"""A calibration makes real trainings, repeats failed measurements, and finds unreadable profiles."""

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from common.config import AgentConfig, ApplicationsConfig, Config
from services.bench.agent_cluster import BenchError
from services.calibration.calibrate import ATTEMPTS, Calibration, why_unreadable, with_retries
from services.calibration.calibration_plan import PlannedTraining
from services.calibration.finished_parts import FinishedParts
from tests.fixtures import quick_app
from tests.fixtures.measurements import COSTS, GRID, curve_row
from workloads.applications import applications

DIGITS = applications()["digits-cnn"]


def test_real_trainings_are_made_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In this process, with arguments and results pickled as for other processes."""

    def here(body: Callable[[PlannedTraining], object], cases: Sequence[PlannedTraining]) -> Iterator[object]:
        for case in cases:
            yield pickle.loads(pickle.dumps(body(pickle.loads(pickle.dumps(case)))))

    monkeypatch.setattr("services.calibration.calibrate.in_processes", here)
    spec = quick_app.SPEC
    config = Config(agent=AgentConfig(slots=1), applications=ApplicationsConfig(modules=(quick_app.MODULE,)))
    with FinishedParts(tmp_path, {}, fresh=False) as parts:
        for part in ("quick/placement/1", "quick/placement/1-1", "lives"):
            parts.add(part, None)
        calibration = Calibration(config, [spec], [spec], range(1), parts)
        calibration.measure()
        curves = calibration.curves(spec)
    assert curves.keys() == {24, 48}
    for rows in curves.values():
        assert rows[-1].metric <= spec.target < rows[0].metric
        assert all(former.progress < later.progress for former, later in pairwise(rows))
        assert min(row.sqr for row in rows) > 0.0
    assert curves[48][-1].iteration < curves[24][-1].iteration


def test_a_failed_measurement_is_repeated_a_limited_number_of_times(capsys: pytest.CaptureFixture[str]):
    losses = [BenchError("a replica was lost")] * 2

    def measure() -> None:
        if losses:
            raise losses.pop()

    with_retries(measure)
    assert capsys.readouterr().err.count("measures again, because a replica was lost") == ATTEMPTS - 1
    losses = [BenchError("a replica was lost")] * ATTEMPTS
    with pytest.raises(BenchError, match="a replica was lost"):
        with_retries(measure)
    assert losses == []


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ({}, ""),
        ({"curves": {16: [curve_row(1, 0.5)], 32: []}}, "validation-32.csv: needs rows of finite numbers"),
        (
            {"curves": {16: [curve_row(1, -0.5)]}},
            "validation-16.csv: needs rows of finite numbers, none below 0",
        ),
        ({"grid": {(1,): GRID[1,]}}, "scalability.csv: needs rows"),
        ({"costs_s": {"start_s": 1.0, "resize_s": 0.2, "verify_s": 0.5}}, ".*field `evaluation_slot_s`"),
    ],
)
def test_an_unreadable_profile_is_reported_with_the_reason(lacks, reason):
    parts = {"costs_s": COSTS, "grid": GRID, "curves": {16: [curve_row(1, 0.5)]}} | lacks
    found = why_unreadable(DIGITS, 4, **parts)
    assert re.match(reason, found)
    assert bool(found) == bool(reason)
