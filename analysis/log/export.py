"""Write the frames of a run as files for other tools: one file for each frame."""

import os
from pathlib import Path
from typing import Literal, get_args

import msgspec
import polars as pl

from analysis.log.frames import read
from common.codec import printable
from common.eventlog import EVENTS_FILE
from common.lifecycle import UserError

Format = Literal["parquet", "csv"]
FORMATS: tuple[str, ...] = get_args(Format)


def export(run_path: Path, to: str, out: Path) -> list[Path]:
    """Write every frame of a run to the folder `out`; returns the paths of the files.

    `to` is one of `FORMATS`. In csv, lists are JSON text. Existing files are never replaced, and no file is
    written when one of them exists. Raises UserError for an unknown format, a run without a log that can be
    read, and a folder that cannot be written.
    """
    if to not in FORMATS:
        raise UserError(f"--to {printable(to)}: unknown format; allowed: {' or '.join(FORMATS)}")
    log = run_path / EVENTS_FILE if run_path.is_dir() else run_path
    if not log.is_file():
        raise UserError(f"{run_path}: no run in it; needed: the folder of a run, with {EVENTS_FILE}")
    frames = read(log)
    if frames.events.is_empty():
        raise UserError(f"{'; '.join(frames.faults)}; there is nothing to export")
    paths = {name: out / f"{name}.{to}" for name in frames.by_name()}
    existing = [path for path in paths.values() if os.path.lexists(path)]
    if existing:
        raise UserError(f"--out {out}: {existing[0].name} exists; name another folder or remove it")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, frame in frames.by_name().items():
            _write(frame, paths[name])
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from error
    return list(paths.values())


def _write(frame: pl.DataFrame, path: Path) -> None:
    """With no file at `path` until it is complete."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        if path.suffix == ".parquet":
            frame.write_parquet(draft)
        else:
            _flat(frame).write_csv(draft)
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def _flat(frame: pl.DataFrame) -> pl.DataFrame:
    """With JSON text in place of lists."""
    nested = [name for name, dtype in frame.schema.items() if isinstance(dtype, pl.List)]
    texts = [
        pl.Series(
            name,
            [
                None if value is None else msgspec.json.encode(value).decode()
                for value in frame[name].to_list()
            ],
            pl.String,
        )
        for name in nested
    ]
    return frame.with_columns(texts)
