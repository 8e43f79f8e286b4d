"""Child processes of the agent: start, pipes, the stop ladder, and what is left behind (nothing)."""

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
from services.job_agent.replicas import Exit, Processes
from tests.fixtures.child_bodies import echo, exit_with, ignore_everything, talk_and_finish, tell_signals

GRACE_S = 0.5
PATIENCE_S = 45.0
LATE_S = 0.3


class Host:
    """Processes with a real reactor; keeps what they say."""

    def __init__(self) -> None:
        self.reactor = Reactor(StopFlag())
        self.messages: list[tuple[str, bytes]] = []
        self.exits: dict[str, Exit] = {}
        self.ports: list[int] = []
        self.broken = 0
        self.processes = Processes(
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
        assert self.reactor.run_until(predicate, timeout_s), "it did not happen in time"

    def prepare(self) -> None:
        ports = len(self.ports)
        self.processes.prepare()
        self.until(lambda: len(self.ports) > ports)

    def start(self, name: str, target: Callable[..., None], output: Path, start: bytes = b"") -> int:
        pid = self.processes.start(name, target, start, output)
        assert pid is not None
        return pid

    def said(self, name: str) -> list[bytes]:
        return [data for who, data in self.messages if who == name]


@pytest.fixture(scope="module")
def prepared() -> Iterator[Host]:
    host = Host()
    host.processes.close()  # a forkserver that another test of this process has started
    host.prepare()
    yield host
    host.processes.end_children(5.0)
    host.processes.close()
    host.reactor.close()


@pytest.fixture
def host(prepared: Host) -> Iterator[Host]:
    yield prepared
    prepared.processes.end_children(5.0)
    assert prepared.processes.living == 0
    prepared.exits.clear()
    prepared.messages.clear()


def test_the_store_listens_where_it_says(host: Host) -> None:
    with socket.create_connection(("127.0.0.1", host.ports[-1]), timeout=5.0):
        pass


def test_a_process_gets_its_start_and_talks_both_ways(host: Host, tmp_path: Path) -> None:
    host.start("a", echo, tmp_path / "deep" / "a.log", b"go")
    host.until(lambda: bool(host.said("a")))
    assert host.processes.send("a", b"hello")
    host.until(lambda: len(host.said("a")) == 2)
    assert host.said("a") == [b"ready go", b"hello"]


def test_all_messages_of_a_process_come_before_its_exit(host: Host, tmp_path: Path) -> None:
    host.start("a", talk_and_finish, tmp_path / "a.log")
    host.until(lambda: "a" in host.exits)
    assert host.said("a") == [b"%d" % number for number in range(500)]
    assert host.exits["a"] == Exit(code=0, finished=True)


@pytest.mark.parametrize("code", [0, 3, 255])
def test_an_exit_without_the_final_word_is_told_apart(host: Host, tmp_path: Path, code: int) -> None:
    host.start("a", exit_with, tmp_path / "a.log", str(code).encode())
    host.until(lambda: "a" in host.exits)
    assert host.exits["a"] == Exit(code=code, finished=False)
    assert host.said("a") == [b"one more thing"]
    assert (tmp_path / "a.log").read_text() == "last words\n"


def test_a_process_that_dies_by_a_signal_is_reported_with_it(host: Host, tmp_path: Path) -> None:
    pid = host.start("a", echo, tmp_path / "a.log")
    host.until(lambda: bool(host.said("a")))
    os.kill(pid, signal.SIGSEGV)
    host.until(lambda: "a" in host.exits)
    assert host.exits["a"].code == -signal.SIGSEGV


def test_kill_ends_an_obedient_process_at_once(host: Host, tmp_path: Path) -> None:
    host.start("a", echo, tmp_path / "a.log")
    host.until(lambda: bool(host.said("a")))
    host.processes.kill("a")
    host.until(lambda: "a" in host.exits)
    assert host.exits["a"].code != -signal.SIGKILL


def test_kill_ends_a_process_that_ignores_its_pipe_and_sigterm(host: Host, tmp_path: Path) -> None:
    host.start("a", ignore_everything, tmp_path / "a.log")
    host.until(lambda: bool(host.said("a")))
    start_s = time.monotonic()
    host.processes.kill("a")
    host.processes.kill("a")
    host.until(lambda: "a" in host.exits)
    assert host.exits["a"].code == -signal.SIGKILL
    assert time.monotonic() - start_s >= GRACE_S


def test_a_process_that_does_not_read_never_blocks_the_agent(host: Host, tmp_path: Path) -> None:
    host.start("a", ignore_everything, tmp_path / "a.log")
    sent = 0
    while host.processes.send("a", bytes(1000)):
        sent += 1
        assert sent < 10_000
    assert sent > 10


def test_sending_to_a_process_that_has_ended_is_no_error(host: Host, tmp_path: Path) -> None:
    host.start("a", exit_with, tmp_path / "a.log", b"0")
    host.until(lambda: "a" in host.exits)
    assert host.processes.send("a", b"too late")


def test_a_job_process_hears_sigterm_but_no_ctrl_c_and_prints_to_its_file(host: Host, tmp_path: Path) -> None:
    host.start("a", tell_signals, tmp_path / "a.log")
    host.until(lambda: "a" in host.exits)
    assert host.said("a") == [b"blocked: SIGINT"]
    assert (tmp_path / "a.log").read_text() == "to stdout\nto stderr\n"


def test_a_start_costs_milliseconds_and_leaves_no_descriptor_and_no_zombie(
    host: Host, tmp_path: Path
) -> None:
    me = psutil.Process()

    def round_trip(name: str) -> float:
        """CPU time of a start, in seconds: of the new process until it talks, and of those who made it.
        Torch is there, but to import it would cost more than a second."""
        pid = host.start(name, echo, tmp_path / f"{name}.log")
        host.until(lambda: bool(host.said(name)))
        assert "libtorch" in Path(f"/proc/{pid}/maps").read_text()
        child = psutil.Process(pid)
        forkserver = child.parent()
        assert forkserver is not None
        makers_s = cpu_time_s(me) + cpu_time_s(forkserver)
        cost_s = cpu_time_s(child) + makers_s - spent_s[-1]
        spent_s.append(makers_s)
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


def test_when_the_forkserver_dies_everything_ends_and_can_be_prepared_anew(
    host: Host, tmp_path: Path
) -> None:
    pid = host.start("a", ignore_everything, tmp_path / "a.log")
    host.until(lambda: bool(host.said("a")))
    orphan = psutil.Process(pid)
    broken = host.broken
    forkserver = orphan.parent()
    assert forkserver is not None
    forkserver.kill()
    host.until(lambda: host.broken == broken + 1 and "a" in host.exits)
    assert host.exits["a"] == Exit(code=-signal.SIGKILL, finished=False)
    orphan.wait(5.0)
    assert host.processes.start("b", echo, b"", tmp_path / "b.log") is None
    host.prepare()
    host.start("c", echo, tmp_path / "c.log")
    host.until(lambda: bool(host.said("c")))


def kill_store(host: Host) -> None:
    broken, port = host.broken, host.ports[-1]
    store = next(
        process
        for process in psutil.Process().children(recursive=True)
        if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in process.net_connections())
    )
    store.kill()
    host.until(lambda: host.broken > broken)


def test_when_the_store_dies_the_agent_is_told_once(host: Host) -> None:
    broken = host.broken
    kill_store(host)
    host.prepare()
    assert host.broken == broken + 1


def test_a_store_may_answer_before_its_pid_is_known(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_store(host)
    read_pid = multiprocessing.forkserver.read_signed

    def read_pid_late(descriptor: int) -> int:
        pid = read_pid(descriptor)
        threading.Event().wait(LATE_S)
        return int(pid)

    monkeypatch.setattr("multiprocessing.forkserver.read_signed", read_pid_late)
    host.prepare()
    kill_store(host)  # and not the agent, which an unknown pid once stood for
    monkeypatch.undo()
    host.prepare()
