import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from honcho.environ import parse_procfile

from common.config import Config, RunConfig, load_config
from common.lifecycle import UserError
from services.launcher.project_files import PROCFILE_TEXT
from services.launcher.stack import (
    Procfile,
    Stack,
    StackError,
    claim_run_id,
    current_procfile,
    free_endpoints,
    stack_environment,
)

SLEEP = "import time; time.sleep(60)"
LEAVES_A_CHILD = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
start = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
subprocess.run([sys.executable, "-c", start, *sleep], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("child started", flush=True)
time.sleep(60)
"""
IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ignores", flush=True)
time.sleep(60)
"""


@pytest.fixture
def config(tmp_path):
    return Config(run=RunConfig(logs_dir=str(tmp_path / "logs")))


def stack_of(
    config: Config,
    folder: Path,
    *programs: str,
    scheduler: bool = True,
    node: str = "",
    start_s: float = 20.0,
) -> Stack:
    """A stack of the real scheduler and these Python programs, which look like the agents of a `node`."""
    lines = ["scheduler: exec python -m services.scheduler"] if scheduler else []
    for number, program in enumerate(programs):
        (folder / f"p{number}.py").write_text(program)
        agent = f" services.job_agent --node {node}" if node else ""
        lines.append(f"p{number}: exec python {folder}/p{number}.py{agent}")
    return Stack(config, os.environ, procfile=Procfile("test", "\n".join(lines)), start_s=start_s)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder; it is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_built_in_procfile_starts_each_service_as_a_process_with_one_thread(folder):
    procfile = current_procfile()
    assert procfile == ("the built-in Procfile", PROCFILE_TEXT)
    processes = parse_procfile(procfile.text).processes
    assert list(processes) == ["scheduler", "metrics-collector", "event-logger", "agent-1", "agent-2"]
    for name, command in processes.items():
        module = "job_agent" if name.startswith("agent") else name.replace("-", "_")
        assert command.startswith(f"exec env OMP_NUM_THREADS=1 python -m services.{module}")
    assert procfile.nodes == {"node-1", "node-2"}


def test_the_procfile_next_to_the_configuration_is_used(folder):
    (folder / "Procfile").write_text("agent: exec python -m services.job_agent --node mine\n")
    assert current_procfile().source == "the built-in Procfile", "it may belong to another project"
    (folder / "coadapt.toml").touch()
    assert current_procfile().source == "Procfile"
    assert current_procfile().nodes == {"mine"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"agent: python 'services.job_agent\n", "Procfile: not a Procfile: No closing quotation"),
        (b"agent: python a\nagent: python b\n", "Procfile: not a Procfile: process names must be unique"),
        (b"\xff\n", "Procfile: not UTF-8 text"),
        (None, "Procfile: cannot be read: Is a directory"),
    ],
)
def test_a_procfile_that_cannot_be_used_is_refused_before_anything_is_created(
    config, folder, content, problem
):
    (folder / "coadapt.toml").touch()
    if content is None:
        (folder / "Procfile").mkdir()
    else:
        (folder / "Procfile").write_bytes(content)
    with pytest.raises(StackError, match=problem):
        Stack(config, os.environ)
    assert not Path(config.run.logs_dir).exists()


def test_endpoints_are_free_distinct_and_on_a_random_loopback_address(config):
    first, second = (msgspec.structs.asdict(free_endpoints(config.endpoints)) for _ in range(2))
    assert first.pop("keys_dir") == second.pop("keys_dir") == ""
    hosts = [
        {re.fullmatch(r"tcp://(127\.[\d.]+):\d+", e)[1] for e in found.values()} for found in (first, second)
    ]
    assert [len(host) for host in hosts] == [1, 1]
    assert hosts[0] != hosts[1]
    assert "127.0.0.1" not in hosts[0] | hosts[1]
    assert len(set(first.values())) == 6


def test_processes_get_exactly_the_configuration_of_their_stack(config, tmp_path):
    config = msgspec.structs.replace(config, run=RunConfig(run_id="r", seed=3))
    mine = {
        "COADAPT_SEED": "9",
        "COADAPT_POLICY": "fixed",
        "COADAPT_OSDI21": "/data",
        "PATH": "/bin",
        "HOME": "/h",
    }
    environment = stack_environment(config, mine)
    file = tmp_path / "other.toml"
    file.write_text('[scheduler]\npolicy = "dynamic"\n')
    assert load_config(environment, file) == config
    assert environment["COADAPT_OSDI21"] == "/data"
    assert environment["HOME"] == "/h"
    assert environment["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/bin"]


