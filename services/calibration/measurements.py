"""What a calibration has measured so far, on disk: a part a line, written when it is finished."""

import fcntl
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common.lifecycle import UserError

FILE = "calibration.jsonl"
Part = TypeVar("Part")


class Journal:
    """A context. Parts have names; a part that is there need not be measured again."""

    def __init__(self, folder: Path, settings: dict[str, Any], *, fresh: bool) -> None:
        """`settings`: under which all parts have to be measured. Raises UserError when the folder cannot be
        written, or holds parts that were measured under others."""
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
            whole = [line for line in self._file.readlines() if line.endswith(b"\n")]
            whole = whole if len(whole) > 1 else []
            self._file.truncate(sum(map(len, whole)))
        except BlockingIOError as error:
            raise UserError(f"{folder}: another calibration is writing it") from error
        except OSError as error:
            raise UserError(f"{folder}: cannot be written: {error.strerror}") from error
        try:
            if whole:
                self._check(whole, settings)
            else:
                self._write({"settings": settings})
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def begun(self) -> bool:
        return bool(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def get(self, name: str, kind: type[Part]) -> Part:
        """Raises UserError for what another version has written."""
        try:
            return msgspec.json.decode(self._parts[name], type=kind)
        except msgspec.DecodeError as error:
            raise UserError(f"{self._path}: {name}: {error}; --fresh begins anew") from error

    def add(self, name: str, value: Any) -> None:
        self._parts[name] = msgspec.Raw(msgspec.json.encode(value))
        self._write({"part": name, "value": value})

    def finish(self) -> None:
        """All that was measured stands in the profile: a next start begins anew."""
        self._path.unlink(missing_ok=True)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def _check(self, lines: list[bytes], settings: dict[str, Any]) -> None:
        try:
            header, *parts = (msgspec.json.decode(line, type=dict[str, msgspec.Raw]) for line in lines)
            former = msgspec.json.decode(header["settings"])
            for part in parts:
                self._parts[msgspec.json.decode(part["part"], type=str)] = part["value"]
        except (msgspec.DecodeError, KeyError) as error:
            raise UserError(f"{self._path}: cannot be read: {error}; --fresh begins anew") from error
        for key, value in settings.items():
            if former.get(key) != value:
                raise UserError(
                    f"{self._path}: begun with {key} {former.get(key)!r}, which is {value!r} now; "
                    "--fresh begins anew"
                )
