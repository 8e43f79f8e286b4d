"""The memory across jobs on disk: one JSON file, by default `memory.json` in the folder of the runs.

If two collectors share a file, the last one to write wins. A file that cannot be used is renamed to
`broken-memory.json` (`broken-2-memory.json` and so on if that exists), and the memory starts empty.
"""

import os
from itertools import count
from pathlib import Path

import msgspec

from common.atomic_write import write_atomically
from common.lifecycle import get_logger
from services.metrics_collector.memory import VERSION, Memory, MemoryRecord

log = get_logger()


def load_memory(path: Path) -> Memory:
    """Never raises: the collector also works without a memory."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=MemoryRecord)
        if record.version != VERSION:
            raise ValueError(f"version {record.version}; this program reads version {VERSION}")
        return Memory(record)
    except FileNotFoundError:
        return Memory()
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        try:
            moved_to = str(path.replace(_free_name(path)))
        except OSError as failure:
            moved_to = f"not moved: {failure.strerror}"
        log.warning(
            "the memory cannot be used and starts empty", file=str(path), error=str(error), moved_to=moved_to
        )
        return Memory()


def _free_name(path: Path) -> Path:
    names = (f"broken-{number}-{path.name}" if number > 1 else f"broken-{path.name}" for number in count(1))
    return next(aside for aside in map(path.with_name, names) if not os.path.lexists(aside))


def save_memory(path: Path, memory: Memory) -> None:
    """Never raises: an error is logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(memory.record()), indent=1))
    except OSError as error:
        log.warning("the memory was not written", file=str(path), error=str(error))
