"""The files of a measured profile: tables with the columns of the osdi21 traces, and machine.toml."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.atomic_write import write_atomically
from common.lifecycle import UserError
from services.calibration.calibration_plan import (
    CurveRow,
    MeasuredPlacement,
    is_small,
    placement_code,
    times_by_batch,
)
from workloads.files.toml_text import toml_text

MACHINE = "machine.toml"
PLACEMENTS = "placement,local_bsz,step_time,sync_time,pass_time"
SCALABILITY = "num_nodes,num_replicas,local_bsz,step_time,sync_time,pass_time"
VALIDATION = "progress,iteration,metric,grad_sqr,grad_var,trusted"
MACHINE_COMMENT = """\
# Where and how the profiles in this folder were measured, by `coadapt calibrate`. Times are in seconds.
# Step times are medians, of paced replicas on a full cluster: other jobs kept all slots busy that the
# measured job left free.
#   start_s            from the order for a job's first group to the beginning of its first step
#   resize_s           without a step, when a job is resized in place and its newcomers are ready
#   save_s             from the evaluation that met the target to the final checkpoint
#   exit_s             from there until the replica's slot was free
#   verify_s           from the start of the verifier to the completion
#   evaluation_slot_s  one evaluation by one replica; n replicas share it
#   evaluation_group_s what an evaluation by several replicas takes in addition: they wait for each other
#   step_overhead      mean / median time of a step, including the time between steps
"""


def write_profile(
    folder: Path,
    slots: int,
    grid: Mapping[tuple[int, ...], MeasuredPlacement],
    curves: Mapping[int, Sequence[CurveRow]],
) -> None:
    """Write all tables of one application, and remove its former ones. `slots` of a node; `grid` by placement
    (replicas on each node), `curves` by total batch size. Raises UserError."""
    small, large = [], []
    for placement, measured in grid.items():
        rows = [(atomic, *times_s) for atomic, times_s in times_by_batch(measured).items()]
        if is_small(placement, slots):
            small += [(placement_code(placement), *row) for row in rows]
        else:
            large += [(len(placement), sum(placement), *row) for row in rows]
    tables = {"placements.csv": _table(PLACEMENTS, small), "scalability.csv": _table(SCALABILITY, large)}
    for batch, curve in curves.items():
        values = ((row.progress, row.iteration, row.metric, row.sqr, row.var, row.trusted) for row in curve)
        tables[f"validation-{batch}.csv"] = _table(VALIDATION, values)
    try:
        folder.mkdir(exist_ok=True)
        for former in folder.glob("*.csv"):
            if former.name not in tables:
                former.unlink()
        for name, text in tables.items():
            write_atomically(folder / name, text.encode())
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error


def read_former_machine(folder: Path) -> dict[str, Any]:
    """All that machine.toml says; empty if there is none. Raises UserError if it cannot be read."""
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
    """Raises UserError."""
    text = MACHINE_COMMENT + toml_text(_rounded(machine))
    try:
        write_atomically(folder / MACHINE, text.encode())
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error


def _rounded(table: Mapping[str, Any]) -> dict[str, Any]:
    """Four significant digits: more would pretend a precision that measurements do not have."""
    return {
        key: _rounded(value)
        if isinstance(value, Mapping)
        else float(f"{value:.4g}")
        if isinstance(value, float)
        else value
        for key, value in table.items()
    }


def _table(head: str, rows: Iterable[Sequence[Any]]) -> str:
    lines = (",".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in row) for row in rows)
    return "\n".join([head, *lines]) + "\n"
