"""What a scheduler needs besides the journal to resume a run: whether the configuration is the same, and how
many events were published.

Events are published in order, and each is on disk (outbox) before it is sent. The journal stores with each
input how many events were published before it. If fewer events were published after that than the last input
causes, the rest is missing and is published now. This is exact as long as outbox and log are complete and on
this machine. If they are not, events may be published twice, but none is lost.
"""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import msgpack
import msgspec

from common.codec import convert
from common.config import Config
from common.eventlog import EVENTS_FILE, EventLogError, read_events
from common.lifecycle import UserError, get_logger
from common.messaging.outbox import SUFFIX
from common.protocol import EventRecord

SOURCE = "scheduler"
CONFIG_COPY = "config.json"
SETTINGS_OF_THE_CORE = (
    ("scheduler", "policy"),
    ("scheduler", "restart_penalty_s"),
    ("scheduler", "max_failures"),
    ("trainer", "order_timeout_s"),
    ("run", "seed"),
    ("applications", "modules"),
)
"""The settings that affect the core. With another value, replaying the journal would lead to a state that the
run never had."""

log = get_logger()


def write_config_copy(run_dir: Path, config: Config) -> None:
    """Write the configuration to the run's folder, for `check_config` and for people."""
    (run_dir / CONFIG_COPY).write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def check_config(run_dir: Path, config: Config) -> None:
    """Raises UserError if a setting of SETTINGS_OF_THE_CORE differs from that with which the run was
    started."""
    path = run_dir / CONFIG_COPY
    try:
        original = msgspec.json.decode(path.read_bytes(), type=Config)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; the run cannot be resumed") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; the run cannot be resumed") from error
    for section, key in SETTINGS_OF_THE_CORE:
        was, now = (getattr(getattr(c, section), key) for c in (original, config))
        if was != now:
            raise UserError(
                f"run {run_dir.name!r} was started with {section}.{key} = {_text(was)} and cannot be resumed "
                f"with {_text(now)}: set it back, or choose another run.run_id"
            )


def published_events(run_dir: Path) -> int:
    """How many events the schedulers of this run have published, according to their outboxes and the event
    log.

    Reads the outboxes first: a logger empties them only after it has written their events to the log."""
    last_seq: dict[str, int] = {}
    for record in itertools.chain(_outbox_records(run_dir / "outbox"), _log_records(run_dir / EVENTS_FILE)):
        if record.source == SOURCE:
            last_seq[record.incarnation] = max(record.seq, last_seq.get(record.incarnation, 0))
    return sum(last_seq.values())


def _outbox_records(folder: Path) -> Iterator[EventRecord]:
    """The records in all outboxes of schedulers; a half-written record ends its file."""
    for path in sorted(folder.glob(f"{SOURCE}-*{SUFFIX}")):
        with (
            contextlib.suppress(FileNotFoundError, ValueError, msgpack.UnpackException),
            path.open("rb") as file,
        ):
            for tree in msgpack.Unpacker(file):
                yield convert(tree, EventRecord)


def _log_records(path: Path) -> Iterator[EventRecord]:
    """The records of the log up to its end, or up to where a logger that died left it damaged."""
    if path.exists():
        try:
            yield from read_events(path)
        except EventLogError as error:
            log.warning("the event log could not be read to its end", error=str(error))


def _text(value: object) -> str:
    return ",".join(value) or "(none)" if isinstance(value, tuple) else str(value)
