"""`coadapt experiment` with real stacks: done, interrupted, killed, and gone on with."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from services.experiment.folder import Folder, RunRecord
from services.experiment.plan import Definition
from tests.integration import tiny_app

pytestmark = pytest.mark.timeout(150)

ROOT = Path(__file__).parents[2]
SET = """
[[job]]
application = "tiny"
target = 0.3
"""
DEFINITION = """
policies = ["fixed", "dynamic"]
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
    others = {name: value for name, value in os.environ.items() if not name.startswith("COADAPT_")}
    with subprocess.Popen(
        [sys.executable, "-m", "services.cli", "experiment", "few.toml", *options],
        env={**others, "COADAPT_APPLICATIONS_MODULES": tiny_app.MODULE, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as command:
        try:
            yield command
        finally:
            command.kill()
            folder_of(folder).end_leftovers()


def folder_of(place: Path) -> Folder:
    return Folder(place / "logs/few", Definition(policies=("fixed",), sets=("quick",), seeds=(1,)))


def test_a_killed_experiment_goes_on_where_it_was_and_repeats_what_was_half_done(tmp_path: Path) -> None:
    (tmp_path / "quick.toml").write_text(SET)
    (tmp_path / "few.toml").write_text(DEFINITION)
    logs = tmp_path / "logs/few"
    with experiment(tmp_path) as command:
        assert command.stdout is not None
        assert command.stdout.readline().startswith("1/2 quick-fixed-1: mean JCT")
        while len(folder_of(tmp_path).leftovers()) < 5:  # honcho and some of its services
            with suppress(subprocess.TimeoutExpired):
                command.wait(0.1)
        command.send_signal(signal.SIGKILL)
        command.communicate(timeout=10)
    done = (logs / "quick-fixed-1/run.json").stat().st_mtime_ns
    assert not (logs / "quick-dynamic-1/run.json").exists()

    with experiment(tmp_path, "--engine", "loky", "-j", "2") as command:
        out, err = command.communicate(timeout=100)
    assert (command.returncode, err) == (0, "")
    assert "quick-dynamic-1: was interrupted" in out
    assert "2/2 quick-dynamic-1: mean JCT" in out
    assert "coadapt compare logs/few" in out.splitlines()[-1]
    assert folder_of(tmp_path).leftovers() == []
    assert (logs / "quick-fixed-1/run.json").stat().st_mtime_ns == done
    assert json.loads((logs / "lost/quick-dynamic-1-1/run.json").read_text())["reason"] == "interrupted"
    for policy, attempt in (("fixed", 1), ("dynamic", 2)):
        record = json.loads((logs / f"quick-{policy}-1/run.json").read_text())
        assert list(record) == list(RunRecord.__struct_fields__)
        assert (record["attempt"], record["verified"], record["audit_clean"]) == (attempt, True, True)
        assert 0.0 <= record["foreign_cpu_fraction"] <= 1.0
        assert 1e8 < record["peak_memory_bytes"] < 4e9
        assert record["wall_s"] > 1.0
        assert "seed = 2" in (logs / f"quick-{policy}-1/workload.toml").read_text()
