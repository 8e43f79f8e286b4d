"""Which runs are done, which are set aside, and which are repeated."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from common.config import Config
from common.lifecycle import UserError
from services.bench.quiet_machine import LoadBounds
from services.experiment.folder import (
    CODE,
    LOST,
    RUN_FILE,
    WORKLOAD_FILE,
    ExperimentFolder,
    RunRecord,
    code_digest,
    write_json,
)
from services.experiment.plan import ISOLATED, Definition, PlannedRun, plan_runs

DEFINITION = Definition(policies=("fixed", "pollux"), sets=("tail",), seeds=(1, 11), name="some")
FIRST, SECOND, *_ = RUNS = plan_runs(DEFINITION)
ALONE = PlannedRun(set="isolated-matfac-2", policy="pollux", seed=1, is_isolated=True)


@pytest.fixture
def folder(tmp_path: Path) -> ExperimentFolder:
    folder = ExperimentFolder(tmp_path / "some", DEFINITION)
    folder.path.mkdir()
    return folder


def half(folder: ExperimentFolder, run: PlannedRun) -> Path:
    folder.run_folder(run).mkdir(parents=True)
    (folder.run_folder(run) / "events.jsonl").write_text("")
    return folder.run_folder(run)


def whole(folder: ExperimentFolder, run: PlannedRun, reason: str = "") -> RunRecord:
    half(folder, run)
    record = folder.new_record(run, folder.next_attempt(run), wall_s=9.0, reason=reason)
    write_json(folder.run_folder(run) / RUN_FILE, record)
    return record


def test_a_run_is_done_when_it_has_a_record(folder: ExperimentFolder) -> None:
    record = whole(folder, FIRST)
    half(folder, SECOND)
    assert folder.records(RUNS) == {FIRST: record}


def test_the_record_has_every_field_and_null_for_unknown_values(folder: ExperimentFolder) -> None:
    whole(folder, FIRST)
    fields = json.loads((folder.run_folder(FIRST) / RUN_FILE).read_text())
    assert list(fields) == list(RunRecord.__struct_fields__)
    assert fields["peak_memory_bytes"] is None
    assert (fields["set"], fields["policy"], fields["seed"], fields["requests"]) == (
        "tail",
        "fixed",
        1,
        "tuned",
    )


def test_an_interrupted_run_is_set_aside_and_a_complete_one_kept(folder: ExperimentFolder) -> None:
    whole(folder, FIRST)
    half(folder, SECOND)
    assert folder.set_aside_interrupted(RUNS) == [SECOND.name]
    assert not folder.run_folder(SECOND).exists()
    place = folder.path / LOST / f"{SECOND.name}-1"
    assert (place / "events.jsonl").exists()
    assert msgspec.json.decode((place / RUN_FILE).read_bytes(), type=RunRecord).reason == "interrupted"
    assert folder.set_aside_interrupted(RUNS) == []


def test_a_move_that_was_interrupted_is_completed(folder: ExperimentFolder) -> None:
    half(folder, FIRST)
    (folder.path / LOST).mkdir()
    folder.run_folder(FIRST).rename(folder.path / LOST / f"{FIRST.name}-4")
    folder.set_aside_interrupted(RUNS)
    record = (folder.path / LOST / f"{FIRST.name}-4" / RUN_FILE).read_bytes()
    assert msgspec.json.decode(record, type=RunRecord).attempt == 4


def test_isolated_runs_have_their_own_folder_and_are_set_aside_with_the_others(
    folder: ExperimentFolder,
) -> None:
    half(folder, ALONE)
    assert (folder.path / ISOLATED / "isolated-matfac-2/events.jsonl").exists()
    assert folder.set_aside_interrupted([ALONE]) == [ALONE.name]
    assert (folder.path / LOST / "isolated-matfac-2-1/events.jsonl").exists()
    assert folder.next_attempt(ALONE) == 2
    record = whole(folder, ALONE)
    assert folder.records([FIRST, ALONE]) == {ALONE: record}


def test_attempts_are_numbered_by_run(folder: ExperimentFolder) -> None:
    assert folder.next_attempt(FIRST) == 1
    for _ in range(2):
        folder.set_aside(FIRST, whole(folder, FIRST, "noisy"))
    eleventh = PlannedRun(set="tail", policy="fixed", seed=11)
    folder.set_aside(eleventh, whole(folder, eleventh, "noisy"))
    assert folder.next_attempt(FIRST) == 3
    assert folder.next_attempt(eleventh) == 2
    assert sorted(path.name for path in (folder.path / LOST).iterdir()) == [
        "tail-fixed-1-1",
        "tail-fixed-1-2",
        "tail-fixed-11-1",
    ]


def test_only_unclean_runs_are_repeated_on_demand(folder: ExperimentFolder) -> None:
    clean = whole(folder, FIRST)
    whole(folder, SECOND, "noisy")
    folder.set_aside_unclean(RUNS)
    assert folder.records(RUNS) == {FIRST: clean}
    assert folder.next_attempt(SECOND) == 2


def test_an_invalid_record_is_named(folder: ExperimentFolder) -> None:
    half(folder, FIRST)
    (folder.run_folder(FIRST) / RUN_FILE).write_text("{}")
    with pytest.raises(UserError, match=r"tail-fixed-1/run.json: .*move its folder away"):
        folder.records(RUNS)


def test_only_one_command_can_use_a_folder(folder: ExperimentFolder) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from services.experiment.folder import ExperimentFolder\n"
        "with ExperimentFolder(Path(sys.argv[1]), None).claimed(): pass"
    )
    command = [sys.executable, "-c", code, str(folder.path)]
    root = Path(__file__).parents[3]
    with folder.claimed():
        other = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert "another command is at work on this experiment" in other.stderr
    assert subprocess.run(command, cwd=root).returncode == 0


def test_conditions_are_written_once_and_other_conditions_are_refused(
    folder: ExperimentFolder, tmp_path: Path
) -> None:
    folder.record_conditions(Config())
    written = json.loads((folder.path / "experiment.json").read_text())
    assert written["name"] == "some"
    assert written["definition"]["policies"] == ["fixed", "pollux"]
    assert written["machine"]["cores"] >= 1
    assert set(written["versions"]) == {"coadapt", "python", "torch"}
    bounds = LoadBounds(watch_s=9.0, busy_before=0.2, wait_s=1.0)
    more = msgspec.structs.replace(DEFINITION, seeds=(1, 11, 12), attempts=5, run_s=9.0, guard=bounds)
    ExperimentFolder(folder.path, more).record_conditions(Config())
    again = json.loads((folder.path / "experiment.json").read_text())
    assert again["definition"]["seeds"] == [1, 11, 12]
    assert again["date"] == written["date"]
    other = msgspec.structs.replace(DEFINITION, requests="realistic")
    with pytest.raises(UserError, match=r"other conditions: requests was tuned, is realistic; move"):
        ExperimentFolder(folder.path, other).record_conditions(Config())
    config = msgspec.structs.replace(
        Config(), scheduler=msgspec.structs.replace(Config().scheduler, policy="fixed", round_s=5.0)
    )
    with pytest.raises(UserError, match=r"conditions: scheduler.round_s was 2.0, is 5.0; move"):
        folder.record_conditions(config)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (LoadBounds(foreign_cpu=0.1), "guard.foreign_cpu was 0.05, is 0.1"),
        (LoadBounds(steal=0.5), "guard.steal was 0.02, is 0.5"),
    ],
)
def test_runs_with_other_bounds_are_refused(
    folder: ExperimentFolder, bounds: LoadBounds, expected: str
) -> None:
    folder.record_conditions(Config())
    with pytest.raises(UserError, match=f"other conditions: {expected}; move"):
        ExperimentFolder(folder.path, msgspec.structs.replace(DEFINITION, guard=bounds)).record_conditions(
            Config()
        )


def written(root: Path) -> Path:
    """A program, with files that do not belong to its code."""
    for package in CODE:
        (root / package / "inner/__pycache__").mkdir(parents=True)
        (root / package / "inner/some.py").write_text("x = 1\n")
        (root / package / "inner/__pycache__/some.pyc").write_bytes(os.urandom(9))
    (root / "tests").mkdir()
    (root / "tests/some.py").write_bytes(os.urandom(9))
    return root


def test_the_code_digest_depends_on_the_files_and_not_on_their_location(tmp_path: Path) -> None:
    first, second = written(tmp_path / "first"), written(tmp_path / "second")
    assert code_digest(first) == code_digest(second)
    found = {code_digest(first)}
    for package in CODE:
        (first / package / "inner/some.py").write_text("x = 2\n")
        found.add(code_digest(first))
    (first / "common/inner/some.py").rename(first / "common/inner/other.py")
    found.add(code_digest(first))
    (first / "common/inner/empty.py").touch()
    found.add(code_digest(first))
    assert len(found) == 1 + len(CODE) + 2
    assert code_digest() not in found


def test_runs_of_other_code_are_refused(
    folder: ExperimentFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = written(tmp_path / "program")
    monkeypatch.setattr("services.experiment.folder.code_digest", partial(code_digest, root))
    folder.record_conditions(Config())
    folder.record_conditions(Config())
    (root / "services/inner/some.py").write_text("x = 3\n")
    with pytest.raises(UserError, match=r"other conditions: code was sha256:[0-9a-f]{16}, is sha256:"):
        folder.record_conditions(Config())


def test_a_set_that_has_changed_since_a_run_is_refused(folder: ExperimentFolder) -> None:
    whole(folder, FIRST)
    (folder.run_folder(FIRST) / WORKLOAD_FILE).write_text("as it was")
    folder.check_workloads(RUNS, {("tail", 1): "as it was", ("tail", 11): "as it is"})
    folder.check_workloads(RUNS, {})
    with pytest.raises(UserError, match=r"tail-fixed-1/workload.toml: the set or the profiles have changed"):
        folder.check_workloads(RUNS, {("tail", 1): "as it is"})


@pytest.mark.parametrize("run", [FIRST, ALONE], ids=lambda run: run.name)
def test_only_processes_that_write_into_the_folder_are_ended(
    folder: ExperimentFolder, tmp_path: Path, run: PlannedRun
) -> None:
    sleep = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    pipe = subprocess.PIPE
    others = {name: value for name, value in os.environ.items() if not name.startswith("COADAPT_")}
    with (
        subprocess.Popen(
            sleep, stdout=pipe, env={**others, "COADAPT_RUN_LOGS_DIR": str(folder.run_folder(run).parent)}
        ) as ours,
        subprocess.Popen(sleep, stdout=pipe, env={**others, "COADAPT_RUN_LOGS_DIR": str(tmp_path)}) as other,
    ):
        try:
            for process in (ours, other):
                assert process.stdout is not None
                process.stdout.readline()
            assert [process.pid for process in folder.leftovers()] == [ours.pid]
            assert folder.end_leftovers() == 1
            assert ours.poll() is not None
            assert other.poll() is None
            assert folder.end_leftovers() == 0
        finally:
            ours.kill()
            other.kill()
