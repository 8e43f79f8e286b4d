"""The event log, events.jsonl: one EventRecord per line, as JSON. The events of each source are in order.

Floats that JSON cannot express are written as the strings "nan", "inf" and "-inf".
"""

import fcntl
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from common.codec import printable
from common.protocol import EVENT_SCHEMA, EventRecord, JobSubmitted

EVENTS_FILE = "events.jsonl"
READABLE_SCHEMAS = (1, EVENT_SCHEMA)
MAX_HELD = 5_000
"""If an event is missing, at most this many later ones of its source wait in memory; the publisher repeats
the rest."""

Source = tuple[str, str]
"""(source, incarnation). Each numbers its events from 1."""


class EventLogError(Exception):
    """An event log cannot be read or written. `line_number` counts from 1; 0 means the whole file."""

    def __init__(self, path: Path, line_number: int, text: str) -> None:
        place = f"{path}:{line_number}" if line_number else str(path)
        super().__init__(f"{place}: {printable(text)}")
        self.path = path
        self.line_number = line_number
        self.text = text


class SequenceNumbers:
    """The event numbers seen of one source, kept as ranges: memory grows with the gaps, not with the
    events."""

    def __init__(self) -> None:
        self.contiguous = 0
        """All numbers from 1 to this one have been seen."""
        self._ranges: list[list[int]] = []

    def add(self, seq: int) -> bool:
        """Add a number; False if it has been seen before."""
        if seq <= self.contiguous:
            return False
        if seq == self.contiguous + 1:
            self.contiguous = seq
            if self._ranges and self._ranges[0][0] == seq + 1:
                self.contiguous = self._ranges.pop(0)[1]
            return True
        at = len(self._ranges)
        while at and self._ranges[at - 1][0] > seq:
            at -= 1
        if at and self._ranges[at - 1][1] >= seq:
            return False
        touches_left = at > 0 and self._ranges[at - 1][1] == seq - 1
        touches_right = at < len(self._ranges) and self._ranges[at][0] == seq + 1
        if touches_left and touches_right:
            self._ranges[at - 1][1] = self._ranges.pop(at)[1]
        elif touches_left:
            self._ranges[at - 1][1] = seq
        elif touches_right:
            self._ranges[at][0] = seq
        else:
            self._ranges.insert(at, [seq, seq])
        return True

    def skip_to(self, seq: int) -> None:
        """Treat every number before `seq` as seen."""
        self._ranges = [r for r in self._ranges if r[1] >= seq]
        first = self._ranges[0][0] if self._ranges else seq
        self.contiguous = self._ranges.pop(0)[1] if self._ranges and first <= seq else seq - 1

    def __contains__(self, seq: int) -> bool:
        return 0 < seq <= self.contiguous or any(first <= seq <= last for first, last in self._ranges)

    def missing(self) -> list[tuple[int, int]]:
        """The gaps below the largest number seen, as ranges (first, last) in order."""
        gaps = []
        last = self.contiguous
        for first, end in self._ranges:
            gaps.append((last + 1, first - 1))
            last = end
        return gaps


def find_gaps(records: Iterable[EventRecord]) -> dict[Source, list[tuple[int, int]]]:
    """The missing event numbers of each source that has any, as ranges (first, last)."""
    seen: dict[Source, SequenceNumbers] = {}
    for record in records:
        seen.setdefault((record.source, record.incarnation), SequenceNumbers()).add(record.seq)
    return {source: numbers.missing() for source, numbers in seen.items() if numbers.missing()}


# --------------------------------------------------------------------------- one line


def encode_line(record: EventRecord) -> bytes:
    """One line of the log, with its newline."""
    line = msgspec.json.encode(record)
    if b"null" in line:
        line = msgspec.json.encode(_spell_floats(msgspec.to_builtins(record)))
    return line + b"\n"


def decode_line(line: bytes) -> EventRecord:
    """The record in one line. Raises ValueError with a text for people.

    A number may be spelled as a string, as NaN and infinities are, and an integer as a float without a
    fraction: another program may have rewritten the line, and the value is the same.
    """
    try:
        record = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        old_record = _decode_schema_1(line)
        if old_record is None:
            raise ValueError(_explain(line, str(error))) from error
        record = old_record
    if record.schema not in READABLE_SCHEMAS:
        raise ValueError(_explain(line, "schema"))
    return record


def decode_lines(lines: Iterable[bytes]) -> list[EventRecord]:
    """`decode_line` for lines that are all well-formed and of a readable schema, but faster. Raises
    ValueError without a text if one line is not; `decode_line` says why."""
    decode = _decoder.decode
    try:
        records = [decode(line) for line in lines]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError from error
    if not {record.schema for record in records} <= set(READABLE_SCHEMAS):
        raise ValueError
    return records


