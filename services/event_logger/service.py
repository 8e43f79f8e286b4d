"""The event-logger: receives the events of all runs and writes them to logs/<run_id>/events.jsonl.

It tells publishers which events it has written (request GetAcknowledged) and takes repeated events
(RepairEvents). When it starts and when it stops, it empties the outboxes that dead publishers have left in
the folders of the runs. It is not bound to a run, and creates no file before the first event of a run.
"""

import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from common.codec import printable
from common.config import Config
from common.eventlog import EVENTS_FILE, EventLogError, EventLogWriter
from common.lifecycle import StopFlag, get_logger
from common.messaging.curve_keys import load_keys
from common.messaging.outbox import (
    REPAIR_BYTES,
    SUFFIX,
    Origin,
    Outbox,
    event_limits,
    left_over,
    living_owners,
)
from common.messaging.publish_subscribe import EventSubscriber
from common.messaging.reactor import Reactor
from common.messaging.request_reply import ReplyServer
from common.protocol import (
    Acknowledged,
    BadMessage,
    Event,
    EventRecord,
    EventsDropped,
    GetAcknowledged,
    GoodBye,
    Refused,
    RepairEvents,
    Reply,
    Request,
)
from common.types import NAME_PATTERN

SERVICE = "event-logger"
SOURCE = "logger"
KEEP_UP_S = 1.0
"""Time between two fsyncs, so what a power cut may cost, and between two attempts to write to a full disk."""
GOODBYE_S = 4.0
"""How long a stopping logger waits for publishers that have not said good-bye. honcho kills it after 5 s."""
GOODBYE_POLL_S = 0.05

MAX_ORIGIN_CHARS = 100
"""For the names of runs, sources and incarnations: two of them and a suffix form a file name."""

log = get_logger()


