"""The outbox: a publisher keeps its events in a file until the logger has acknowledged them.

So no event is lost when the publisher is killed. The file is
logs/<run_id>/outbox/<source>-<incarnation>.msgpack and holds encoded EventRecords one after another;
acknowledged ones are cut off from time to time. Its owner holds a lock on it, which the kernel releases
however the owner dies. A file without a lock is left over: the next publisher of that source, or the logger,
takes it over. If both send its events, the logger recognises the numbers and writes each event once.
"""

import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgpack

from common.codec import convert, decode, encode
from common.config import LimitsConfig
from common.lifecycle import Timer, Timers, UserError, get_logger
from common.protocol import (
    Acknowledged,
    Event,
    EventRecord,
    GetAcknowledged,
    GoodBye,
    RepairEvents,
    Reply,
    Request,
)

SUFFIX = ".msgpack"
COMPACT_BYTES = 1_000_000
"""Cut the head of the file off once it has this many acknowledged bytes."""
REPAIR_BYTES = 250_000
"""Size of the records in one RepairEvents, which has at least one record."""
ASK_S = 1.0
"""Time between two questions to the logger while events are unacknowledged."""
FIRST_ASK_S = 0.1
"""The first such time; it doubles with each question. A new subscription misses the first events."""

log = get_logger()


class Origin(NamedTuple):
    """One process in one run. It numbers its events from 1."""

    run_id: str
    source: str
    incarnation: str


def event_limits(limits: LimitsConfig) -> LimitsConfig:
    """The limits for event records: a record may contain a whole message and more."""
    return LimitsConfig(message_bytes=4 * limits.message_bytes, depth=limits.depth, map_keys=limits.map_keys)


