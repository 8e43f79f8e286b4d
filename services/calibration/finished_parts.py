"""The parts of a calibration that have been measured so far, on disk: each is one line of a file."""

import fcntl
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common.lifecycle import UserError

FILE = "calibration.jsonl"
Part = TypeVar("Part")


class FinishedParts:
    """A context manager. A part has a name, and need not be measured again once it is here."""

    def __init__(self, folder: Path, settings: dict[str, Any], *, fresh: bool) -> None:
        """`settings` are the conditions under which all parts must be measured. `fresh` drops all parts.

        Raises UserError if the folder cannot be written, another calibration writes it, or its parts were
        measured under other settings."""
        self._path = folder / FILE
        self._parts: dict[str, msgspec.Raw] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fresh:
                self._file.truncate(0)
            self._file.seek(0)
            # A last line without an end was being written when its writer was killed.
            lines = [line for line in self._file.readlines() if line.endswith(b"\n")]
            lines = lines if len(lines) > 1 else []
            self._file.truncate(sum(map(len, lines)))
        except BlockingIOError as error:
            raise UserError(f"{folder}: another calibration is writing it") from error
        except OSError as error:
            raise UserError(f"{folder}: cannot be written: {error.strerror}") from error
        try:
            if lines:
                self._load(lines, settings)
            else:
                self._write({"settings": settings})
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "FinishedParts":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def get(self, name: str, kind: type[Part]) -> Part:
        """Raises UserError for a part that another version wrote in another format."""
        try:
            return msgspec.json.decode(self._parts[name], type=kind)
        except msgspec.DecodeError as error:
            raise UserError(f"{self._path}: {name}: {error}; --fresh starts over") from error

    def add(self, name: str, value: Any) -> None:
        self._parts[name] = msgspec.Raw(msgspec.json.encode(value))
        self._write({"part": name, "value": value})

    def remove(self) -> None:
        """Remove the file, because the profiles are complete. The next calibration starts over."""
        self._path.unlink(missing_ok=True)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def _load(self, lines: list[bytes], settings: dict[str, Any]) -> None:
        try:
            header, *parts = (msgspec.json.decode(line, type=dict[str, msgspec.Raw]) for line in lines)
            former = msgspec.json.decode(header["settings"])
            for part in parts:
                self._parts[msgspec.json.decode(part["part"], type=str)] = part["value"]
        except (msgspec.DecodeError, KeyError) as error:
            raise UserError(f"{self._path}: cannot be read: {error}; --fresh starts over") from error
        for key, value in settings.items():
            if former.get(key) != value:
                raise UserError(
                    f"{self._path}: begun with {key} {former.get(key)!r}, which is {value!r} now; "
                    "--fresh starts over"
                )
