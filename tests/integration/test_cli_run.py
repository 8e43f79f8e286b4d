"""`coadapt run`: it starts a stack of its own and stops all of it, however the run ends."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from common.config import Config
from services.launcher.processes import STOP_TIMES, processes_with
from tests.fixtures.command import clean_environment, start_command

ENDLESS = """
[[job]]
application = "digits-cnn"
replicas = 2
target = 0.975
max_progress = 1000000000
"""
HOPELESS = """
[[job]]
id = "hopeless"
application = "digits-cnn"
max_progress = 30
"""


@contextmanager
def running(folder: Path, workload: str, *options: str) -> "Iterator[subprocess.Popen[str]]":
    """`coadapt run`; its stack writes to `folder`/logs."""
    (folder / "set.toml").write_text(workload)
    environment = clean_environment(COADAPT_LOGS_DIR=str(folder / "logs"))
    arguments = ["run", folder / "set.toml", "--policy", "fixed", *options]
    with start_command(*arguments, environment=environment, folder=folder) as command:
        try:
            yield command
        finally:
            command.kill()
            for process in stack_of(folder):
                process.kill()


def stack_of(folder: Path) -> list[psutil.Process]:
    """All living processes of the stack that writes to `folder`."""
    return processes_with("COADAPT_RUN_LOGS_DIR", str(folder / "logs"))


def shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    found = set()
    for process in processes:
        try:
            found |= {region.path for region in process.memory_maps() if region.path.startswith("/dev/shm/")}
        except psutil.Error:
            continue
    return found


def endpoints_of(folder: Path) -> list[str]:
    (run,) = (path for path in (folder / "logs").iterdir() if path.is_dir())
    config = msgspec.json.decode((run / "config.json").read_bytes(), type=Config)
    return [value for value in msgspec.to_builtins(config.endpoints).values() if value]


def assert_nothing_is_left(folder: Path, shared_memory: set[str]) -> None:
    assert [process.cmdline() for process in stack_of(folder)] == []
    assert [path for path in shared_memory if Path(path).exists()] == []
    for endpoint in endpoints_of(folder):
        address = urlsplit(endpoint)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.hostname, address.port))


def test_ctrl_c_stops_a_training_stack_within_five_seconds(tmp_path):
    with running(tmp_path, ENDLESS) as command:
        assert command.stdout is not None
        assert any("  running  " in line for line in command.stdout)
        processes = stack_of(tmp_path)
        assert len(processes) > 8
        shared_memory = shared_memory_of(processes)
        start_s = time.monotonic()
        os.killpg(command.pid, signal.SIGINT)
        out, errors = command.communicate(timeout=10)
        assert time.monotonic() - start_s < 5.0
        assert command.returncode == 130
        assert errors == ""
        assert out.splitlines()[-1].startswith("interrupted: the stack is down")
        assert_nothing_is_left(tmp_path, shared_memory)


def test_sigterm_while_the_stack_comes_up_leaves_nothing(tmp_path):
    with running(tmp_path, ENDLESS) as command:
        deadline_s = time.monotonic() + 20
        while len(stack_of(tmp_path)) < 5 and time.monotonic() < deadline_s:
            os.sched_yield()
        start_s = time.monotonic()
        os.killpg(command.pid, signal.SIGTERM)
        command.communicate(timeout=10)
        assert time.monotonic() - start_s < 5.0
        assert command.returncode == 143
        assert stack_of(tmp_path) == []


def test_a_second_ctrl_c_kills_at_once(tmp_path):
    with running(tmp_path, ENDLESS) as command:
        assert command.stdout is not None
        assert any("  running  " in line for line in command.stdout)
        (output,) = tmp_path.glob("logs/*/stack.log")
        scheduler = next(p for p in stack_of(tmp_path) if "services.scheduler" in p.cmdline())
        scheduler.suspend()  # it does not react to the request to stop
        start_s = time.monotonic()
        os.killpg(command.pid, signal.SIGINT)
        while "sending SIGTERM to scheduler" not in output.read_text():
            with suppress(subprocess.TimeoutExpired):
                command.wait(0.02)
            assert command.returncode is None, "after the first Ctrl-C it asks and waits"
        os.killpg(command.pid, signal.SIGINT)
        command.communicate(timeout=10)
        assert time.monotonic() - start_s < sum(STOP_TIMES), "it does not wait for the scheduler"
        assert command.returncode == 130
        assert stack_of(tmp_path) == []


def test_a_job_that_fails_makes_the_run_fail_with_its_reason_after_the_summary(tmp_path):
    with running(tmp_path, HOPELESS) as command:
        out, errors = command.communicate(timeout=55)
    assert command.returncode == 1
    assert errors.startswith("coadapt: hopeless: failed: ")
    assert "progress budget" in errors
    assert "1 failed" in out
    assert "audit: clean" in out
    assert_nothing_is_left(tmp_path, set())


def test_jobs_that_run_longer_than_the_timeout_make_the_run_fail(tmp_path):
    with running(tmp_path, ENDLESS, "--timeout", "1") as command:
        out, errors = command.communicate(timeout=40)
    assert command.returncode == 1
    assert errors.startswith("coadapt: digits-cnn-1: ")
    assert "summary" not in errors
    assert "digits-cnn-1" in out
    assert_nothing_is_left(tmp_path, set())


def test_a_stack_that_does_not_come_up_is_explained_by_its_last_output(tmp_path):
    with running(tmp_path, ENDLESS) as command:
        deadline_s = time.monotonic() + 20
        agents = []
        while not agents and time.monotonic() < deadline_s:
            agents = [p for p in stack_of(tmp_path) if "services.job_agent" in " ".join(p.cmdline())]
        agents[0].kill()
        _, errors = command.communicate(timeout=20)
    assert command.returncode == 3
    assert errors.startswith("coadapt: the stack ended by itself")
    assert "agent-" in errors
    assert stack_of(tmp_path) == []
