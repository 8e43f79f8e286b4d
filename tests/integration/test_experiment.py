"""`coadapt experiment` with real stacks: a killed experiment continues."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from services.experiment.folder import RUN_FILE, ExperimentFolder, RunRecord, write_json
from services.experiment.plan import plan_runs, read_definition
from tests.fixtures import tiny_app
from tests.fixtures.command import clean_environment, start_command

pytestmark = pytest.mark.timeout(150)

SET = """
[[job]]
application = "tiny"
target = 0.3
"""
DEFINITION = """
policies = ["dynamic", "fixed"]
sets = ["quick.toml"]
seeds = [1]
slot_speed = 1.0
[guard]
watch_s = 0.1
busy_before = 1.0
foreign_cpu = 1.0
steal = 1.0
"""


@contextmanager
def experiment(folder: Path, *options: str) -> "Iterator[subprocess.Popen[str]]":
    environment = clean_environment(COADAPT_APPLICATIONS_MODULES=tiny_app.MODULE)
    with start_command("experiment", "few.toml", *options, environment=environment, folder=folder) as command:
        try:
            yield command
        finally:
            command.kill()
            folder_of(folder).end_leftovers()


def folder_of(place: Path) -> ExperimentFolder:
    return ExperimentFolder(place / "logs/few", read_definition(place / "few.toml"))


def test_a_killed_experiment_continues_and_repeats_the_interrupted_run(tmp_path: Path) -> None:
    (tmp_path / "quick.toml").write_text(SET)
    (tmp_path / "few.toml").write_text(DEFINITION)
    folder = folder_of(tmp_path)
    first, second = plan_runs(folder.definition)
    folder.run_folder(first).mkdir(parents=True)
    write_json(folder.run_folder(first) / RUN_FILE, folder.new_record(first, 1, wall_s=9.0, verified=True))
    done = (folder.run_folder(first) / RUN_FILE).stat().st_mtime_ns

    with experiment(tmp_path) as command:
        while len(folder.leftovers()) < 5:  # honcho and some of its services
            with suppress(subprocess.TimeoutExpired):
                command.wait(0.1)
            assert command.returncode is None
        command.send_signal(signal.SIGKILL)
        command.communicate(timeout=10)
        assert folder.leftovers() != []
        with experiment(tmp_path, "--engine", "loky", "-j", "2") as again:
            out, err = again.communicate(timeout=100)
    assert (again.returncode, err) == (0, "")
    lines = out.splitlines()
    assert "processes that a killed experiment had left running" in lines[0]
    assert lines[1].startswith("quick-fixed-1: was interrupted")
    assert lines[2].startswith("2/2 quick-fixed-1: mean JCT")
    assert lines[-1].endswith("coadapt compare logs/few")
    assert folder.leftovers() == []
    assert (folder.run_folder(first) / RUN_FILE).stat().st_mtime_ns == done
    assert json.loads((folder.path / "lost/quick-fixed-1-1/run.json").read_text())["reason"] == "interrupted"
    record = json.loads((folder.run_folder(second) / RUN_FILE).read_text())
    assert list(record) == list(RunRecord.__struct_fields__)
    assert (record["attempt"], record["verified"], record["audit_clean"]) == (2, True, True)
    assert 0.0 <= record["foreign_cpu_fraction"] <= 1.0
    assert 1e8 < record["peak_memory_bytes"] < 4e9
    assert record["wall_s"] > 1.0
    assert "seed = 2" in (folder.run_folder(second) / "workload.toml").read_text()
