"""Where simulated runs are written: claimed by one command, drafted out of sight, complete when visible."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from common.eventlog import EventLogError, EventLogWriter
from common.lifecycle import EXIT_FAILED, UserError
from services.simulator.event_recorder import Log

LOCK_FILE = ".simulate.lock"
"""In a folder of runs. Each run that is being written there locks one byte of it."""


class LogWriteError(UserError):
    """The log of a run could not be written during the simulation: the user's input was valid."""

    exit_code = EXIT_FAILED


@contextmanager
def claimed(out: Path | None, run_ids: Sequence[str]) -> Iterator[None]:
    """Within the block only this process may write the runs of these names in `out`. At the end the drafts of
    incomplete runs are removed, and at the start those that a killed process left behind.

    Raises UserError if a run is already there, or if another process has claimed it."""
    if out is None:
        yield
        return
    with ExitStack() as claims:
        try:
            out.mkdir(parents=True, exist_ok=True)
            # The system releases the locks of a process however it ends: no claim outlives its owner.
            lock = claims.enter_context((out / LOCK_FILE).open("wb"))
            for run_id in sorted(run_ids):  # in one order, so that two commands cannot block each other
                byte = int.from_bytes(hashlib.blake2b(run_id.encode(), digest_size=7).digest())
                try:
                    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                except BlockingIOError as error:
                    raise UserError(f"--out {out}: {run_id} is being written by another command") from error
                if os.path.lexists(out / run_id):
                    raise UserError(f"--out {out}: {run_id} is there already")
                remove = partial(shutil.rmtree, _drafts(out, run_id), ignore_errors=True)
                remove()
                claims.callback(remove)
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error
        yield


@contextmanager
def open_log(out: Path | None, run_id: str) -> Iterator[Log | None]:
    """A log that writes the run `run_id` in `out`; None without `out`. The run's folder appears at the end of
    the block, when its log is complete. Raises LogWriteError."""
    if out is None:
        yield None
        return
    # Each process has its own draft: one that outlives a killed command cannot touch the next command's.
    draft = _drafts(out, run_id) / str(os.getpid())
    try:
        writer = EventLogWriter(draft)
        try:
            yield writer.append
        finally:
            writer.close()
        draft.rename(out / run_id)
    except OSError as error:
        raise LogWriteError(f"--out {out}: cannot be written: {error.strerror}") from error
    except EventLogError as error:
        raise LogWriteError(f"--out {out}: {error}") from error


def _drafts(out: Path, run_id: str) -> Path:
    """Where a run is written until it is complete: a hidden folder, which `summarize` does not read."""
    return out / f".{run_id}"
