"""Processes that a benchmark starts, and that have ended when it ends, however it ends."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil

from common.lifecycle import delayed_signals

STOP_S = 5.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@contextmanager
def python(
    *arguments: str, environment: Mapping[str, str], **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """`python ARGUMENTS` while the block lasts; `options` are those of Popen.

    At its end the process, where it still runs, is asked to stop; what is left of it and its descendants
    after STOP_S is killed. A terminal's Ctrl-C does not reach it: it is for the benchmark, which ends it.
    """
    process: subprocess.Popen[str] | None = None
    try:
        with delayed_signals():
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=dict(environment),
                text=True,
                start_new_session=True,
                **options,
            )
        yield process
    finally:
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    family = _family(process.pid) if process.poll() is None else []
    try:
        process.terminate()
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also where a second Ctrl-C ended the waiting
        for member in family:
            if member.is_running():
                member.kill()
        psutil.wait_procs(family, timeout=STOP_S)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
