"""Training state on disk: atomic, digested, two generations, and never silently ignored.

A checkpoint is one file: a line that says what it is, the SHA-256 of the rest, and the rest. It is
written under another name, forced to disk and renamed, so that a name never stands for half a file. The two
newest are kept. A file that cannot be used is renamed to `broken-...`: neither tried nor counted again.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"coadapt checkpoint 1\n"
DIGEST_CHARS = 64
UNFINISHED = "saving"
"""Name of a checkpoint that is being written: always the same, so that killed processes leave one at most."""
KEPT = 2
LOCK_TIMEOUT_S = 5.0
"""So long one who saves may keep others from it; one who was stopped meanwhile would do so for ever."""


class CheckpointError(Exception):
    """A checkpoint cannot be used, or not be saved; the text says why."""


@dataclass(frozen=True)
class Saved:
    path: Path
    digest: str
    size_bytes: int
    save_s: float


def save(folder: Path, steps: int, payload: bytes) -> Saved:
    """Write the state after `steps` steps; older ones but the last are removed. Raises OSError, and then
    everything is as before."""
    start_s = time.monotonic()
    path = folder / f"checkpoint-{steps:010d}"
    digest = hashlib.sha256(payload).hexdigest()
    # Two ranks of a broken group may save at the same time.
    with _locked(folder / "saving.lock"):
        temporary = folder / UNFINISHED
        try:
            with temporary.open("wb") as file:
                file.write(MAGIC + digest.encode() + b"\n" + payload)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(folder)
        for old in [p for p in saved_in(folder) if p != path][KEPT - 1 :]:
            old.unlink(missing_ok=True)
    return Saved(path, digest, path.stat().st_size, time.monotonic() - start_s)


def read(path: Path) -> bytes:
    """The payload. Raises CheckpointError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from error
    start = len(MAGIC) + DIGEST_CHARS + 1
    if not data.startswith(MAGIC) or len(data) < start:
        raise CheckpointError("is not a checkpoint, or the start of one")
    digest = data[len(MAGIC) : start - 1].decode("ascii", "replace")
    payload = data[start:]
    if hashlib.sha256(payload).hexdigest() != digest:
        raise CheckpointError(f"is damaged: its {len(payload)} bytes do not have the digest that it names")
    return payload


def saved_in(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("checkpoint-*"), reverse=True)


def load_newest(
    folder: Path, named: str, load: Callable[[bytes], None], on_fallback: Callable[[str, str, str], None]
) -> Path | None:
    """Give the newest checkpoint that can be used to `load`; None when there is none.

    `named` is the one that somebody promised would be there, or "". For each one that is passed over
    `on_fallback(path, tried next or "" for from the start, reason)` is called. `load` may raise
    CheckpointError.
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
    """Held by every replica that has a job's state in memory, so that whoever has none and means to read
    the disk knows whether somebody is still about to save. The system releases it when a process dies."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "state.lock", os.O_RDWR | os.O_CREAT, 0o644)

    def try_alone(self) -> bool:
        """Whether nobody else has state; then it is held alone until `try_share`."""
        return self._try(fcntl.LOCK_EX)

    def try_share(self) -> bool:
        """Whether nobody holds it alone; then this replica is one of those that hold it."""
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
    """Leave word of how far training has come, for those who resume from less. Costs no fsync: the loss
    that it measures is that of processes, not of machines. A few bytes in place, which a full disk takes
    too; what it does not take is left out."""
    with contextlib.suppress(OSError):
        fd = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(fd, f"{progress:<24.17g}".encode(), 0)
        finally:
            os.close(fd)


def noted_progress(folder: Path) -> float:
    try:
        return float((folder / "progress").read_text())
    except (OSError, ValueError):
        return 0.0


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises OSError when somebody else holds the lock for LOCK_TIMEOUT_S."""
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
