"""Workload tables: CSV files with one job per row, the form of published traces.

    name,time,application,num_replicas,batch_size
    cifar10-0,107,cifar10,6,2048

`time` is when the job is submitted, in seconds from the start. Rows may be in any order and may have the same
time. The columns may be in any order, but must be exactly these five. Everything else about a job comes from
its application.

Reading reports only errors of the file: a cell that does not fit its column (such as replicas below 1), a
repeated name, an unknown application. A job that is impossible (a batch out of bounds, more replicas than
there are slots) is refused with the reason when it is submitted, and the other jobs go on.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from common.types import ApplicationSpec
from workloads.files.workload_file import (
    MAX_SEED,
    MAX_TIME_S,
    Arrival,
    JobFields,
    Workload,
    WorkloadError,
    complete_spec,
    name_problems,
    shown,
)

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
MAX_WHOLE = 2**31 - 1


def read_table(path: Path, applications: Mapping[str, ApplicationSpec]) -> Workload:
    """The jobs of a table in order of submission; rows with the same time keep the order of the file.

    Raises WorkloadError naming the file, the row (from 1, without the header) and its line, the column, the
    value and what is allowed.
    """
    arrivals: list[Arrival] = []
    row_of_name: dict[str, int] = {}
    for number, (line, cells) in enumerate(_rows(path), start=1):
        try:
            arrival = _arrival(cells, number, applications)
            name = arrival.spec.id
            first = row_of_name.setdefault(name, number)
            if first != number:
                raise WorkloadError(f"name {name!r}: already used in row {first}; allowed: each name once")
        except WorkloadError as error:
            raise WorkloadError(f"{path}: row {number} (line {line}): {error}") from error
        arrivals.append(arrival)
    if not arrivals:
        raise WorkloadError(f"{path}: no rows below the header; a workload needs at least one job")
    return Workload(name=path.stem, seed=0, rows=tuple(sorted(arrivals, key=lambda row: row.at_s)))


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells by column of each row. Empty lines are skipped."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            try:
                header = next(reader, None)
                if header is None:
                    raise WorkloadError(
                        f"{path}: empty; allowed: a header {','.join(COLUMNS)} and one row a job"
                    )
                columns = _columns(path, header)
                for number, cells in enumerate((cells for cells in reader if cells), start=1):
                    if len(cells) != len(columns):
                        raise WorkloadError(
                            f"{path}: row {number} (line {reader.line_num}): {len(cells)} cells; allowed: "
                            f"{len(columns)}, as in the header"
                        )
                    yield reader.line_num, dict(zip(columns, cells, strict=True))
            except csv.Error as error:
                raise WorkloadError(f"{path}: line {reader.line_num}: not valid CSV: {error}") from error
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def _columns(path: Path, header: list[str]) -> list[str]:
    columns = [cell.strip() for cell in header]
    problems = [f"no column {name!r}" for name in COLUMNS if name not in columns]
    problems += [f"unknown column {shown(name)}" for name in columns if name not in COLUMNS]
    problems += [
        f"column {name!r} {columns.count(name)} times" for name in COLUMNS if columns.count(name) > 1
    ]
    if problems:
        raise WorkloadError(
            f"{path}: header: {'; '.join(problems)}; allowed: {', '.join(COLUMNS)}, each once"
        )
    return columns


def _arrival(cells: dict[str, str], number: int, applications: Mapping[str, ApplicationSpec]) -> Arrival:
    name = cells["name"].strip()
    if problems := name_problems("name", name):
        raise WorkloadError(problems[0])
    time_s = _seconds("time", cells["time"])
    fields = JobFields(
        application=cells["application"].strip(),
        id=name,
        replicas=_whole("num_replicas", cells["num_replicas"]),
        batch_size=_whole("batch_size", cells["batch_size"]),
    )
    spec = complete_spec(fields, applications, name, number % (MAX_SEED + 1))
    return Arrival(at_s=time_s, spec=spec)


def _seconds(column: str, text: str) -> float:
    try:
        value = float(_plain(text))
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_TIME_S:
        raise WorkloadError(f"{column} {shown(text)}: allowed: 0 to {MAX_TIME_S:.0f} seconds")
    return value


def _whole(column: str, text: str) -> int:
    try:
        value = int(_plain(text))
    except ValueError:
        value = 0
    if not 1 <= value <= MAX_WHOLE:
        raise WorkloadError(f"{column} {shown(text)}: allowed: whole numbers from 1 to {MAX_WHOLE}")
    return value


def _plain(text: str) -> str:
    """The text, if other programs would read the same number from it. Raises ValueError."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return text
