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
from services.launcher.stack import (
    PROCFILE,
    Stack,
    StackError,
    claim_run_id,
    expected_nodes,
    free_endpoints,
    stack_environment,
)

SLEEP = "import time; time.sleep(60)"
OUTLIVED = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
start = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
subprocess.run([sys.executable, "-c", start, *sleep], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("outlived by", flush=True)
time.sleep(60)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""


@pytest.fixture
def config(tmp_path):
    return Config(run=RunConfig(logs_dir=str(tmp_path / "logs")))


def stack_of(
    config: Config, folder: Path, *programs: str, scheduler: bool = True, start_s: float = 20.0
) -> Stack:
    """A stack of the real scheduler and of these Python programs."""
    procfile = folder / "Procfile"
    lines = ["scheduler: exec python -m services.scheduler"] if scheduler else []
    for number, program in enumerate(programs):
        (folder / f"p{number}.py").write_text(program)
        lines.append(f"p{number}: exec python {folder}/p{number}.py")
    procfile.write_text("\n".join(lines))
    return Stack(config, os.environ, procfile=procfile, start_s=start_s)


def test_the_procfile_starts_every_service_as_its_own_process_with_one_thread():
    processes = parse_procfile(PROCFILE.read_text()).processes
    assert list(processes) == ["scheduler", "metrics-collector", "event-logger", "agent-1", "agent-2"]
    for name, command in processes.items():
        module = "job_agent" if name.startswith("agent") else name.replace("-", "_")
        assert command.startswith(f"exec env OMP_NUM_THREADS=1 python -m services.{module}")
    assert expected_nodes(PROCFILE) == {"node-1", "node-2"}


def test_endpoints_are_free_distinct_and_on_an_address_of_their_own(config):
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
    with pytest.raises(UserError, match=r"run_id mine: .* is there already"):
        claim_run_id(logging_to(tmp_path, "mine"))


def test_a_folder_for_logs_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"logs_dir .*file: cannot be used"):
        claim_run_id(logging_to(tmp_path / "file"))


def test_a_procfile_that_is_missing_is_refused_before_anything_is_made(config, tmp_path):
    with pytest.raises(StackError, match="Procfile: cannot be read"):
        Stack(config, os.environ, procfile=tmp_path / "Procfile")
    assert not Path(config.run.logs_dir).exists()


def test_a_stack_is_up_when_its_scheduler_answers_and_gone_after_the_block(config, tmp_path):
    with stack_of(config, tmp_path, SLEEP) as stack:
        assert stack.jobs().run_id == stack.run_id
        assert len(stack.processes()) > 2
    assert stack.stop() == 143
    assert stack.processes() == []
    assert stack.killed == ()
    with pytest.raises(StackError, match="ended by itself"):
        stack.jobs()


def test_a_stack_that_fails_to_come_up_shows_the_end_of_its_output_and_leaves_nothing(config, tmp_path):
    fails = "import sys; print('port is taken', file=sys.stderr); sys.exit(3)"
    stack = stack_of(config, tmp_path, SLEEP, fails)
    with pytest.raises(StackError, match="ended by itself with exit code 3") as caught, stack:
        pass
    assert "port is taken" in str(caught.value)
    assert "port is taken" in stack.output.read_text()
    assert stack.processes() == []


def test_a_stack_without_a_scheduler_is_given_up_and_taken_down(config, tmp_path):
    stack = stack_of(config, tmp_path, SLEEP, scheduler=False, start_s=1.0)
    with pytest.raises(StackError, match="not up after 1 s; missing: the scheduler"), stack:
        pass
    assert stack.processes() == []


def test_a_stack_whose_agent_is_missing_is_given_up_by_its_name(config, tmp_path):
    stack = stack_of(config, tmp_path, SLEEP, start_s=3.0)
    with (tmp_path / "Procfile").open("a") as procfile:
        procfile.write(f"\nagent: exec python {tmp_path}/p0.py services.job_agent --node node-7\n")
    stack = Stack(config, os.environ, procfile=tmp_path / "Procfile", start_s=3.0)
    with pytest.raises(StackError, match="not up after 3 s; missing: node-7"), stack:
        pass
    assert stack.processes() == []


def test_a_deaf_process_is_killed_within_five_seconds_and_named(config, tmp_path):
    with stack_of(config, tmp_path, DEAF) as stack:
        wait_for_output(stack, "deaf")
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 5.0
    assert [name.endswith("p0.py") for name in stack.killed].count(True) == 1
    assert stack.processes() == []


def test_a_process_that_outlived_its_parents_is_found_and_stopped(config, tmp_path):
    with stack_of(config, tmp_path, OUTLIVED) as stack:
        wait_for_output(stack, "outlived by")
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


def test_stopping_what_was_never_started_is_nothing(config, tmp_path):
    assert stack_of(config, tmp_path, SLEEP).stop() is None


def wait_for_output(stack: Stack, text: str) -> None:
    """Until the stack has said this."""
    with subprocess.Popen(
        ["tail", "-c+1", "-f", str(stack.output)], stdout=subprocess.PIPE, text=True
    ) as tail:
        assert tail.stdout is not None
        for line in tail.stdout:
            if text in line:
                break
        tail.terminate()
