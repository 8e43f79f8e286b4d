"""What a scheduler that resumes a run has to know beside its journal: that the run is still the same, and
which of its events have left it.

Events are published in order, each on disk (outbox) before it is sent, and each input is journaled together
with the number of events published before it. So the events of the last input that are missing are those
beyond the difference of that number and the one found here. Exact as long as outbox and log are on this
machine and whole; otherwise events are rather published twice than not at all.
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
DECIDES = (
    ("scheduler", "policy"),
    ("scheduler", "restart_penalty_s"),
    ("scheduler", "max_failures"),
    ("trainer", "order_timeout_s"),
    ("run", "seed"),
    ("applications", "modules"),
)
"""What the core goes by: under another value, a journal leads to a state that the run never had."""

log = get_logger()


def keep_config(run_dir: Path, config: Config) -> None:
    """Write the run's configuration where `check_config` and people find it."""
    (run_dir / CONFIG_COPY).write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def check_config(run_dir: Path, config: Config) -> None:
    """Raises UserError where the run was begun with something else of what its core goes by."""
    path = run_dir / CONFIG_COPY
    try:
        former = msgspec.json.decode(path.read_bytes(), type=Config)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; the run cannot be resumed") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; the run cannot be resumed") from error
    for section, key in DECIDES:
        was, now = (getattr(getattr(c, section), key) for c in (former, config))
        if was != now:
            raise UserError(
                f"run {run_dir.name!r} was begun with {section}.{key} = {_text(was)} and cannot be resumed "
                f"with {_text(now)}: set it back, or choose another run.run_id"
            )


def published_events(run_dir: Path) -> int:
    """How many events the run's schedulers have published, by the outboxes that they left and the log.

    Outboxes come first: a logger empties them after it has written what they hold."""
    last_seq: dict[str, int] = {}
    for record in itertools.chain(_kept(run_dir / "outbox"), _logged(run_dir / EVENTS_FILE)):
        if record.source == SOURCE:
            last_seq[record.incarnation] = max(record.seq, last_seq.get(record.incarnation, 0))
    return sum(last_seq.values())


def _kept(folder: Path) -> Iterator[EventRecord]:
    """The records of all outboxes as they are, whoever owns them; a half-written one ends its file."""
    for path in sorted(folder.glob(f"{SOURCE}-*{SUFFIX}")):
        with (
            contextlib.suppress(FileNotFoundError, ValueError, msgpack.UnpackException),
            path.open("rb") as file,
        ):
            for tree in msgpack.Unpacker(file):
                yield convert(tree, EventRecord)


def _logged(path: Path) -> Iterator[EventRecord]:
    """The records up to where the log is broken or, when a logger died, cut short."""
    if path.exists():
        try:
            yield from read_events(path)
        except EventLogError as error:
            log.warning("the event log could not be read to its end", error=str(error))


def _text(value: object) -> str:
    return ",".join(value) or "(none)" if isinstance(value, tuple) else str(value)