def _decode_schema_1(line: bytes) -> EventRecord | None:
    """The record in a line that only schema 1 allows; None for any other line.

    Schema 1 had `accumulates_alone` in the specification of a job; schema 2 has it in JobSubmitted.
    """
    try:
        tree = msgspec.json.decode(line)
        event = tree["event"]
        if tree["schema"] != 1 or event["type"] != JobSubmitted.__name__:
            return None
        event["accumulates_alone"] = event["spec"].pop("accumulates_alone", False)
        return msgspec.convert(tree, EventRecord, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        return None


_decoder = msgspec.json.Decoder(EventRecord, strict=False)


def _spell_floats(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _spell_floats(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spell_floats(item) for item in value]
    return value


def _explain(line: bytes, problem: str) -> str:
    """Why a line is not an event, for people; `problem` is the decoder's own explanation."""
    try:
        tree = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(tree, dict) or not {"run_id", "source", "seq", "event"} <= tree.keys():
        return "not an event of coadapt"
    schema = tree.get("schema")
    if schema not in READABLE_SCHEMAS:
        allowed = " and ".join(map(str, READABLE_SCHEMAS))
        return f"written with schema {schema!r}; this version reads {allowed}"
    return f"not a valid event: {problem}"


# --------------------------------------------------------------------------- read


def read_events(path: Path | str) -> Iterator[EventRecord]:
    """The records of a log, in the order of the file.

    Raises EventLogError at the first line that is damaged, cut short, of an unknown schema, or not an event
    of coadapt, and for a file that is empty or cannot be read.
    """
    path = Path(path)
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    raise EventLogError(path, number, "cut short: the last line does not end in a newline")
                try:
                    record = decode_line(line)
                except ValueError as error:
                    raise EventLogError(path, number, str(error)) from error
                yield record
    except OSError as error:
        raise EventLogError(path, 0, f"cannot be read: {error.strerror}") from error
    if number == 0:
        raise EventLogError(path, 1, "empty: it contains no event")


# --------------------------------------------------------------------------- write


class _Position(msgspec.Struct):
    """The fields of a line that recovery needs."""

    source: str
    incarnation: str
    seq: int


class EventLogWriter:
    """Appends to `run_dir`/events.jsonl. A new writer, after a crash, continues at the end of the file.

    The events of each source are written in the order of their numbers: an event that arrives early waits in
    memory for the missing ones. Each number is written once, however often it arrives.

    An acknowledged event has been handed to the operating system (`write`), so it survives the death of every
    process, SIGKILL included. The writer does not wait for `fsync`, which takes milliseconds. Against a power
    failure there is `sync()`, which the logger calls once a second and when it stops.

    Raises EventLogError if another writer has the file open or the folder cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / EVENTS_FILE
        self._numbers: dict[Source, SequenceNumbers] = {}
        self._held: dict[Source, dict[int, EventRecord]] = {}
        self._dirty = False
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise EventLogError(self.path, 0, f"cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise EventLogError(self.path, 0, "another logger is writing it") from error
        self._size_bytes = self._recover()

    def append(self, records: Iterable[EventRecord]) -> int:
        """Write all new records that do not have to wait for a missing one; returns how many.

        Raises OSError (disk full) and leaves the file as it was. The next call tries the same records again;
        they are not acknowledged before.
        """
        for record in records:
            source = (record.source, record.incarnation)
            numbers = self._numbers.setdefault(source, SequenceNumbers())
            if numbers.contiguous < record.seq <= numbers.contiguous + MAX_HELD and record.seq not in numbers:
                self._held.setdefault(source, {}).setdefault(record.seq, record)
        ready = [record for source in self._held for record in self._next_in_order(source)]
        self._write(ready)
        return len(ready)

    def acknowledged(self, source: str, incarnation: str) -> int:
        """All events of the source up to this number have been handed to the operating system."""
        numbers = self._numbers.get((source, incarnation))
        return numbers.contiguous if numbers else 0

    def give_up(self, source: str, incarnation: str, first_seq: int) -> tuple[int, int] | None:
        """Stop waiting for the numbers before `first_seq`, which no process has any more. Returns the range
        (first, last) that is lost, if any."""
        numbers = self._numbers.setdefault((source, incarnation), SequenceNumbers())
        last = numbers.contiguous
        if first_seq <= last + 1:
            return None
        numbers.skip_to(first_seq)
        return last + 1, first_seq - 1

    def write_held(self) -> dict[Source, list[tuple[int, int]]]:
        """At the end: write the records that still wait. Returns the missing ranges (first, last) of each
        source.

        Missing events are not acknowledged: their publisher may still send them to the next writer."""
        sources = [source for source, held in self._held.items() if held]
        self._write([record for source in sources for _, record in sorted(self._held[source].items())])
        return {source: self._numbers[source].missing() for source in sources}

    def sync(self) -> None:
        """Make the operating system put everything written on disk."""
        if self._dirty:
            os.fdatasync(self._fd)
            self._dirty = False

    def close(self) -> None:
        self.sync()
        os.close(self._fd)

    def _next_in_order(self, source: Source) -> Iterator[EventRecord]:
        held = self._held[source]
        seq = self._numbers[source].contiguous + 1
        while seq in held:
            yield held[seq]
            seq += 1

    def _write(self, records: list[EventRecord]) -> None:
        if not records:
            return
        lines = memoryview(b"".join(encode_line(record) for record in records))
        written = 0
        try:
            while written < len(lines):
                written += os.write(self._fd, lines[written:])
        except OSError:
            os.ftruncate(self._fd, self._size_bytes)
            raise
        self._size_bytes += written
        self._dirty = True
        for record in records:
            source = (record.source, record.incarnation)
            self._numbers[source].add(record.seq)
            del self._held[source][record.seq]

    def _recover(self) -> int:
        """Read from the file which numbers it has and cut off a half-written last line; returns its size in
        bytes.

        Damaged lines stay as they are, for readers to report."""
        size_bytes = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    os.ftruncate(self._fd, size_bytes)
                    break
                size_bytes += len(line)
                try:
                    position = _position_decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue
                source = (position.source, position.incarnation)
                self._numbers.setdefault(source, SequenceNumbers()).add(position.seq)
        return size_bytes


_position_decoder = msgspec.json.Decoder(_Position)