def logging_to(folder: Path, run_id: str = "") -> Config:
    return Config(run=RunConfig(logs_dir=str(folder), run_id=run_id))


def test_run_ids_are_unique(tmp_path):
    ids = [claim_run_id(logging_to(tmp_path)) for _ in range(3)]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(r"\d{8}-\d{6}-pollux(-\d)?", run_id) for run_id in ids)
    assert claim_run_id(logging_to(tmp_path, "mine")) == "mine"
    with pytest.raises(UserError, match=r"run_id mine: .* exists already"):
        claim_run_id(logging_to(tmp_path, "mine"))


def test_a_log_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"logs_dir .*file: cannot be used"):
        claim_run_id(logging_to(tmp_path / "file"))


def test_a_stack_is_up_when_its_scheduler_replies_and_has_ended_after_the_block(config, tmp_path):
    with stack_of(config, tmp_path, SLEEP) as stack:
        assert stack.jobs().run_id == stack.run_id
        assert len(stack.processes()) > 2
        assert "exec python -m services.scheduler" in (stack.run_dir / "Procfile").read_text()
    assert stack.stop() == 143
    assert stack.processes() == []
    assert stack.killed == ()
    with pytest.raises(StackError, match="ended by itself"):
        stack.jobs()


def test_a_stack_that_fails_to_come_up_shows_its_last_output_and_leaves_nothing(config, tmp_path):
    fails = "import sys; print('port is taken', file=sys.stderr); sys.exit(3)"
    stack = stack_of(config, tmp_path, SLEEP, fails)
    with pytest.raises(StackError, match="ended by itself with exit code 3") as caught, stack:
        pass
    assert "port is taken" in str(caught.value)
    assert "port is taken" in stack.output.read_text()
    assert stack.processes() == []


def test_a_stack_without_a_scheduler_is_stopped_after_its_start_time(config, tmp_path):
    stack = stack_of(config, tmp_path, SLEEP, scheduler=False, start_s=1.0)
    with pytest.raises(StackError, match="not up after 1 s; missing: the scheduler"), stack:
        pass
    assert stack.processes() == []


def test_a_stack_without_one_of_its_agents_is_stopped_and_the_node_is_named(config, tmp_path):
    stack = stack_of(config, tmp_path, SLEEP, node="node-7", start_s=3.0)
    with pytest.raises(StackError, match="not up after 3 s; missing: node-7"), stack:
        pass
    assert stack.processes() == []


def test_a_process_that_ignores_sigterm_is_killed_before_honcho_does_it_and_named(config, tmp_path):
    with stack_of(config, tmp_path, IGNORES_SIGTERM) as stack:
        wait_for_output(stack, "ignores")
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 5.0
    assert [name.endswith("p0.py") for name in stack.killed].count(True) == 1
    assert stack.processes() == []


def test_a_process_that_outlived_its_parents_is_found_and_stopped(config, tmp_path):
    with stack_of(config, tmp_path, LEAVES_A_CHILD) as stack:
        wait_for_output(stack, "child started")
        assert len(stack.processes()) > 3
    assert stack.processes() == []
    assert stack.killed == ()


def test_processes_of_another_stack_are_left_alone(config, tmp_path):
    (tmp_path / "other").mkdir()
    with stack_of(config, tmp_path / "other", SLEEP) as other:
        with stack_of(config, tmp_path, SLEEP) as stack:
            assert stack.run_id != other.run_id
        assert stack.processes() == []
        assert other.jobs().run_id == other.run_id


def test_stopping_a_stack_that_was_never_started_does_nothing(config, tmp_path):
    assert stack_of(config, tmp_path, SLEEP).stop() is None


def wait_for_output(stack: Stack, text: str) -> None:
    """Wait until the stack's output has this text."""
    with subprocess.Popen(
        ["tail", "-c+1", "-f", str(stack.output)], stdout=subprocess.PIPE, text=True
    ) as tail:
        assert tail.stdout is not None
        for line in tail.stdout:
            if text in line:
                break
        tail.terminate()
