"""Child processes of the agent: start, pipes, end, and that none is left behind."""

import multiprocessing.forkserver
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from common.lifecycle import StopFlag
from common.messaging.reactor import Reactor
from services.job_agent.replicas import ChildProcesses, Exit, find_fork_server, is_alive
from tests.fixtures.child_bodies import echo, exit_with, ignore_everything, report_signals, talk_and_finish

GRACE_S = 0.5
PATIENCE_S = 45.0
LATE_S = 0.3


class ProcessHost:
    """`ChildProcesses` with a real reactor; keeps messages, exits and ports."""

    def __init__(self) -> None:
        self.others = children_alive()  # of tests that ran before in this process, for instance joblib's
        self.reactor = Reactor(StopFlag())
        self.messages: list[tuple[str, bytes]] = []
        self.exits: dict[str, Exit] = {}
        self.ports: list[int] = []
        self.broken = 0
        self.processes = ChildProcesses(
            self.reactor,
            host="127.0.0.1",
            grace_s=GRACE_S,
            max_message_bytes=1_000_000,
            on_message=lambda name, data: self.messages.append((name, data)),
            on_exit=self.exits.__setitem__,
            on_store=self.ports.append,
            on_broken=self.on_broken,
        )

    def on_broken(self) -> None:
        self.broken += 1

    def until(self, predicate: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        assert self.reactor.run_until(predicate, timeout_s), "not in time"

    def prepare(self) -> None:
        ports = len(self.ports)
        self.processes.prepare()
        self.until(lambda: len(self.ports) > ports)

    def start(self, name: str, target: Callable[..., None], output: Path, start: bytes = b"") -> int:
        pid = self.processes.start(name, target, start, output)
        assert pid is not None
        return pid

    def messages_of(self, name: str) -> list[bytes]:
        return [data for sender, data in self.messages if sender == name]


def children_alive() -> set[psutil.Process]:
    """Children of this process, and theirs."""
    return {child for child in psutil.Process().children(recursive=True) if is_alive(child)}


@pytest.fixture(scope="module")
def prepared() -> Iterator[ProcessHost]:
    host = ProcessHost()
    host.processes.close()  # end a fork server that another test in this process has started
    host.prepare()
    yield host
    host.processes.end_children(5.0)
    host.processes.close()
    host.reactor.close()


@pytest.fixture
def host(prepared: ProcessHost) -> Iterator[ProcessHost]:
    yield prepared
    prepared.processes.end_children(5.0)
    assert prepared.processes.living == 0
    prepared.exits.clear()
    prepared.messages.clear()


def test_the_store_listens_on_its_port(host: ProcessHost) -> None:
    with socket.create_connection(("127.0.0.1", host.ports[-1]), timeout=5.0):
        pass


def test_a_process_gets_its_start_message_and_exchanges_messages(host: ProcessHost, tmp_path: Path) -> None:
    host.start("a", echo, tmp_path / "deep" / "a.log", b"go")
    host.until(lambda: bool(host.messages_of("a")))
    assert host.processes.send("a", b"hello")
    host.until(lambda: len(host.messages_of("a")) == 2)
    assert host.messages_of("a") == [b"ready go", b"hello"]


def test_all_messages_of_a_process_come_before_its_exit(host: ProcessHost, tmp_path: Path) -> None:
    host.start("a", talk_and_finish, tmp_path / "a.log")
    host.until(lambda: "a" in host.exits)
    assert host.messages_of("a") == [b"%d" % number for number in range(500)]
    assert host.exits["a"] == Exit(code=0, finished=True)


@pytest.mark.parametrize("code", [0, 3, 255])
def test_an_exit_before_the_work_is_done_is_recognised(host: ProcessHost, tmp_path: Path, code: int) -> None:
    host.start("a", exit_with, tmp_path / "a.log", str(code).encode())
    host.until(lambda: "a" in host.exits)
    assert host.exits["a"] == Exit(code=code, finished=False)
    assert host.messages_of("a") == [b"one more thing"]
    assert (tmp_path / "a.log").read_text() == "last words\n"


def test_a_process_that_dies_by_a_signal_is_reported_with_the_signal(
    host: ProcessHost, tmp_path: Path
) -> None:
    pid = host.start("a", echo, tmp_path / "a.log")
    host.until(lambda: bool(host.messages_of("a")))
    os.kill(pid, signal.SIGSEGV)
    host.until(lambda: "a" in host.exits)
    assert host.exits["a"].code == -signal.SIGSEGV


def test_kill_ends_a_cooperative_process_without_sigkill(host: ProcessHost, tmp_path: Path) -> None:
    host.start("a", echo, tmp_path / "a.log")
    host.until(lambda: bool(host.messages_of("a")))
    host.processes.kill("a")
    host.until(lambda: "a" in host.exits)
    assert host.exits["a"].code != -signal.SIGKILL


def test_kill_ends_a_process_that_ignores_its_pipe_and_sigterm(host: ProcessHost, tmp_path: Path) -> None:
    host.start("a", ignore_everything, tmp_path / "a.log")
    host.until(lambda: bool(host.messages_of("a")))
    start_s = time.monotonic()
    host.processes.kill("a")
    host.processes.kill("a")
    host.until(lambda: "a" in host.exits)
    assert host.exits["a"].code == -signal.SIGKILL
    assert time.monotonic() - start_s >= GRACE_S


def test_a_process_that_does_not_read_never_blocks_the_agent(host: ProcessHost, tmp_path: Path) -> None:
    host.start("a", ignore_everything, tmp_path / "a.log")
    sent = 0
    while host.processes.send("a", bytes(1000)):
        sent += 1
        assert sent < 10_000
    assert sent > 10


def test_sending_to_an_ended_process_is_no_error(host: ProcessHost, tmp_path: Path) -> None:
    host.start("a", exit_with, tmp_path / "a.log", b"0")
    host.until(lambda: "a" in host.exits)
    assert host.processes.send("a", b"too late")


def test_a_job_process_receives_sigterm_but_not_sigint_and_prints_to_its_file(
    host: ProcessHost, tmp_path: Path
) -> None:
    host.start("a", report_signals, tmp_path / "a.log")
    host.until(lambda: "a" in host.exits)
    assert host.messages_of("a") == [b"blocked: SIGINT"]
    assert (tmp_path / "a.log").read_text() == "to stdout\nto stderr\n"


def test_a_start_costs_milliseconds_and_leaves_no_descriptor_and_no_zombie(
    host: ProcessHost, tmp_path: Path
) -> None:
    me = psutil.Process()

    def round_trip(name: str) -> float:
        """CPU seconds of a start: of the new process up to its first message, of the agent and of the fork
        server. Torch is loaded; importing it would take more than a second."""
        pid = host.start(name, echo, tmp_path / f"{name}.log")
        host.until(lambda: bool(host.messages_of(name)))
        assert "libtorch" in Path(f"/proc/{pid}/maps").read_text()
        child = psutil.Process(pid)
        fork_server = child.parent()
        assert fork_server is not None
        parents_s = cpu_time_s(me) + cpu_time_s(fork_server)
        cost_s = cpu_time_s(child) + parents_s - spent_s[-1]
        spent_s.append(parents_s)
        host.processes.kill(name)
        host.until(lambda: name in host.exits)
        return cost_s

    spent_s = [0.0]
    round_trip("first")
    fds, threads = me.num_fds(), me.num_threads()
    costs_s = [round_trip(f"r{number}") for number in range(15)]
    assert me.num_fds() == fds
    assert me.num_threads() == threads
    assert not [p for p in me.children(recursive=True) if p.status() == psutil.STATUS_ZOMBIE]
    assert statistics.median(costs_s) < 0.15, costs_s


def cpu_time_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def test_when_the_fork_server_dies_all_processes_end_and_can_be_prepared_again(
    host: ProcessHost, tmp_path: Path
) -> None:
    pid = host.start("a", ignore_everything, tmp_path / "a.log")
    host.until(lambda: bool(host.messages_of("a")))
    orphan = psutil.Process(pid)
    broken = host.broken
    fork_server = orphan.parent()
    assert fork_server is not None
    fork_server.kill()
    host.until(lambda: host.broken == broken + 1 and "a" in host.exits)
    assert host.exits["a"] == Exit(code=-signal.SIGKILL, finished=False)
    orphan.wait(5.0)
    assert host.processes.start("b", echo, b"", tmp_path / "b.log") is None
    host.prepare()
    host.start("c", echo, tmp_path / "c.log")
    host.until(lambda: bool(host.messages_of("c")))


def kill_store(host: ProcessHost) -> None:
    broken, port = host.broken, host.ports[-1]
    store = next(
        process
        for process in psutil.Process().children(recursive=True)
        if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in process.net_connections())
    )
    store.kill()
    host.until(lambda: host.broken > broken)


def test_the_death_of_the_store_is_reported_once(host: ProcessHost) -> None:
    broken = host.broken
    kill_store(host)
    host.prepare()
    assert host.broken == broken + 1


def test_a_store_may_be_ready_before_its_pid_is_known(
    host: ProcessHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_store(host)
    read_pid = multiprocessing.forkserver.read_signed

    def read_pid_late(descriptor: int) -> int:
        pid = read_pid(descriptor)
        threading.Event().wait(LATE_S)
        return int(pid)

    monkeypatch.setattr("multiprocessing.forkserver.read_signed", read_pid_late)
    host.prepare()
    kill_store(host)  # must not kill the agent itself
    monkeypatch.undo()
    host.prepare()


def test_a_closed_host_leaves_no_process_but_the_resource_tracker_and_can_be_prepared_again(
    host: ProcessHost,
) -> None:
    host.processes.close()
    left = children_alive() - host.others
    assert all("multiprocessing.resource_tracker" in " ".join(child.cmdline()) for child in left)
    assert find_fork_server() is None
    host.prepare()
