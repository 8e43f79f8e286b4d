"""What a command has started, found by its environment, and what it has left."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import psutil

MARK = "MARK_OF_A_TEST"
END_S = 5.0
"""So long what has lost its parents may take to notice it."""
PROBE_BYTES = 4


@contextmanager
def nothing_left(**own: str) -> Iterator[dict[str, str]]:
    """An environment, with `own` in it, for commands that have to end everything which they start and to
    leave no files in their temporary folder."""
    # Short, as the addresses of sockets in it have to be.
    with TemporaryDirectory(prefix="t-") as folder:
        environment = os.environ | {MARK: uuid.uuid4().hex, "OMP_NUM_THREADS": "1", "TMPDIR": folder} | own
        yield environment
        left = survivors(environment)
        for process in left:
            process.kill()
        assert not left
        # torch makes an empty folder for a compiler that nobody uses; a process that is killed as it starts
        # may leave the file by which `tempfile` finds out whether it can write here.
        for entry in os.scandir(folder):
            assert entry.name == "torchinductor_root" or (
                entry.is_file() and entry.stat().st_size <= PROBE_BYTES
            ), entry


def survivors(environment: dict[str, str]) -> list[psutil.Process]:
    """Those that do not end by themselves."""
    _, alive = psutil.wait_procs(processes(environment), timeout=END_S)
    return list(alive)


def processes(environment: dict[str, str]) -> list[psutil.Process]:
    """Those that were started with this environment, and their offspring."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == environment[MARK]:
                found.append(process)
        except psutil.Error:
            continue
    return found
