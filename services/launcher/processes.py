"""Processes that a command starts: how they are started, and the one way to stop them.

The ladder has three rungs, each with its share of the time: ask, SIGTERM, SIGKILL. All of `STOP_TIMES`
together is under 4 s, because honcho kills its processes 5 s after the first of them has ended.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import psutil

from common.lifecycle import delayed_signals

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class StopTimes(NamedTuple):
    """Seconds that processes have for each rung; what a rung leaves of its time goes to the next one."""

    ask_s: float
    terminate_s: float
    kill_s: float


STOP_TIMES = StopTimes(ask_s=3.2, terminate_s=0.4, kill_s=0.3)
KILL_TIMES = StopTimes(ask_s=0.0, terminate_s=0.0, kill_s=2.0)
"""For processes that have nothing to save."""


def stop_processes(
    living: Callable[[], Sequence[psutil.Process]],
    ask: Callable[[float], object] | None = None,
    times: StopTimes = STOP_TIMES,
) -> tuple[str, ...]:
    """Stop all processes that `living` returns. Returns pid and command line of each that had to be killed.

    `ask(timeout_s)` asks them to stop and waits. Those that are left get SIGTERM, and at last SIGKILL.
    `living` is called for each rung, so it also finds processes that one of them has just started. An
    interrupt, such as a second Ctrl-C, ends the waiting: then the rest is killed at once.
    """
    kill_at_s = time.monotonic() + times.ask_s + times.terminate_s
    try:
        if ask is not None:
            ask(times.ask_s)
        if times.terminate_s:
            left = living()
            for process in left:
                with suppress(psutil.Error):
                    process.terminate()
            psutil.wait_procs(left, timeout=max(kill_at_s - time.monotonic(), 0.0))
    finally:
        killed = _kill(living, times.kill_s)
    return killed


def _kill(living: Callable[[], Sequence[psutil.Process]], timeout_s: float) -> tuple[str, ...]:
    deadline_s = time.monotonic() + timeout_s
    names: dict[psutil.Process, str] = {}
    while left := living():
        for process in left:
            with suppress(psutil.Error):
                name = f"{process.pid} {shlex.join(process.cmdline())}"
                process.kill()
                names.setdefault(process, name)
        psutil.wait_procs(left, timeout=timeout_s)
        if time.monotonic() > deadline_s:
            break
    return tuple(names.values())


def start_python(*arguments: str, environment: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
    """Start `python ARGUMENTS`; `options` are those of Popen. It has a session of its own: the Ctrl-C of a
    terminal reaches only the command, which stops what it has started."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=dict(environment),
        text=True,
        start_new_session=True,
        **options,
    )


@contextmanager
def running_python(
    *arguments: str, environment: Mapping[str, str], **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """`start_python` as a context: the process and its descendants have ended when the block is left."""
    process: subprocess.Popen[str] | None = None
    try:
        with delayed_signals():
            process = start_python(*arguments, environment=environment, **options)
        yield process
    finally:
        if process is not None:
            stop_started([process])


def stop_started(
    processes: Sequence[subprocess.Popen[str]], ask: Callable[[float], object] | None = None
) -> None:
    """Stop processes that this one has started, with their descendants, and close their pipes.

    `ask(timeout_s)` asks them to stop and waits; without it each gets SIGTERM, so that it can stop its
    descendants itself."""

    def terminate(timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for process in processes:
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline_s - time.monotonic(), 0.0))

    running = [process for process in processes if process.poll() is None]
    try:
        if running:
            stop_processes(family_of([process.pid for process in running]), ask or terminate)
    finally:
        for process in processes:
            process.poll()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def processes_with(variable: str, *values: str) -> list[psutil.Process]:
    """All other living processes in whose environment the variable has one of these values."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, is a zombie, or belongs to another user
            if process.environ().get(variable) in values and process.pid != os.getpid():
                found.append(process)
    return found


def family_of(pids: Iterable[int]) -> Callable[[], list[psutil.Process]]:
    """A function that returns the living ones of these processes and of their descendants. It also finds a
    descendant whose parent has ended, if an earlier call has seen it."""
    seen: set[psutil.Process] = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            seen.add(psutil.Process(pid))

    def living() -> list[psutil.Process]:
        for member in list(seen):
            with suppress(psutil.NoSuchProcess):
                seen.update(member.children(recursive=True))
        return [member for member in seen if _is_alive(member)]

    living()
    return living


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
