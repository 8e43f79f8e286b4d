"""Write several workload files, all or none."""

import os
from collections.abc import Mapping
from pathlib import Path

from common.atomic_write import write_atomically
from workloads.files.workload_file import WorkloadError


def write_files(texts: Mapping[Path, str], *, overwrite: bool) -> list[Path]:
    """Write the texts, each file atomically; returns the paths that changed.

    Files that already have the text are left alone. Raises OSError, and, before anything is written,
    WorkloadError when a path exists with other contents and `overwrite` is False."""
    changed = [path for path, text in texts.items() if not _has_text(path, text)]
    taken = [str(path) for path in changed if os.path.lexists(path)]
    if taken and not overwrite:
        raise WorkloadError(f"{', '.join(taken)}: exists with other contents; --overwrite replaces it")
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, texts[path].encode())
    return changed


def _has_text(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()
