"""The memory across jobs on disk: one JSON file, by default `memory.json` in the folder of the runs.

It is replaced as a whole (a temporary file, fsync, rename), so it is never half written; of two collectors
that share one, the last one to write wins. A file that cannot be used is renamed to `broken-memory.json`, or
`broken-2-memory.json` and so on where that is there already, and the memory starts empty.
"""

import contextlib
import os
from itertools import count
from pathlib import Path

import msgspec

from common.lifecycle import get_logger
from services.metrics_collector.memory import VERSION, Memory, MemoryRecord

log = get_logger()


def load_memory(path: Path) -> Memory:
    """Never raises: a memory is a help, not a need."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=MemoryRecord)
        if record.version != VERSION:
            raise ValueError(f"version {record.version}; this program writes version {VERSION}")
        return Memory(record)
    except FileNotFoundError:
        return Memory()
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        try:
            where = str(path.replace(_free_name(path)))
        except OSError as failure:
            where = f"where it is: {failure.strerror}"
        log.warning(
            "the memory cannot be used and starts empty", file=str(path), error=str(error), left=where
        )
        return Memory()


def _free_name(path: Path) -> Path:
    names = (f"broken-{number}-{path.name}" if number > 1 else f"broken-{path.name}" for number in count(1))
    return next(aside for aside in map(path.with_name, names) if not os.path.lexists(aside))


def save_memory(path: Path, memory: Memory) -> None:
    """Never raises: what cannot be written is reported."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(memory.record()), indent=1))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        log.warning("the memory was not written", file=str(path), error=str(error))
