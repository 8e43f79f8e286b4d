"""The child processes of an agent: how they start, talk over pipes, and end.

The store, the replicas and the verifiers are forked from one fork server that has imported torch. A start
thus takes milliseconds, and the agent itself stays small. `node_jobs.py` decides which processes run and
handles their messages.

To stop a process, the agent closes its pipe and sends SIGTERM, and after `grace_s` SIGKILL. If the agent
itself was killed, its processes notice and exit (`child_entry.py`), and the fork server ends with the last of
them.
"""

import contextlib
import fcntl
import multiprocessing
import os
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psutil

from common.codec import decode
from common.lifecycle import blocked_signals, get_logger
from services.job_agent import child_entry

PRELOADED = (
    "services.job_agent.child_entry",
    "workloads.trainer.replica",
    "workloads.trainer.store",
    "workloads.trainer.verify",
)
READS_AT_ONCE = 64
STORE = "store"
STOP_SIGNALS = signal.SIGINT, signal.SIGTERM
"""Child processes do not receive these while they start: the agent ends them itself, in order."""

log = get_logger()


class ProcessLoop(Protocol):
    """The part of `common.messaging.reactor.Reactor` that is used here."""

    def on_fd(self, fd: int, handler: Callable[[], None]) -> None: ...
    def remove_fd(self, fd: int) -> None: ...
    def call_later(self, delay_s: float, handler: Callable[[], None]) -> Any: ...
    def run_until(self, predicate: Callable[[], bool], timeout_s: float) -> Any: ...


@dataclass(frozen=True)
class Exit:
    """How a process ended. `code` is negative for a signal. `finished`: it reported that its work was
    done."""

    code: int
    finished: bool


@dataclass
class Child:
    process: Any
    connection: Connection
    handle: psutil.Process | None = None
    killed: bool = False
    finished: bool = False

    def signal(self, number: int) -> None:
        """Safe after the process has ended: psutil sends nothing to another process with the same pid."""
        if self.handle is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.handle.send_signal(number)