class EventLogger:
    """One writer per run. Events come from a subscriber, and repairs and questions from a reply server."""

    def __init__(self, config: Config, reactor: Reactor) -> None:
        self._reactor = reactor
        self._logs_dir = Path(config.run.logs_dir)
        self._limits = event_limits(config.limits)
        self._incarnation = uuid.uuid4().hex[:8]
        self._own_seq: dict[str, int] = {}
        self._writers: dict[str, EventLogWriter] = {}
        self._batch: list[EventRecord] = []
        self._write_is_planned = False
        self._failing: set[str] = set()
        """Runs whose last write failed. The beginning and the end of a failure are logged once each."""
        self._seen: dict[tuple[str, str], str] = {}
        """The newest incarnation of every (run_id, source)."""
        self._remote: set[Origin] = set()
        """Origins without an outbox on this machine that have not said good-bye."""
        keys = load_keys(config.endpoints.keys_dir)
        self._server = ReplyServer(
            reactor, config.endpoints.logger_requests, self._answer, keys, self._on_bad, self._limits
        )
        self._events = EventSubscriber(
            reactor, config.endpoints.logger_events, (), self._take, self._on_bad, keys, config.limits
        )
        self._empty_left_outboxes()
        reactor.every(KEEP_UP_S, self._keep_up)

    def close(self) -> None:
        """Continue until the publishers have said good-bye, at most GOODBYE_S, then write all that is
        left."""
        self._wait_for_goodbyes()
        self._write_batch()
        self._empty_left_outboxes()
        for run_id, writer in self._writers.items():
            try:
                self._write_held(run_id, writer)
                writer.close()
            except OSError as error:
                self._failed(run_id, error)
        self._server.close()
        self._events.close()

    # ---------------------------------------------------------------- events and requests

    def _take(self, record: EventRecord) -> None:
        """Take a published event. It is written with the others of this turn of the reactor."""
        try:
            self._note_publisher(Origin(record.run_id, record.source, record.incarnation))
        except ValueError as error:
            self._on_bad(str(error))
            return
        self._batch.append(record)
        if not self._write_is_planned:
            self._write_is_planned = True
            self._reactor.call_later(0.0, self._write_batch)

    def _answer(self, request: Request) -> Reply:
        self._write_batch()
        match request:
            case RepairEvents(records=records) if records:
                first = records[0]
                origin = Origin(first.run_id, first.source, first.incarnation)
                if any((r.run_id, r.source, r.incarnation) != origin for r in records):
                    return Refused(
                        reason="records: come from several sources; allowed: one source per request"
                    )
            case GetAcknowledged() | GoodBye():
                records = ()
                origin = Origin(request.run_id, request.source, request.incarnation)
            case _:
                return Refused(reason=f"{type(request).__name__} is not a request for the event-logger")
        try:
            _check_names(origin)
            if isinstance(request, GoodBye):
                self._remote.discard(origin)
            if not records and not (self._logs_dir / origin.run_id / EVENTS_FILE).exists():
                return Acknowledged(seq=0)
            writer = self._writer(origin.run_id)
            self._write_repair(origin, records)
            return Acknowledged(seq=writer.acknowledged(origin.source, origin.incarnation))
        except (EventLogError, ValueError) as error:
            return Refused(reason=str(error))

    def _on_bad(self, text: str) -> None:
        log.warning("bad message", error=text)
        newest = next(reversed(self._writers), None)
        if newest:
            self._note(newest, BadMessage(service=SERVICE, error=text))

    # ---------------------------------------------------------------- writing

    def _writer(self, run_id: str) -> EventLogWriter:
        """The writer of a run. Raises EventLogError if another logger writes this run, or if the file cannot
        be written."""
        if run_id not in self._writers:
            self._writers[run_id] = EventLogWriter(self._logs_dir / run_id)
            log.info("writing", path=self._writers[run_id].path)
        return self._writers[run_id]

    def _write_batch(self) -> None:
        self._write_is_planned = False
        batch, self._batch = self._batch, []
        runs: dict[str, list[EventRecord]] = {}
        for record in batch:
            runs.setdefault(record.run_id, []).append(record)
        for run_id, records in runs.items():
            self._append(run_id, records)

    def _append(self, run_id: str, records: Sequence[EventRecord]) -> None:
        """Write the records, or log once that this fails. What is not written is not acknowledged, so its
        publisher repeats it."""
        try:
            self._writer(run_id).append(records)
        except (EventLogError, OSError) as error:
            self._failed(run_id, error)
        else:
            if run_id in self._failing:
                self._failing.remove(run_id)
                log.info("writing again", run_id=run_id)

    def _failed(self, run_id: str, error: Exception) -> None:
        if run_id not in self._failing:
            self._failing.add(run_id)
            log.error("events cannot be written", run_id=printable(run_id), error=str(error))

    def _write_repair(self, origin: Origin, records: Sequence[EventRecord]) -> None:
        """A publisher repeats all events from its oldest unacknowledged one. Missing events before that one
        exist nowhere any more, so they are given up."""
        if records:
            self._note_publisher(origin)
            lost = self._writer(origin.run_id).give_up(origin.source, origin.incarnation, records[0].seq)
            if lost:
                self._note_dropped(origin.run_id, origin.source, origin.incarnation, *lost)
            self._append(origin.run_id, records)

    def _write_held(self, run_id: str, writer: EventLogWriter) -> None:
        for (source, incarnation), gaps in writer.write_held().items():
            for first, last in gaps:
                self._note_dropped(run_id, source, incarnation, first, last)

    def _note(self, run_id: str, event: Event) -> None:
        """Write an event of the logger itself."""
        self._own_seq[run_id] = seq = self._own_seq.get(run_id, 0) + 1
        record = EventRecord(
            run_id=run_id,
            source=SOURCE,
            incarnation=self._incarnation,
            seq=seq,
            t_s=time.monotonic(),
            wall_s=time.time(),
            event=event,
        )
        self._append(run_id, (record,))

    def _note_dropped(self, run_id: str, source: str, incarnation: str, first: int, last: int) -> None:
        log.error("events are missing", run_id=run_id, source=source, first=first, last=last)
        dropped = EventsDropped(source=source, incarnation=incarnation, first_seq=first, last_seq=last)
        self._note(run_id, dropped)

    def _keep_up(self) -> None:
        """Once a second: fsync, and retry writes that failed."""
        for run_id, writer in self._writers.items():
            if run_id in self._failing:
                self._append(run_id, ())
            try:
                writer.sync()
            except OSError as error:
                self._failed(run_id, error)

    # ---------------------------------------------------------------- publishers and their outboxes

    def _note_publisher(self, origin: Origin) -> None:
        """Remember a publisher, to wait for it at the end. Raises ValueError for names that no file can
        have."""
        previous = self._seen.get(origin[:2])
        if previous == origin.incarnation:
            return
        _check_names(origin)
        self._seen[origin[:2]] = origin.incarnation
        if previous:
            self._remote.discard(Origin(*origin[:2], previous))
        outbox = self._logs_dir / origin.run_id / "outbox" / f"{origin.source}-{origin.incarnation}{SUFFIX}"
        if not outbox.exists():
            self._remote.add(origin)

    def _wait_for_goodbyes(self) -> None:
        folders = [folder for folder in self._outbox_folders() if any(folder.iterdir())]
        waiting = True

        def check() -> None:
            nonlocal waiting
            waiting = bool(self._remote) or any(living_owners(folder) for folder in folders)

        check()
        timer = self._reactor.every(GOODBYE_POLL_S, check)
        self._reactor.run_until(lambda: not waiting, GOODBYE_S)
        timer.cancel()

    def _outbox_folders(self) -> list[Path]:
        return sorted(folder for folder in self._logs_dir.glob("*/outbox") if folder.is_dir())

    def _empty_left_outboxes(self) -> None:
        for folder in self._outbox_folders():
            for outbox in left_over(folder, self._limits):
                self._empty_outbox(outbox)

    def _empty_outbox(self, outbox: Outbox) -> None:
        origin = outbox.origin
        assert origin is not None
        try:
            _check_names(origin)
            writer = self._writer(origin.run_id)
            while records := outbox.records(outbox.last_seq, REPAIR_BYTES):
                before = outbox.pending
                self._write_repair(origin, records)
                outbox.acknowledge(writer.acknowledged(origin.source, origin.incarnation))
                if outbox.pending == before:
                    break
        except (EventLogError, ValueError) as error:
            self._failed(origin.run_id, error)
        log.info("emptied the outbox of a dead publisher", path=outbox.path, left=outbox.pending)
        if outbox.pending:
            outbox.release()
        else:
            outbox.delete()


def _check_names(origin: Origin) -> None:
    """Raises ValueError for a name that no file can have. The names come from other machines."""
    for field, value in origin._asdict().items():
        if len(value) > MAX_ORIGIN_CHARS or not NAME_PATTERN.fullmatch(value):
            raise ValueError(
                f"{field} = {printable(value, MAX_ORIGIN_CHARS)}: allowed: at most {MAX_ORIGIN_CHARS} "
                "letters, digits, '.', '_' and '-'"
            )


def run(config: Config, stop: StopFlag) -> int:
    """Serve until the stop flag is set, then close in order."""
    reactor = Reactor(stop)
    try:
        logger = EventLogger(config, reactor)
        log.info("ready", events=config.endpoints.logger_events, logs=config.run.logs_dir)
        reactor.run()
        logger.close()
    finally:
        reactor.close()
    return stop.exit_code
