"""Read the event log of a run into polars frames. This is the interface for notebooks:

    import polars as pl
    from analysis.log.frames import read

    frames = read("logs/RUN")
    frames.samples.group_by("job_id").agg(pl.col("loss").last(), pl.col("window_s").sum())

`analysis/log/schemas.py` says what every column of every frame means, and in which unit.

One cleaning pass keeps every valid line of the log. Each bad line is named in `Frames.faults` with its number; the
lines after it are read all the same. Bad lines are those that are not JSON, not an event of coadapt, of an unknown
schema, with a field of the wrong type, with a field that this version does not know (a newer version may have added
it: what the event means is not certain), with an integer that 64 bits do not hold, and a last line without an end.
Accepted are events of former schemas, the strings "nan", "inf" and "-inf" for numbers that JSON lacks, and numbers
that lost their type on the way but not their value: 3.0 or "3" for 3.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from analysis.log.one_clock import Order, order_events
from analysis.log.schemas import (
    ADDED_TO_EVENTS,
    EVENTS,
    JOBS,
    PARTS,
    PLACE,
    TABLES,
    Column,
    Table,
)
from common.eventlog import EVENTS_FILE, EventLogError, decode_line, decode_lines
from common.protocol import EventRecord, JobCancelled, JobCompleted, JobFailed, RoundDecided
from common.types import Allocation, JobState, Placement, Struct

BATCH_LINES = 10_000
"""Lines that are Python objects at one time; longer logs are columns."""
MAX_FAULTS = 20
"""Bad lines that are named; more are counted."""
END_STATES: Mapping[str, JobState] = {
    JobCompleted.__name__: JobState.COMPLETED,
    JobFailed.__name__: JobState.FAILED,
    JobCancelled.__name__: JobState.CANCELLED,
}


@dataclass(frozen=True)
class Frames:
    """A log as columns. Rows are in order of time, except where a frame says otherwise.

    Events that stand in the log twice are in `events` twice, and in the other frames once.
    """

    path: Path
    run_id: str
    """Of the first event; without one, the name of the folder."""
    faults: tuple[str, ...]
    """One line for each bad line, and the number of those above `MAX_FAULTS`; empty for a clean log."""
    events: pl.DataFrame
    """One row for each valid line, in the order of the file."""
    jobs: pl.DataFrame
    """One row for each job: its specification and its end."""
    runs: pl.DataFrame
    """Starts and ends of the run."""
    nodes: pl.DataFrame
    """Nodes that joined and left."""
    submissions: pl.DataFrame
    refusals: pl.DataFrame
    rounds: pl.DataFrame
    """Decisions of the policy as a whole."""
    decisions: pl.DataFrame
    """Decisions of the policy: one row for each round and job."""
    allocations: pl.DataFrame
    """One row for each round, job and node."""
    states: pl.DataFrame
    """Changes of the state of jobs."""
    processes: pl.DataFrame
    """Starts and exits of replicas and verifiers."""
    generations: pl.DataFrame
    """New process groups; sorted by job, generation and time."""
    batches: pl.DataFrame
    """Changes of the batch alone."""
    samples: pl.DataFrame
    """Training samples; sorted by job (in order of submission), generation and time."""
    evaluations: pl.DataFrame
    checkpoints: pl.DataFrame
    verifications: pl.DataFrame
    ends: pl.DataFrame
    """Completions, failures and cancellations of jobs."""
    models: pl.DataFrame
    """Throughput models that were fitted."""
    bad_messages: pl.DataFrame
    drops: pl.DataFrame
    """Events that the logger knows to be lost."""

    def by_name(self) -> dict[str, pl.DataFrame]:
        return {name: value for name, value in vars(self).items() if isinstance(value, pl.DataFrame)}

    def job_numbers(self, job_ids: pl.Series) -> np.ndarray:
        """The row in `jobs` of each of these jobs; the number of jobs for one that was never submitted."""
        return _numbers(job_ids, self.jobs["job_id"])


def read(path: Path | str) -> Frames:
    """Read a log, or the log in the folder of a run. Never raises for what a file holds: see `Frames.faults`."""
    path = Path(path)
    if path.is_dir() and path.name != EVENTS_FILE:
        path = path / EVENTS_FILE
    builder, faults = _Builder(), _Faults(path)
    count = 0
    with _no_garbage_collection():
        try:
            with path.open("rb") as file:
                while lines := list(islice(file, BATCH_LINES)):
                    first, count = count + 1, count + len(lines)
                    if not lines[-1].endswith(b"\n"):
                        faults.add(count, "cut short: the last line has no end")
                        lines.pop()
                    records, numbers = _decode(lines, first, faults)
                    _add(builder, records, numbers, faults)
            if count == 0:
                faults.add(1, "empty: no event in it")
        except OSError as error:
            faults.add(0, f"cannot be read: {error.strerror}")
        return builder.finish(path, faults.texts())


def from_records(records: Iterable[EventRecord], path: Path = Path(EVENTS_FILE)) -> Frames:
    """The frames of a log that is in memory. Raises TypeError for an integer that 64 bits do not hold."""
    builder = _Builder()
    known = list(records)
    builder.add(known, range(1, len(known) + 1))
    return builder.finish(path, ())


# --------------------------------------------------------------------------- the cleaning pass


class _Faults:
    """Names the first bad lines and counts the others."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._named: list[tuple[int, str]] = []
        self._more = 0

    def add(self, number: int, text: str) -> None:
        if len(self._named) < MAX_FAULTS:
            self._named.append((number, text))
        else:
            self._more += 1

    def texts(self) -> tuple[str, ...]:
        named = [_encodable(str(EventLogError(self._path, *fault))) for fault in sorted(self._named)]
        more = [_encodable(f"{self._path}: and {self._more} more bad lines")] if self._more else []
        return (*named, *more)


