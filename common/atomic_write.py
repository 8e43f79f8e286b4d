"""Replacing a file so that readers, and a crash, see either the old content or the new."""

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, content: bytes, draft: Path | None = None) -> None:
    """Write a draft next to the file, wait until it is on disk, then rename it over the file. `draft` is its
    name for a caller that lets only one process write.

    Raises OSError; the former file is then as it was."""
    draft = draft or path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