class Outbox:
    """The unacknowledged records of one origin, oldest first. The records are on disk, their positions in
    memory.

    Records that a full disk refuses stay in memory until they are acknowledged.
    """

    def __init__(self, path: Path, fd: int, origin: Origin | None, limits: LimitsConfig) -> None:
        self.path = path
        self.origin = origin
        """None: the file is empty."""
        self.last_seq = 0
        self._fd = fd
        self._limits = limits
        self._end = 0
        self._on_disk = True
        self._entries: deque[tuple[int, int] | bytes] = deque()
        """For each record its offset and size in the file, or the record itself."""

    @classmethod
    def create(cls, folder: Path, origin: Origin, limits: LimitsConfig) -> "Outbox":
        """Create a new file. Raises UserError if that is not possible."""
        path = folder / f"{origin.source}-{origin.incarnation}{SUFFIX}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return cls(path, _locked_file(path, b""), origin, limits)
        except OSError as error:
            raise UserError(f"{path}: cannot be created: {error.strerror or error}") from error

    @classmethod
    def take_over(cls, path: Path, limits: LimitsConfig) -> "Outbox | None":
        """Open a left-over file; None if its owner lives. A half-written last record is ignored."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if not _lock(fd) or not _is_file_of(fd, path):
            os.close(fd)
            return None
        outbox = cls(path, fd, None, limits)
        outbox._load()
        return outbox

    @property
    def pending(self) -> int:
        """Number of unacknowledged records."""
        return len(self._entries)

    def append(self, record: bytes) -> None:
        """Add the encoded record that has the next number."""
        self.last_seq += 1
        if self._on_disk and self._write(record):
            self._entries.append((self._end, len(record)))
            self._end += len(record)
        else:
            self._entries.append(record)

    def _write(self, record: bytes) -> bool:
        """False if the disk refuses the record. Then later records stay in memory too, until all are
        acknowledged, so that the file has no gap."""
        try:
            problem = "" if os.pwrite(self._fd, record, self._end) == len(record) else "no space left"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            log.error("outbox cannot be written; events stay in memory", path=self.path, error=problem)
        self._on_disk = not problem
        return self._on_disk

    def records(self, up_to_seq: int, max_bytes: int) -> list[EventRecord]:
        """The oldest unacknowledged records up to `up_to_seq`, at most `max_bytes` but at least one if there
        is one."""
        records: list[EventRecord] = []
        size_bytes = 0
        for seq, entry in enumerate(self._entries, start=self.last_seq - self.pending + 1):
            data = entry if isinstance(entry, bytes) else os.pread(self._fd, entry[1], entry[0])
            size_bytes += len(data)
            if seq > up_to_seq or (records and size_bytes > max_bytes):
                break
            records.append(decode(data, EventRecord, self._limits))
        return records

    def acknowledge(self, seq: int) -> None:
        """Remove the records up to this number."""
        while self._entries and self.last_seq - len(self._entries) < seq:
            self._entries.popleft()
        if not self._entries:
            os.ftruncate(self._fd, 0)
            self._end = 0
            self._on_disk = True
            return
        first = next((entry[0] for entry in self._entries if isinstance(entry, tuple)), self._end)
        if first > COMPACT_BYTES and 2 * first > self._end:
            self._cut_head(first)

    def delete(self) -> None:
        """Close the file and remove it."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def release(self) -> None:
        """Close the file and leave its records to the process that takes it over."""
        os.close(self._fd)

    def _cut_head(self, first: int) -> None:
        try:
            fd = _locked_file(self.path, os.pread(self._fd, self._end - first, first))
        except OSError as error:
            log.warning("outbox cannot be shortened", path=self.path, error=error.strerror)
            return
        os.close(self._fd)
        self._fd = fd
        self._end -= first
        self._entries = deque(e if isinstance(e, bytes) else (e[0] - first, e[1]) for e in self._entries)

    def _load(self) -> None:
        """Find the records in the file, up to the first bytes that are not a record (half-written, or
        foreign)."""
        with self.path.open("rb") as file:
            unpacker = msgpack.Unpacker(file, strict_map_key=True)
            try:
                for value in unpacker:
                    record: EventRecord = convert(value, EventRecord)
                    if self.origin is None:
                        self.origin = Origin(record.run_id, record.source, record.incarnation)
                    self._entries.append((self._end, unpacker.tell() - self._end))
                    self._end = unpacker.tell()
                    self.last_seq = record.seq
            except (ValueError, msgpack.UnpackException) as error:
                log.error(
                    "outbox is damaged; the events after the damage are lost",
                    path=self.path,
                    at=self._end,
                    error=str(error),
                )


def left_over(folder: Path, limits: LimitsConfig, prefix: str = "") -> Iterator[Outbox]:
    """Take over every outbox in the folder whose owner is dead. Empty ones are deleted."""
    for path in sorted(folder.glob(f"{prefix}*{SUFFIX}")):
        outbox = Outbox.take_over(path, limits)
        if outbox and outbox.pending:
            yield outbox
        elif outbox:
            outbox.delete()


def living_owners(folder: Path) -> int:
    """How many outboxes in the folder belong to a living publisher on this machine."""
    owners = 0
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        owners += not _lock(fd)
        os.close(fd)
    return owners


