"""Checkpoints: training state on disk, written atomically and protected by a digest.

A checkpoint is one file: a line that identifies the format, the SHA-256 digest of the payload, and the
payload. It is written under another name, forced to disk and renamed, so a file with the final name is always
complete. The two newest are kept. A file that cannot be used is reported and renamed to `broken-...`, so that
it is neither tried nor counted again.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.atomic_write import write_atomically

MAGIC = b"coadapt checkpoint 1\n"
DIGEST_CHARS = 64
UNFINISHED = "saving"
"""Name of a checkpoint that is being written. It is always the same, so killed processes leave at most
one."""
KEPT = 2
LOCK_TIMEOUT_S = 5.0
"""How long a replica waits for another one that is saving, since that one may have been stopped."""


class CheckpointError(Exception):
    """A checkpoint cannot be used or cannot be saved; the text says why."""


@dataclass(frozen=True)
class SavedCheckpoint:
    path: Path
    digest: str
    size_bytes: int
    save_s: float


def save(folder: Path, steps: int, payload: bytes) -> SavedCheckpoint:
    """Write the state after `steps` steps and remove all but the newest KEPT checkpoints. Raises OSError, and
    then leaves the folder as it was."""
    start_s = time.monotonic()
    path = folder / f"checkpoint-{steps:010d}"
    digest = hashlib.sha256(payload).hexdigest()
    # Two ranks of a broken group may save at the same time.
    with _locked(folder / "saving.lock"):
        write_atomically(path, MAGIC + digest.encode() + b"\n" + payload, draft=folder / UNFINISHED)
        _sync_folder(folder)
        for old in [p for p in saved_in(folder) if p != path][KEPT - 1 :]:
            old.unlink(missing_ok=True)
    return SavedCheckpoint(path, digest, path.stat().st_size, time.monotonic() - start_s)


def read(path: Path) -> bytes:
    """The payload of a checkpoint. Raises CheckpointError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from error
    start = len(MAGIC) + DIGEST_CHARS + 1
    if not data.startswith(MAGIC) or len(data) < start:
        raise CheckpointError("is not a checkpoint, or only the beginning of one")
    digest = data[len(MAGIC) : start - 1].decode("ascii", "replace")
    payload = data[start:]
    if hashlib.sha256(payload).hexdigest() != digest:
        raise CheckpointError(f"is damaged: its {len(payload)} bytes do not match its digest")
    return payload


def saved_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    return sorted(folder.glob("checkpoint-*"), reverse=True)


def load_newest(
    folder: Path, named: str, load: Callable[[bytes], None], on_fallback: Callable[[str, str, str], None]
) -> Path | None:
    """Pass the payload of the newest usable checkpoint to `load` and return its path; None if there is none.

    `named` is a checkpoint that should exist although it may be in another folder, or "". `load` may raise
    CheckpointError. For each checkpoint that cannot be used, `on_fallback(path, fallback, reason)` is called;
    `fallback` is the one tried next, or "" for none.
    """
    found = {*saved_in(folder), *([Path(named)] if named else [])}
    candidates = sorted(found, key=lambda path: path.name, reverse=True)
    for path, following in zip(candidates, [*candidates[1:], None], strict=False):
        try:
            load(read(path))
        except CheckpointError as error:
            on_fallback(str(path), str(following or ""), str(error))
            with contextlib.suppress(OSError):
                path.rename(path.with_name(f"broken-{path.name}"))
        else:
            return path
    return None


class StateLock:
    """A file lock that every replica with the job's state in memory holds as a shared lock.

    A replica that wants to read the state from disk takes it exclusively, and so knows that no other replica
    can still be about to save. The system releases the lock when a process dies.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "state.lock", os.O_RDWR | os.O_CREAT, 0o644)

    def try_alone(self) -> bool:
        """Take the lock exclusively; False if another replica has the state. Kept until `try_share`."""
        return self._try(fcntl.LOCK_EX)

    def try_share(self) -> bool:
        """Take the lock as one of several; False if another replica holds it exclusively."""
        return self._try(fcntl.LOCK_SH)

    def release(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _try(self, how: int) -> bool:
        try:
            fcntl.flock(self._fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def note_progress(folder: Path, progress: float) -> None:
    """Record how far training has come, so that a group that resumes from less can report the loss.

    No fsync: it measures what is lost with processes, not with machines. The bytes are overwritten in place,
    which works on a full disk too; if the disk refuses them, the record is skipped.
    """
    with contextlib.suppress(OSError):
        fd = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(fd, f"{progress:<24.17g}".encode(), 0)
        finally:
            os.close(fd)


def noted_progress(folder: Path) -> float:
    """The progress last recorded by `note_progress`; 0 if there is none."""
    try:
        return float((folder / "progress").read_text())
    except (OSError, ValueError):
        return 0.0


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises OSError when another process holds the lock for LOCK_TIMEOUT_S."""
    end_s = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.01)
        yield


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
