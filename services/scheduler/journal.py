"""The scheduler's journal: every input of its core, written before the core handles it.

A restarted scheduler replays it. Tests replay it to reproduce the decisions of a live run, and users to see
what another policy would have decided. The file is a sequence of msgpack objects, one `JournalEntry` each.
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
    """The journal cannot be written or replayed; the text names the file and the problem."""


class JournalWriter:
    """Appends entries. Each one is handed to the operating system before `append` returns, so it survives the
    end of the process. It is not forced to the disk, so it may not survive a crash of the machine.

    First cuts off a half-written last entry, as a full disk or a power cut leaves it. Raises JournalError if
    another scheduler writes the file, if it is damaged, and if it cannot be written.
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
            raise JournalError(
                f"{self.path}: another scheduler is running this run; stop it, or choose another run.run_id"
            ) from error
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be written: {error.strerror}") from error

    def append(self, now_s: float, given: CoreInput, events: int) -> None:
        """`events`: the number of events published in this run so far. If this raises, the file is
        unchanged."""
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
    """The entries in order. A half-written last one was never handled and is left out.

    Raises JournalError if an entry is damaged."""
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
    """Number of bytes up to the end of the last complete entry."""
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