class ChildProcesses:
    """The loop calls all callbacks. `on_message(name, bytes)` and `on_exit(name, Exit)` concern processes
    that `start` has started; all messages of a process come before its exit. `on_store(port)`: the store
    listens, and processes can be started. `on_broken()`: the store or the fork server has died; kill the
    other processes and `prepare` again."""

    def __init__(
        self,
        loop: ProcessLoop,
        host: str,
        grace_s: float,
        max_message_bytes: int,
        on_message: Callable[[str, bytes], None],
        on_exit: Callable[[str, Exit], None],
        on_store: Callable[[int], None],
        on_broken: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._host = host
        self._grace_s = grace_s
        self._max_message_bytes = max_message_bytes
        self._on_message = on_message
        self._on_exit = on_exit
        self._on_store = on_store
        self._on_broken = on_broken
        self._children: dict[str, Child] = {}
        self._store: Child | None = None
        self._fork_server: psutil.Process | None = None
        """Set while the store runs."""
        self._launcher: threading.Thread | None = None
        self._closing = False
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))

    @property
    def living(self) -> int:
        """Number of processes that `start` has started and that have not exited."""
        return len(self._children)

    # ------------------------------------------------------------------ start

    def prepare(self) -> None:
        """Start fork server and store. Does not wait until torch is imported: a thread does that."""
        agent_end, child_end = self._context.Pipe()
        process = self._context.Process(
            target=child_entry.store, args=(child_end, self._host), name=STORE, daemon=True
        )
        self._store = Child(process, agent_end)
        self._loop.on_fd(agent_end.fileno(), self._read_store)

        def launch() -> None:
            try:
                with blocked_signals(*STOP_SIGNALS):
                    process.start()
            except (EOFError, OSError) as error:
                if not self._closing:
                    log.error("the fork server did not start the store", error=repr(error))
            finally:
                child_end.close()

        self._launcher = threading.Thread(target=launch, name="launch-store", daemon=True)
        self._launcher.start()

    def start(self, name: str, target: Callable[..., None], start: bytes, output: Path) -> int | None:
        """Run `target(connection, start, output)` in a new process. Returns its pid, or None if the fork
        server has died (`on_broken` follows)."""
        if self._fork_server is None or not is_alive(self._fork_server):
            return None
        output.parent.mkdir(parents=True, exist_ok=True)
        agent_end, child_end = self._context.Pipe()
        process = self._context.Process(
            target=target, args=(child_end, start, str(output)), name=name, daemon=True
        )
        try:
            with blocked_signals(*STOP_SIGNALS):
                process.start()
        except (EOFError, ConnectionError):
            agent_end.close()
            return None
        finally:
            child_end.close()
        assert process.pid is not None
        child = Child(process, agent_end)
        with contextlib.suppress(psutil.NoSuchProcess):
            child.handle = psutil.Process(process.pid)
        self._children[name] = child
        self._loop.on_fd(agent_end.fileno(), lambda: self._read(name, READS_AT_ONCE))
        self._loop.on_fd(process.sentinel, lambda: self._reap(name))
        return process.pid

    # ------------------------------------------------------------------ talk

    def send(self, name: str, data: bytes) -> bool:
        """False if the pipe is full because the process has stopped reading. A process that has ended, or is
        being ended, gets no more messages; that is not an error, since its exit follows."""
        child = self._children.get(name)
        if child is None or child.connection.closed:
            return True
        writable = select.poll()
        writable.register(child.connection.fileno(), select.POLLOUT)
        if not writable.poll(0):
            return False
        with contextlib.suppress(OSError):
            child.connection.send_bytes(data)
        return True

    def _read(self, name: str, at_most: int | None = None) -> None:
        child = self._children[name]
        try:
            while not child.connection.closed and child.connection.poll() and at_most != 0:
                data = child.connection.recv_bytes(self._max_message_bytes)
                at_most = at_most and at_most - 1
                if data == child_entry.FINISHED:
                    child.finished = True
                else:
                    self._on_message(name, data)
        except (EOFError, OSError):
            self._hang_up(child)

    def _hang_up(self, child: Child) -> None:
        if not child.connection.closed:
            self._loop.remove_fd(child.connection.fileno())
            child.connection.close()

    def _read_store(self) -> None:
        store = self._store
        if store is None or not store.connection.poll():
            return
        try:
            port = decode(store.connection.recv_bytes(self._max_message_bytes), int)
        except (EOFError, OSError):
            self._lose_store()
            return
        # The store may answer before the thread that starts it knows its pid.
        assert self._launcher is not None
        self._launcher.join()
        with contextlib.suppress(psutil.NoSuchProcess):
            store.handle = psutil.Process(store.process.pid)
        self._fork_server = find_fork_server()
        if store.handle is None or self._fork_server is None:
            self._lose_store()
            return
        self._loop.on_fd(store.process.sentinel, self._lose_store)
        self._on_store(port)

    # ------------------------------------------------------------------ end

    def kill(self, name: str) -> None:
        """Stop one process: close its pipe, SIGTERM, and SIGKILL after `grace_s`; `on_exit` follows."""
        child = self._children.get(name)
        if child is None or child.killed:
            return
        child.killed = True
        self._read(name)
        self._hang_up(child)
        child.signal(signal.SIGTERM)
        self._loop.call_later(self._grace_s, lambda: child.signal(signal.SIGKILL))

    def _reap(self, name: str) -> None:
        """Called when a process has exited: handle its last messages, then its exit."""
        child = self._children[name]
        exit_is_known = _readable_bytes(child.process.sentinel) > 0
        code = child.process.exitcode
        if code is None:
            return
        self._read(name)
        self._hang_up(child)
        self._loop.remove_fd(child.process.sentinel)
        if not exit_is_known:
            # The fork server has died, which alone learns of a child's exit. The child may still be alive.
            child.signal(signal.SIGKILL)
            code = -signal.SIGKILL
        child.process.close()
        del self._children[name]
        self._on_exit(name, Exit(code, child.finished))

    def _lose_store(self) -> None:
        if self._store is not None:
            self._end_store()
            self._on_broken()

    def _end_store(self) -> None:
        store, self._store = self._store, None
        self._fork_server = None
        if store is None:
            return
        if self._launcher is not None:
            self._launcher.join()
        self._hang_up(store)
        if store.process.pid is None:
            return
        if store.handle is not None:
            self._loop.remove_fd(store.process.sentinel)
        # Nothing needs the store after the replicas of its node, so it needs no time to clean up.
        store.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            store.process.kill()
        store.process.join(self._grace_s)
        if store.process.exitcode is not None:
            store.process.close()

    def end_children(self, timeout_s: float) -> None:
        """Stop all processes and wait for them, at most `timeout_s`."""
        for name in list(self._children):
            self.kill(name)
        self._loop.run_until(lambda: not self._children, timeout_s)

    def close(self) -> None:
        """End the store and the fork server, after `end_children`. They have ended when this returns.

        The resource tracker of multiprocessing ends by itself when the agent exits."""
        self._closing = True
        if self._launcher is not None and self._store is not None and self._store.handle is None:
            # The fork server may still be importing torch. Killing it ends the wait of the launcher thread.
            while self._launcher.is_alive():
                kill_fork_server()
                self._launcher.join(0.01)
        self._end_store()
        kill_fork_server()


def find_fork_server() -> psutil.Process | None:
    """The fork server of this process, if it is alive. multiprocessing does not tell its pid, so it is found
    among the child processes by its command line."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_alive(child) and any("multiprocessing.forkserver" in part for part in child.cmdline()):
                return child
    return None


def kill_fork_server() -> None:
    """Kill it and wait until it has ended. multiprocessing itself must collect the exit status: it does so
    when it starts the next fork server, and fails if the status is gone."""
    fork_server = find_fork_server()
    if fork_server is not None:
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            fork_server.kill()
            os.waitid(os.P_PID, fork_server.pid, os.WEXITED | os.WNOWAIT)


def is_alive(process: psutil.Process) -> bool:
    """False for a process that has ended, even if its parent has not collected its exit status yet."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _readable_bytes(fd: int) -> int:
    """0 at the end of a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