def _encodable(text: str) -> str:
    """Names of folders may be any bytes; the result can be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()


def _decode(lines: list[bytes], first: int, faults: _Faults) -> tuple[list[EventRecord], Sequence[int]]:
    """The records of these lines and the numbers of their lines; `first` is the number of the first line."""
    try:
        return decode_lines(lines), range(first, first + len(lines))
    except ValueError:
        pass
    records, numbers = [], []
    for number, line in enumerate(lines, start=first):
        try:
            records.append(decode_line(line))
            numbers.append(number)
        except ValueError as error:
            faults.add(number, str(error))
    return records, numbers


def _add(builder: "_Builder", records: list[EventRecord], numbers: Sequence[int], faults: _Faults) -> None:
    """Add records to the frames; find those that no column can hold by halving."""
    try:
        builder.add(records, numbers)
    except (TypeError, OverflowError, UnicodeEncodeError):
        if len(records) == 1:
            faults.add(numbers[0], "not a valid event: an integer that 64 bits do not hold")
            return
        half = len(records) // 2
        _add(builder, records[:half], numbers[:half], faults)
        _add(builder, records[half:], numbers[half:], faults)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Reading makes millions of objects and no circles of them: looking for some takes half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# --------------------------------------------------------------------------- columns


@dataclass
class _Builder:
    """Collects batches of events as frames, so that a batch of Python objects can go."""

    height: int = 0
    batches: dict[str, list[pl.DataFrame]] = field(default_factory=dict)

    def add(self, records: list[EventRecord], numbers: Sequence[int]) -> None:
        """Add events with the numbers of their lines: all of them, or, where one has a value that its column
        cannot hold, none. Raises TypeError, OverflowError, UnicodeEncodeError."""
        if not records:
            return
        events = [record.event for record in records]
        by_type: dict[type[Struct], tuple[list[int], list[Struct]]] = {}
        for row, event in enumerate(events, start=self.height):
            rows, same = by_type.setdefault(type(event), ([], []))
            rows.append(row)
            same.append(event)
        made = [("events", _events(records, numbers))]
        for name, table in TABLES.items():
            for kind in table.types:
                if kind in by_type:
                    made.append((name, _table(table, kind, *by_type[kind])))
        if RoundDecided in by_type:
            made += _parts_of_rounds(*by_type[RoundDecided])
        for name, frame in made:
            self.batches.setdefault(name, []).append(frame)
        self.height += len(records)

    def finish(self, path: Path, faults: tuple[str, ...]) -> Frames:
        """The frames of all events that were added; the builder is empty afterwards."""
        events = self._take("events", {name: column.dtype for name, column in EVENTS.items()})
        order = order_events(events)
        events = events.with_columns(
            time_s=pl.Series(order.time_s, dtype=ADDED_TO_EVENTS["time_s"].dtype),
            position=pl.Series(order.position).cast(pl.UInt32, strict=False),
            repeated=pl.Series(order.repeated, dtype=ADDED_TO_EVENTS["repeated"].dtype),
        )
        frames = {name: self._ordered(name, table, order) for name, table in (TABLES | PARTS).items()}
        jobs = _jobs(frames["submissions"], frames["ends"])
        for name in ("samples", "generations"):
            frames[name] = _by_job(frames[name], jobs["job_id"])
        run_id = events["run_id"][0] if len(events) else _encodable(path.parent.name)
        return Frames(path=path, run_id=run_id, faults=faults, events=events, jobs=jobs, **frames)

    def _take(self, name: str, schema: dict[str, pl.DataType]) -> pl.DataFrame:
        batches = self.batches.pop(name, [])
        return pl.concat([pl.DataFrame(schema=schema), *batches], how="vertical", rechunk=True)

    def _ordered(self, name: str, table: Table, order: Order) -> pl.DataFrame:
        """The table without repeated events, in order of time."""
        frame = self._take(name, _schema(table))
        rows = frame["row"].to_numpy()
        position = order.position[rows]
        frame = frame.with_columns(
            position=pl.Series(position, dtype=pl.Int64).cast(pl.UInt32, strict=False),
            time_s=pl.Series(order.time_s[rows], dtype=pl.Float64),
        )
        if position.size and position.min() < 0:
            frame = frame.filter(pl.col("position").is_not_null())
        if not frame["position"].is_sorted():
            frame = frame.sort("position", maintain_order=True)
        return frame


def _schema(table: Table) -> dict[str, pl.DataType]:
    place = {name: column.dtype for name, column in PLACE.items()}
    kind = {"type": pl.String()} if len(table.types) > 1 else {}
    return place | kind | table.schema


def _events(records: list[EventRecord], numbers: Sequence[int]) -> pl.DataFrame:
    columns: dict[str, Any] = {
        "line": numbers,
        "type": [type(record.event).__name__ for record in records],
    }
    for name in EVENTS:
        if name not in columns:
            columns[name] = list(map(attrgetter(name), records))
    return pl.DataFrame({name: _series(columns[name], column) for name, column in EVENTS.items()})


def _series(values: Iterable[Any], column: Column) -> pl.Series:
    if isinstance(column.dtype, pl.Categorical):
        return pl.Series(values, dtype=pl.String).cast(column.dtype)
    return pl.Series(values, dtype=column.dtype)


def _table(table: Table, kind: type[Struct], rows: list[int], events: list[Struct]) -> pl.DataFrame:
    """The events of one type as a frame; fields that the type does not have are null."""
    columns: dict[str, pl.Series | pl.Expr] = {"row": pl.Series(rows, dtype=pl.UInt32)}
    columns |= {"position": pl.lit(None, pl.UInt32), "time_s": pl.lit(None, pl.Float64)}
    if len(table.types) > 1:
        columns["type"] = pl.lit(kind.__name__)
    nested: dict[str, list[Any]] = {}
    for name, column in table.columns.items():
        head, _, rest = (column.path or name).partition(".")
        if head not in kind.__struct_fields__:
            columns[name] = pl.lit(None, column.dtype)
            continue
        values = nested.get(head) or list(map(attrgetter(head), events))
        if rest:
            nested[head] = values
            values = _inner(values, rest)
        if column.read:
            values = list(map(column.read, values))
        columns[name] = _series(values, column)
    return pl.select(**columns)


def _inner(values: list[Any], name: str) -> list[Any]:
    get = attrgetter(name)
    try:
        return list(map(get, values))
    except AttributeError:
        return [None if value is None else get(value) for value in values]


def _parts_of_rounds(rows: list[int], rounds: list[Any]) -> list[tuple[str, pl.DataFrame]]:
    """`decisions` and `allocations` of these rounds."""
    named = [list(dict.fromkeys((*each.allocations, *each.configs, *each.reasons))) for each in rounds]
    jobs = [job_id for job_ids in named for job_id in job_ids]
    of_round = np.repeat(np.array(rows, dtype=np.uint32), [len(job_ids) for job_ids in named])

    def of_each_job(name: str) -> list[Any]:
        values = map(attrgetter(name), rounds)
        return [get(job_id) for get, job_ids in zip((v.get for v in values), named, strict=True) for job_id in job_ids]

    given: list[Allocation | None] = of_each_job("allocations")
    configs = of_each_job("configs")
    placements: list[Placement] = [placement for allocation in given if allocation for placement in allocation]
    nodes = pl.Series([None if allocation is None else len(allocation) for allocation in given], dtype=pl.Int64)
    counts = nodes.fill_null(0).to_numpy()
    replicas = pl.Series(list(map(attrgetter("replicas"), placements)), dtype=pl.Int64)
    # The sum of each job's part of the placements, from the running sum over all.
    running = np.concatenate(([0], np.cumsum(replicas.to_numpy())))
    last = np.cumsum(counts)
    sums = pl.Series(running[last] - running[last - counts])
    job_ids = pl.Series(jobs, dtype=pl.String)
    unplaced = {"position": pl.lit(None, pl.UInt32), "time_s": pl.lit(None, pl.Float64)}
    decisions = pl.select(
        row=pl.Series(of_round),
        **unplaced,
        job_id=job_ids,
        replicas=pl.select(pl.when(nodes.is_not_null()).then(sums)).to_series(),
        nodes=nodes,
        atomic_batch=pl.Series(_inner(configs, "atomic_batch"), dtype=pl.Int64),
        accumulation=pl.Series(_inner(configs, "accumulation"), dtype=pl.Int64),
        reason=pl.Series(of_each_job("reasons"), dtype=pl.String),
    )
    allocations = pl.select(
        row=pl.Series(np.repeat(of_round, counts)),
        **unplaced,
        job_id=job_ids.gather(np.repeat(np.arange(len(jobs)), counts)),
        node=pl.Series(list(map(attrgetter("node"), placements)), dtype=pl.String),
        replicas=replicas,
    )
    return [("decisions", decisions), ("allocations", allocations)]


# --------------------------------------------------------------------------- jobs


def _jobs(submissions: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """The first submission of each job, with its first end."""
    first_ends = ends.unique("job_id", keep="first", maintain_order=True).select(
        "job_id",
        ended_s="time_s",
        end=pl.col("type").replace_strict(END_STATES, return_dtype=pl.String),
    )
    jobs = submissions.unique("job_id", keep="first", maintain_order=True).rename({"time_s": "submitted_s"})
    jobs = jobs.join(first_ends, on="job_id", how="left", maintain_order="left")
    completed = pl.col("end") == JobState.COMPLETED.value
    jobs = jobs.with_columns(jct_s=pl.when(completed).then(pl.col("ended_s") - pl.col("submitted_s")))
    specification = [name for name in TABLES["submissions"].columns]
    return jobs.select("row", "position", *specification, *JOBS)


def _numbers(job_ids: pl.Series, known: pl.Series) -> np.ndarray:
    count = len(known)
    if count == 0:
        return np.zeros(len(job_ids), dtype=np.int64)
    numbers = pl.Series(range(count), dtype=pl.Int64)
    return job_ids.replace_strict(known, numbers, default=count, return_dtype=pl.Int64).to_numpy()


def _by_job(frame: pl.DataFrame, jobs: pl.Series) -> pl.DataFrame:
    """Sorted by job, in order of submission, then by generation. Rank 0 moves between nodes: the generation orders
    its events, whatever the clocks of the nodes say."""
    job = pl.Series("job", _numbers(frame["job_id"], jobs), dtype=pl.UInt32)
    order = pl.select(job, frame["generation"]).select(
        pl.arg_sort_by("job", "generation", maintain_order=True)
    )
    return frame[order.to_series()]
