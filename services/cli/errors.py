"""How the command reports problems: each is one line on stderr."""

import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_LINE_CHARS = 1000


def print_error(text: str) -> None:
    """Print "coadapt: TEXT" to stderr, without control characters and with long lines cut."""
    from common.codec import printable

    lines = [printable(line, MAX_LINE_CHARS) for line in text.splitlines()]
    print("coadapt: " + "\n".join(lines), file=sys.stderr, flush=True)


@contextmanager
def out_errors(out: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UserError that names --out."""
    from common.lifecycle import UserError

    try:
        yield
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error


def prepare_out(out: Path) -> None:
    """Create the folder for results and check that files can be written in it, before a long computation.

    Raises UserError."""
    with out_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass


def report_failures(failures: Collection[str]) -> int:
    """Print one line for each failure; returns the exit code, 1 if there is any."""
    for failure in failures:
        print_error(failure)
    return int(bool(failures))
