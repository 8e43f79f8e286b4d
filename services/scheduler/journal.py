"""The scheduler's journal: every input of its core, on disk before it is acted on.

A restarted scheduler replays it, a test gets a live run's decisions again from it, and a user can ask what
another policy would have decided. The file is a sequence of msgpack objects, one `JournalEntry` each.
"""

import fcntl
from collections.abc import Iterator
from pathlib import Path

import msgpack
import msgspec

from common.lifecycle import UserError
from common.protocol import CoreInput, JournalEntry

JOURNAL_FILE = "journal.msgpack"


class JournalError(UserError):
    """The journal cannot be written or replayed; the text says where and why."""


class JournalWriter:
    """Appends entries; each is given to the operating system before `append` returns, so that it survives
    the process. It is not forced to the disk: surviving the machine is not promised.

    A half-written last entry, left by a full disk or a power cut, is cut off first. Raises JournalError where
    another scheduler writes the file, where it is damaged, and where it cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / JOURNAL_FILE
        try:
            self._file = self.path.open("ab", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = _whole_bytes(self.path)
            self._file.truncate(self._end)
        except BlockingIOError as error:
            self._file.close()
            raise JournalError(f"{self.path}: another scheduler goes on with this run") from error
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be written: {error.strerror}") from error

    def append(self, now_s: float, given: CoreInput, events: int) -> None:
        """`events`: how many the scheduler has published in this run so far. The file is as it was where
        this raises."""
        data = msgspec.msgpack.encode(JournalEntry(now_s=now_s, input=given, events=events))
        try:
            problem = "" if self._file.write(data) == len(data) else "no space left"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            self._file.truncate(self._end)
            raise JournalError(f"{self.path}: cannot be written: {problem}")
        self._end += len(data)

    def close(self) -> None:
        self._file.close()


def read_journal(run_dir: Path) -> Iterator[JournalEntry]:
    """The entries in order. A half-written last one was never acted on and is left out.

    Raises JournalError where an entry is not one of ours."""
    path = run_dir / JOURNAL_FILE
    entries = 0
    with path.open("rb") as file:
        try:
            for tree in msgpack.Unpacker(file):
                yield msgspec.convert(tree, JournalEntry)
                entries += 1
        except (ValueError, msgspec.MsgspecError, msgpack.UnpackException) as error:
            raise _damaged(path, entries + 1, error) from error


def _whole_bytes(path: Path) -> int:
    """Where the last whole entry ends."""
    entries = end = 0
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file)
        try:
            while True:
                unpacker.skip()
                end = unpacker.tell()
                entries += 1
        except msgpack.OutOfData:
            return end
        except (ValueError, msgpack.UnpackException) as error:
            raise _damaged(path, entries + 1, error) from error


def _damaged(path: Path, entry: int, error: Exception) -> JournalError:
    return JournalError(f"{path}: entry {entry} is damaged: {str(error) or type(error).__name__}")
