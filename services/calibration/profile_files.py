"""The files of a measured profile: tables of the osdi21 traces' columns, and the machine that they are of."""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.lifecycle import UserError
from services.calibration.calibration_plan import Placed, Row, digits, is_small, times

MACHINE = "machine.toml"
PLACEMENTS = "placement,local_bsz,step_time,sync_time,pass_time"
SCALABILITY = "num_nodes,num_replicas,local_bsz,step_time,sync_time,pass_time"
VALIDATION = "progress,iteration,metric,grad_sqr,grad_var,trusted"


def write_profile(
    folder: Path, slots: int, grid: Mapping[tuple[int, ...], Placed], curves: Mapping[int, Sequence[Row]]
) -> None:
    """All tables of one application, in place of those that were there; a node has so many slots. Raises
    UserError."""
    small, large = [], []
    for placement, placed in grid.items():
        measured = [(atomic, *seconds) for atomic, seconds in times(placed).items()]
        if is_small(placement, slots):
            small += [(digits(placement), *row) for row in measured]
        else:
            large += [(len(placement), sum(placement), *row) for row in measured]
    tables = {"placements.csv": _table(PLACEMENTS, small), "scalability.csv": _table(SCALABILITY, large)}
    for batch, rows in curves.items():
        values = ((row.progress, row.iteration, row.metric, row.sqr, row.var, row.trusted) for row in rows)
        tables[f"validation-{batch}.csv"] = _table(VALIDATION, values)
    try:
        folder.mkdir(exist_ok=True)
        for former in folder.glob("*.csv"):
            if former.name not in tables:
                former.unlink()
        for name, text in tables.items():
            _replace(folder / name, text)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error


def read_machine(folder: Path) -> dict[str, Any]:
    """Empty where there is none. Raises UserError for what cannot be read."""
    path = folder / MACHINE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error


def write_machine(folder: Path, machine: Mapping[str, Any]) -> None:
    try:
        _replace(folder / MACHINE, HEAD + "\n".join(_toml("", machine)) + "\n")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error


HEAD = """\
# Where and how the profiles beside this file were measured, by `coadapt calibrate`. Times are seconds.
# Step times are medians, of paced replicas on a full cluster: all slots that the measured job left free were
# busy with others.
#   start_s            from the order for a job's first group to the beginning of its first step
#   resize_s           without a step, when a job is resized in place and its newcomers are ready
#   save_s             from the evaluation that met the target to the final checkpoint
#   exit_s             from there until the replica's slot was free
#   verify_s           from the start of the verifier to the completion
#   evaluation_slot_s  one evaluation by one replica; n replicas share it
#   evaluation_group_s what one by several takes beside their shares: they wait for each other
#   step_overhead      mean over median time of a step, what lies between two included
"""


def _toml(name: str, table: Mapping[str, Any]) -> Iterable[str]:
    lines = [
        f"{_key(key)} = {_value(value)}" for key, value in table.items() if not isinstance(value, Mapping)
    ]
    if name and lines:
        yield f"\n[{name}]"
    yield from lines
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml(f"{name}.{_key(key)}" if name else _key(key), value)


def _key(key: str) -> str:
    """An application may have any name."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(head: str, rows: Iterable[Sequence[Any]]) -> str:
    lines = (",".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in row) for row in rows)
    return "\n".join([head, *lines]) + "\n"


def _replace(path: Path, text: str) -> None:
    half = path.with_name(f".{path.name}.half")
    half.write_text(text, encoding="utf-8")
    os.replace(half, path)
