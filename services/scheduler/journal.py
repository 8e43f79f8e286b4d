"""The scheduler's journal: every input of its core, on disk before it is acted on.

A restarted scheduler replays it, a test gets a live run's decisions again from it, and a user can ask what
another policy would have decided. The file is a sequence of msgpack objects, one `JournalEntry` each.
"""

from collections.abc import Iterator
from pathlib import Path

import msgpack
import msgspec

from common.lifecycle import UserError
from common.protocol import CoreInput, JournalEntry

JOURNAL_FILE = "journal.msgpack"


class JournalError(UserError):
    """The journal cannot be replayed; the text says where it breaks."""


class JournalWriter:
    """Appends entries; each is given to the operating system before `append` returns, so that it survives
    the process. It is not forced to the disk: surviving the machine is not promised."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / JOURNAL_FILE).open("ab", buffering=0)

    def append(self, now_s: float, given: CoreInput) -> None:
        self._file.write(msgspec.msgpack.encode(JournalEntry(now_s=now_s, input=given)))

    def close(self) -> None:
        self._file.close()


def read_journal(run_dir: Path) -> Iterator[JournalEntry]:
    """The entries in order. A half-written last one was never acted on and is left out.

    Raises JournalError where an entry is not one of ours."""
    path = run_dir / JOURNAL_FILE
    with path.open("rb") as file:
        for number, tree in enumerate(msgpack.Unpacker(file, raw=False), start=1):
            try:
                yield msgspec.convert(tree, JournalEntry)
            except msgspec.ValidationError as error:
                raise JournalError(f"{path}: entry {number}: {error}") from error
