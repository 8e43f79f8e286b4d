"""The conduct of an experiment up to its first run; real runs are in tests/integration/test_experiment.py."""

import os
from pathlib import Path
from typing import NoReturn

import pytest

from services.experiment.conduct import PreparedExperiment, prepare
from services.experiment.folder import RUN_FILE, write_json
from services.experiment.plan import PlannedRun

DEFINITION = 'policies = ["fixed", "pollux"]\nsets = ["mine.toml"]\nseeds = [1, 2]\nrun_s = 40.0\n'


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.toml").write_text('[[job]]\napplication = "digits-cnn"\n')
    (tmp_path / "some.toml").write_text(DEFINITION + "[guard]\nwatch_s = 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COADAPT_LOGS_DIR", raising=False)
    return Path("some.toml")


def finish(experiment: PreparedExperiment, run: PlannedRun, reason: str = "") -> None:
    folder = experiment.folder
    folder.run_folder(run).mkdir(parents=True)
    write_json(folder.run_folder(run) / RUN_FILE, folder.new_record(run, 1, wall_s=10.0, reason=reason))


def no_progress() -> NoReturn:
    raise AssertionError("nothing is to be done")


def names(experiment: PreparedExperiment) -> list[str]:
    return [run.name for run in experiment.runs]


def test_the_runs_are_those_of_the_chosen_policies_sets_and_seeds(file: Path) -> None:
    assert len(names(prepare(file, {}))) == 4
    assert names(prepare(file, {}, policies=["fixed"], seeds=1)) == ["mine-fixed-1"]
    assert names(prepare(file, {}, seeds=3))[-2:] == ["mine-fixed-3", "mine-pollux-3"]
    assert names(prepare(file, {}, isolated_jobs=True)) == [f"isolated-digits-cnn-{n}" for n in (1, 2, 4)]


def test_what_remains_and_how_long_it_takes_follows_from_the_records(file: Path) -> None:
    experiment = prepare(file, {})
    assert experiment.expected_s() == 4 * (40.0 + 1.0)
    first, second, *others = experiment.runs
    finish(experiment, first)
    finish(experiment, second, "noisy")
    assert experiment.remaining() == others
    assert experiment.expected_s() == 2 * (10.0 + 1.0)
    assert experiment.unclean() == {second.name: "noisy"}
    assert [state for _, state in experiment.states()] == ["done", "done, not clean: noisy", "to do", "to do"]


def test_an_experiment_that_is_done_is_left_as_it_is(file: Path) -> None:
    experiment = prepare(file, os.environ)
    for run in experiment.runs:
        finish(experiment, run)
    lines: list[str] = []
    experiment.carry_out(1, repeat_unclean=False, report=lines.append, progress=no_progress)
    assert lines == []
