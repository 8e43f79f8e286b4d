"""The child processes of an agent: forkserver, store, replicas and verifiers, their pipes, their end.

All are forked from one forkserver that has torch imported, so that a start costs milliseconds and the agent
stays small. What the processes say and why they run is `service.py`.

The stop ladder of a process: its pipe is closed and it gets SIGTERM; after `grace_s` it gets SIGKILL. What
nobody can carry out, because the agent itself was killed, the processes do: they watch the agent's end of
their pipes (`child_entry.py`), and the forkserver ends with the last of them.
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
from multiprocessing import forkserver, resource_tracker
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
"""An agent ends what it has started, in its own order."""

log = get_logger()


class ProcessLoop(Protocol):
    """What is needed of `common.messaging.reactor.Reactor`."""

    def on_fd(self, fd: int, handler: Callable[[], None]) -> None: ...
    def remove_fd(self, fd: int) -> None: ...
    def call_later(self, delay_s: float, handler: Callable[[], None]) -> Any: ...
    def run_until(self, predicate: Callable[[], bool], timeout_s: float) -> Any: ...


@dataclass(frozen=True)
class Exit:
    """`code` is negative for a signal. `finished`: the process said that its work was done."""

    code: int
    finished: bool


@dataclass
class _Child:
    process: Any
    connection: Connection
    handle: psutil.Process | None = None
    killed: bool = False
    finished: bool = False

    def signal(self, number: int) -> None:
        """psutil sends nothing to another process that has got the same pid."""
        if self.handle is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.handle.send_signal(number)


class Processes:
    """Every callback comes from the loop. `on_message(name, bytes)` and `on_exit(name, Exit)` are about
    processes that `start` made, all messages of one before its exit; `on_store(port)` says that processes can
    be started, `on_broken()` that store or forkserver have died: kill what is left and `prepare` again."""

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
        self._children: dict[str, _Child] = {}
        self._store: _Child | None = None
        self._launcher: threading.Thread | None = None
        self._closing = False
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))

    @property
    def living(self) -> int:
        """Processes that `start` made and that have not exited."""
        return len(self._children)

    # ------------------------------------------------------------------ start

    def prepare(self) -> None:
        """Start forkserver and store, without waiting for the import of torch: a thread does that."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=child_entry.store, args=(theirs, self._host), name=STORE, daemon=True
        )
        self._store = _Child(process, ours)
        self._loop.on_fd(ours.fileno(), self._read_store)

        def launch() -> None:
            try:
                with blocked_signals(*STOP_SIGNALS):
                    process.start()
            except (EOFError, OSError) as error:
                if not self._closing:
                    log.error("the forkserver did not start the store", error=repr(error))
            finally:
                theirs.close()

        self._launcher = threading.Thread(target=launch, name="launch-store", daemon=True)
        self._launcher.start()

    def start(self, name: str, target: Callable[..., None], start: bytes, output: Path) -> int | None:
        """Run `target(connection, start, output)` in a new process; its pid, or None when the forkserver
        has died (`on_broken` follows)."""
        if not _forkserver_lives():
            return None
        output.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=target, args=(theirs, start, str(output)), name=name, daemon=True
        )
        try:
            with blocked_signals(*STOP_SIGNALS):
                process.start()
        except (EOFError, ConnectionError):
            ours.close()
            return None
        finally:
            theirs.close()
        assert process.pid is not None
        child = _Child(process, ours)
        with contextlib.suppress(psutil.NoSuchProcess):
            child.handle = psutil.Process(process.pid)
        self._children[name] = child
        self._loop.on_fd(ours.fileno(), lambda: self._read(name, READS_AT_ONCE))
        self._loop.on_fd(process.sentinel, lambda: self._reap(name))
        return process.pid

    # ------------------------------------------------------------------ talk

    def send(self, name: str, data: bytes) -> bool:
        """False when the process has not read for so long that its pipe is full. One that has ended, or is
        being ended, needs no message any more: its exit says the rest."""
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

    def _hang_up(self, child: _Child) -> None:
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
        # The store may answer before the thread that starts it has learnt its pid.
        assert self._launcher is not None
        self._launcher.join()
        try:
            store.handle = psutil.Process(store.process.pid)
        except psutil.NoSuchProcess:
            self._lose_store()
            return
        self._loop.on_fd(store.process.sentinel, self._lose_store)
        self._on_store(port)

    # ------------------------------------------------------------------ end

    def kill(self, name: str) -> None:
        """The stop ladder of one process; `on_exit` follows."""
        child = self._children.get(name)
        if child is None or child.killed:
            return
        child.killed = True
        self._read(name)
        self._hang_up(child)
        child.signal(signal.SIGTERM)
        self._loop.call_later(self._grace_s, lambda: child.signal(signal.SIGKILL))

    def _reap(self, name: str) -> None:
        """A process has exited: its last messages, then its exit."""
        child = self._children[name]
        told = _readable_bytes(child.process.sentinel) > 0
        code = child.process.exitcode
        if code is None:
            return
        self._read(name)
        self._hang_up(child)
        self._loop.remove_fd(child.process.sentinel)
        if not told:
            # The forkserver, which alone hears of a child's exit, has died; the child may have not.
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
        if store is None:
            return
        if self._launcher is not None:
            self._launcher.join()
        self._hang_up(store)
        if store.process.pid is None:
            return
        if store.handle is not None:
            self._loop.remove_fd(store.process.sentinel)
        # The store has no state that anybody needs after its node's replicas.
        store.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            store.process.kill()
        store.process.join(self._grace_s)
        if store.process.exitcode is not None:
            store.process.close()

    def end_children(self, timeout_s: float) -> None:
        """The ladder for all, waited for at most `timeout_s`."""
        for name in list(self._children):
            self.kill(name)
        self._loop.run_until(lambda: not self._children, timeout_s)

    def close(self) -> None:
        """End store, forkserver and resource tracker, after `end_children`. Nothing is left when it
        returns, unless the system could not kill a process."""
        self._closing = True
        if self._launcher is not None and self._store is not None and self._store.handle is None:
            # Torch may be still importing: end the forkserver under the waiting thread.
            while self._launcher.is_alive():
                _kill_forkserver()
                self._launcher.join(0.01)
        self._end_store()
        _kill_forkserver()
        _server._stop()
        _tracker._stop()


# multiprocessing ends forkserver and resource tracker only some time after the exit of the process that
# started them; their own test-suite methods end them now.
_server: Any = forkserver._forkserver
_tracker: Any = resource_tracker._resource_tracker


def _forkserver_lives() -> bool:
    pid = _server._forkserver_pid
    if pid is None:
        return False
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _readable_bytes(fd: int) -> int:
    """0 at the end of a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def _kill_forkserver() -> None:
    if _server._forkserver_pid is not None:
        os.kill(_server._forkserver_pid, signal.SIGKILL)