def _locked_file(path: Path, content: bytes) -> int:
    """Create a file at `path` that is locked from the moment it appears there; returns its descriptor."""
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        if not _lock(fd):
            raise OSError(f"{temporary} is in use")
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        temporary.rename(path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file_of(fd: int, path: Path) -> bool:
    """False if the file at `path` was replaced or deleted after `fd` was opened."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


# --------------------------------------------------------------------------- delivery


class RequestPoster(Protocol):
    """The part of `RequestClient` that delivery needs."""

    def post(
        self, request: Request, on_reply: Callable[[Reply], None], on_silence: Callable[[], None]
    ) -> None: ...


class Delivery:
    """Makes sure that the logger gets every record: asks which it has, and sends those it lacks again.

    It asks GetAcknowledged about once a second while records are unacknowledged, one question at a time.
    Records that were published before the previous question and are still missing are sent as RepairEvents,
    whose reply is again an acknowledgement. Left-over outboxes of the same source are sent first.
    """

    def __init__(
        self, origin: Origin, folder: Path, poster: RequestPoster, timers: Timers, limits: LimitsConfig
    ) -> None:
        self._poster = poster
        self._timers = timers
        self._limits = limits
        self._own = Outbox.create(folder, origin, limits)
        self._outboxes: list[Outbox] = []
        for outbox in left_over(folder, limits, f"{origin.source}-"):
            if outbox.origin and outbox.origin.source == origin.source:
                self._outboxes.append(outbox)
            else:
                outbox.release()
        self._outboxes.append(self._own)
        self._settled_seq = 0
        self._asked_seq = 0
        self._asking = False
        self._timer: Timer | None = None
        self._flushing = False
        self._ask_s = FIRST_ASK_S
        if self.pending:
            self._plan(self._ask_s)

    @property
    def pending(self) -> int:
        """Unacknowledged records, those of earlier incarnations included."""
        return sum(outbox.pending for outbox in self._outboxes)

    def keep(self, event: Event, t_s: float, wall_s: float) -> bytes:
        """Number and keep an event; returns its encoded record. Raises ValueError, and keeps nothing, if the
        record is larger than the logger accepts."""
        record = EventRecord(
            **self._origin(self._own),
            seq=self._own.last_seq + 1,
            t_s=t_s,
            wall_s=wall_s,
            event=event,
        )
        data = encode(record)
        if len(data) > self._limits.message_bytes // 2:
            raise ValueError(
                f"{type(event).__name__} of {len(data)} bytes is too large; an event may have at most "
                f"{self._limits.message_bytes // 2} bytes"
            )
        self._own.append(data)
        if self._timer is None and not self._asking:
            self._plan(self._ask_s)
        return data

    def flush(self) -> None:
        """From now on ask without delay and send everything that is missing."""
        self._flushing = True
        if not self._asking:
            self._plan(0.0)

    def say_goodbye(self, then: Callable[[], None]) -> None:
        """Tell the logger that this incarnation is finished; `then` is called when it has answered, or does
        not answer."""
        origin = self._origin(self._own)
        self._poster.post(GoodBye(**origin), lambda _reply: then(), then)

    def close(self) -> None:
        """Delete empty outboxes and leave the others to the next publisher or the logger."""
        for outbox in self._outboxes:
            if outbox.pending:
                outbox.release()
            else:
                outbox.delete()

    def _origin(self, outbox: Outbox) -> dict[str, Any]:
        assert outbox.origin is not None
        return outbox.origin._asdict()

    def _plan(self, delay_s: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self._timers.call_later(delay_s, self._ask)

    def _ask(self) -> None:
        self._timer = None
        self._ask_s = min(2 * self._ask_s, ASK_S)
        outbox = next((outbox for outbox in self._outboxes if outbox.pending), None)
        if outbox is None:
            return
        self._settled_seq, self._asked_seq = self._asked_seq, self._own.last_seq
        self._post(GetAcknowledged(**self._origin(outbox)), outbox)

    def _post(self, request: Request, outbox: Outbox) -> None:
        self._asking = True
        self._poster.post(request, lambda reply: self._on_reply(outbox, reply), self._on_silence)

    def _on_silence(self) -> None:
        self._asking = False
        self._plan(0.0 if self._flushing else self._ask_s)

    def _on_reply(self, outbox: Outbox, reply: Reply) -> None:
        self._asking = False
        if not isinstance(reply, Acknowledged):
            log.error("the logger refused events", reply=reply)
            self._plan(ASK_S)
            return
        outbox.acknowledge(reply.seq)
        everything = self._flushing or outbox is not self._own
        records = outbox.records(outbox.last_seq if everything else self._settled_seq, REPAIR_BYTES)
        if records:
            self._post(RepairEvents(records=tuple(records)), outbox)
            return
        if outbox is not self._own:
            outbox.delete()
            self._outboxes.remove(outbox)
        if self.pending:
            self._plan(0.0 if outbox is not self._own or self._flushing else self._ask_s)
