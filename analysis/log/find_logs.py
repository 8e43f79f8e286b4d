"""Find the event logs of runs in a folder."""

from pathlib import Path

from common.eventlog import EVENTS_FILE
from common.lifecycle import UserError

RUN_MARKS = (EVENTS_FILE, "journal.msgpack", "outbox")
"""What the folder of a run holds; a folder with a journal or an outbox but no log has lost its log."""


class NoRuns(UserError):
    """There is no run at the given place; the text is for people."""


def find_logs(place: Path) -> list[Path]:
    """Paths of the logs at `place`: a log, the folder of a run, or a folder that holds such folders at any
    depth.

    Hidden folders are skipped: a simulated run is in one until it is complete. The folder of a run whose log
    is missing counts too. Raises NoRuns.
    """
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise NoRuns(f"{place}: no such file or folder")
    found: list[Path] = []
    unvisited = [place]
    while unvisited:
        folder = unvisited.pop()
        try:
            entries = {entry.name: entry for entry in folder.iterdir()}
            folders = [
                entry
                for name, entry in entries.items()
                if not name.startswith(".") and entry.is_dir() and not entry.is_symlink()
            ]
        except OSError as error:
            if folder == place:
                raise NoRuns(f"{place}: cannot be read: {error.strerror}") from error
            continue
        if any(mark in entries for mark in RUN_MARKS):
            found.append(folder / EVENTS_FILE)
        else:
            unvisited.extend(folders)
    if not found:
        raise NoRuns(f"{place}: no run in it (a run is a folder with {EVENTS_FILE})")
    return sorted(found)
