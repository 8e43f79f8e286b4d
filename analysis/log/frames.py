"""Read the event log of a run into polars frames. This is the interface for notebooks:

    import polars as pl
    from analysis.log.frames import read

    frames = read("logs/RUN")
    frames.samples.group_by("job_id").agg(pl.col("loss").last(), pl.col("window_s").sum())

`analysis/log/schemas.py` says what every column of every frame means, and in which unit.

One cleaning pass keeps every valid line of the log. Each bad line is named in `Frames.faults` with its
number; the lines after it are read all the same. Bad lines are those that are not JSON, not an event of
coadapt, of an unknown schema, with a field of the wrong type, with a field that this version does not know (a
newer version may have added it: what the event means is not certain), with an integer that 64 bits do not
hold, and a last line without an end. Accepted are events of former schemas, the strings "nan", "inf" and
"-inf" for numbers that JSON lacks, and numbers that lost their type on the way but not their value: 3.0 or
"3" for 3.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from analysis.log.one_clock import Order, order_events
from analysis.log.schemas import ADDED_TO_EVENTS, EVENTS, JOBS, PARTS, PLACE, TABLES, FrameColumn, FrameSchema
from common.eventlog import EVENTS_FILE, EventLogError, decode_line, decode_lines
from common.protocol import EventRecord, JobCancelled, JobCompleted, JobFailed, RoundDecided
from common.types import Allocation, JobState, Struct

BATCH_BYTES = 8 << 20
"""Text that is lines and Python objects at one time; what was read before is columns."""
MAX_FAULTS = 20
"""Bad lines that are named; more are counted."""
SORTED_BY_JOB = ("samples", "generations", "evaluations", "models")
"""Frames in which the rows of a job are neighbours."""
END_STATES: Mapping[str, JobState] = {
    JobCompleted.__name__: JobState.COMPLETED,
    JobFailed.__name__: JobState.FAILED,
    JobCancelled.__name__: JobState.CANCELLED,
}

FRAMES = ("events", "jobs", *TABLES, *PARTS)
"""Names of all frames."""


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
    """Sorted by job and time."""
    checkpoints: pl.DataFrame
    verifications: pl.DataFrame
    ends: pl.DataFrame
    """Completions, failures and cancellations of jobs."""
    models: pl.DataFrame
    """Throughput models that were fitted; sorted by job and time."""
    bad_messages: pl.DataFrame
    drops: pl.DataFrame
    """Events that the logger knows to be lost."""

    def by_name(self) -> dict[str, pl.DataFrame]:
        return {name: value for name, value in vars(self).items() if name in FRAMES}

    @cached_property
    def in_streams(self) -> pl.DataFrame:
        """Each event once, by source and incarnation in the order of `seq`; streams in order of the file."""
        columns = ("stream", "source", "incarnation", "seq", "t_s")
        kept = self.events.with_row_index("row").filter(~pl.col("repeated")).select("row", *columns)
        return kept.sort("stream", "seq")

    def job_numbers(self, job_ids: pl.Series) -> np.ndarray:
        """The row in `jobs` of each of these jobs; the number of jobs for one that was never submitted."""
        return _numbers(job_ids, self.jobs["job_id"])


def read(path: Path | str) -> Frames:
    """Read a log, or the log in the folder of a run. What is wrong with it is in `Frames.faults`."""
    path = Path(path)
    if path.is_dir() and path.name != EVENTS_FILE:
        path = path / EVENTS_FILE
    builder, faults = _Builder(), _Faults(path)
    count = 0
    with _no_garbage_collection():
        try:
            with path.open("rb") as file:
                while lines := file.readlines(BATCH_BYTES):
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
    if known:
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
    if not records:
        return
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
        events: list[Any] = [record.event for record in records]
        kinds = np.fromiter(map(_NUMBER_OF_TYPE.__getitem__, map(type, events)), np.uint8, len(events))
        made = [("events", _events(records, numbers, kinds))]
        for number in np.unique(kinds).tolist():
            kind, name = _TYPES[number]
            places = np.flatnonzero(kinds == number)
            rows = places.astype(np.uint32) + np.uint32(self.height)
            same = [events[place] for place in places.tolist()]
            made.append((name, _table(TABLES[name], kind, rows, same)))
            if kind is RoundDecided:
                made += _parts_of_rounds(rows, same)
        for name, frame in made:
            self.batches.setdefault(name, []).append(frame)
        self.height += len(records)

    def finish(self, path: Path, faults: tuple[str, ...]) -> Frames:
        """The frames of all events that were added; the builder is empty afterwards."""
        events = self._take("events", {name: column.dtype for name, column in EVENTS.items()}).rechunk()
        order = order_events(events)
        events = events.with_columns(
            stream=pl.Series(order.stream, dtype=ADDED_TO_EVENTS["stream"].dtype),
            time_s=pl.Series(order.time_s, dtype=ADDED_TO_EVENTS["time_s"].dtype),
            position=pl.Series(order.position).cast(pl.UInt32, strict=False),
            repeated=pl.Series(order.repeated, dtype=ADDED_TO_EVENTS["repeated"].dtype),
        )
        in_time = [name for name in (*TABLES, *PARTS) if name not in SORTED_BY_JOB]
        frames = {name: self._ordered(name, order) for name in in_time}
        jobs = _jobs(frames["submissions"], frames["ends"])
        frames |= {name: self._ordered(name, order, jobs["job_id"]) for name in SORTED_BY_JOB}
        run_id = events["run_id"][0] if len(events) else _encodable(path.parent.name)
        return Frames(path=path, run_id=run_id, faults=faults, events=events, jobs=jobs, **frames)

    def _take(self, name: str, schema: dict[str, pl.DataType]) -> pl.DataFrame:
        batches = [pl.DataFrame(schema=schema), *self.batches.pop(name, [])]
        return pl.concat(batches, how="diagonal")

    def _ordered(self, name: str, order: Order, jobs: pl.Series | None = None) -> pl.DataFrame:
        """The table without repeated events, in order of time; with `jobs`, by job first, in the order of
        `jobs`, and then by generation where there is one: rank 0 moves between nodes, so the generation
        orders its events, whatever the clocks of the nodes say."""
        frame = self._take(name, _schema(TABLES.get(name) or PARTS[name]))
        rows = frame["row"].to_numpy()
        frame = frame.with_columns(
            position=pl.Series(order.position[rows]).cast(pl.UInt32, strict=False),
            time_s=pl.Series(order.time_s[rows], dtype=pl.Float64),
        )
        keys = [frame["position"]]
        if jobs is not None:
            numbers = _numbers(frame["job_id"], jobs)
            generation = [frame["generation"]] if "generation" in frame.columns else []
            keys = [pl.Series("job", numbers), *generation, *keys]
        sorted_rows = pl.select(*keys).select(
            pl.arg_sort_by([key.name for key in keys], maintain_order=True)
        )["job" if jobs is not None else "position"]
        repeated = frame["position"].null_count() > 0
        if not sorted_rows.is_sorted():
            frame = frame[sorted_rows]
        return frame.filter(pl.col("position").is_not_null()) if repeated else frame.rechunk()


def _schema(table: FrameSchema) -> dict[str, pl.DataType]:
    place = {name: column.dtype for name, column in PLACE.items()}
    kind = {"type": pl.String()} if len(table.types) > 1 else {}
    return place | kind | table.schema


_TYPES = [(kind, name) for name, table in TABLES.items() for kind in table.types]
"""Every type of event, with the name of its table."""
_NUMBER_OF_TYPE = {kind: number for number, (kind, _) in enumerate(_TYPES)}
_TYPE_NAMES = pl.Series([kind.__name__ for kind, _ in _TYPES], dtype=EVENTS["type"].dtype)


def _events(records: list[EventRecord], numbers: Sequence[int], kinds: npt.NDArray[np.uint8]) -> pl.DataFrame:
    columns = {"line": pl.Series(numbers, dtype=EVENTS["line"].dtype), "type": _TYPE_NAMES.gather(kinds)}
    for name, column in EVENTS.items():
        if name not in columns:
            columns[name] = _series(_get(records, name), column)
    return pl.DataFrame({name: columns[name] for name in EVENTS})


def _get(values: Sequence[Any], name: str) -> list[Any]:
    return list(map(getattr, values, repeat(name)))


def _get_if_any(values: Sequence[Any], name: str) -> list[Any]:
    """None for a value that is None."""
    try:
        return _get(values, name)
    except AttributeError:
        return [None if value is None else getattr(value, name) for value in values]


def _series(values: Sequence[Any], column: FrameColumn) -> pl.Series:
    if isinstance(column.dtype, pl.Categorical):
        return pl.Series(values, dtype=pl.String).cast(column.dtype)
    if isinstance(column.dtype, pl.List):  # polars takes lists of Python much more slowly than JSON
        texts = [msgspec.json.encode(value).decode() for value in values]
        return pl.Series(texts, dtype=pl.String).str.json_decode(column.dtype)
    return pl.Series(values, dtype=column.dtype)


def _table(
    table: FrameSchema, kind: type[Struct], rows: npt.NDArray[np.uint32], events: list[Any]
) -> pl.DataFrame:
    """The events of one type as a frame, without the columns that the type has no field for."""
    columns = {"row": pl.Series(rows)}
    if len(table.types) > 1:
        columns["type"] = pl.Series([kind.__name__]).new_from_index(0, len(events))
    of_field: dict[str, list[Any]] = {}
    for name, column in table.columns.items():
        head, _, inner = (column.path or name).partition(".")
        if head not in kind.__struct_fields__:
            continue
        values = of_field.get(head) or _get(events, head)
        if inner:
            of_field[head] = values
            values = _get_if_any(values, inner)
        columns[name] = _series(list(map(column.read, values)) if column.read else values, column)
    return pl.DataFrame(columns)


def _parts_of_rounds(rows: npt.NDArray[np.uint32], rounds: list[Any]) -> list[tuple[str, pl.DataFrame]]:
    """`decisions` and `allocations` of these rounds."""
    named = [list(dict.fromkeys((*each.allocations, *each.configs, *each.reasons))) for each in rounds]
    jobs = pl.Series([job_id for job_ids in named for job_id in job_ids], dtype=pl.String)
    of_round = np.repeat(rows, [len(job_ids) for job_ids in named])

    def of_each_job(name: str) -> list[Any]:
        """None for a job that the round does not name there."""
        by_round = zip(_get(rounds, name), named, strict=True)
        return [by_job.get(job_id) for by_job, job_ids in by_round for job_id in job_ids]

    given: list[Allocation | None] = of_each_job("allocations")
    configs = of_each_job("configs")
    placements = [placement for allocation in given if allocation for placement in allocation]
    replicas = pl.Series(_get(placements, "replicas"), dtype=pl.Int64)
    nodes = pl.Series(
        [None if allocation is None else len(allocation) for allocation in given], dtype=pl.Int64
    )
    counts = nodes.fill_null(0).to_numpy()
    last = np.cumsum(counts)
    running = np.concatenate(([0], np.cumsum(replicas.to_numpy())))
    sums = pl.Series(running[last] - running[last - counts])
    columns = PARTS["decisions"].columns
    decisions = {
        "row": pl.Series(of_round),
        "job_id": jobs,
        "replicas": sums.zip_with(nodes.is_not_null(), pl.Series([None], dtype=pl.Int64)),
        "nodes": nodes,
        "atomic_batch": _series(_get_if_any(configs, "atomic_batch"), columns["atomic_batch"]),
        "accumulation": _series(_get_if_any(configs, "accumulation"), columns["accumulation"]),
        "reason": _series(of_each_job("reasons"), columns["reason"]),
    }
    allocations = {
        "row": pl.Series(np.repeat(of_round, counts)),
        "job_id": jobs.gather(np.repeat(np.arange(len(jobs)), counts)),
        "node": pl.Series(_get(placements, "node"), dtype=pl.String),
        "replicas": replicas,
    }
    return [("decisions", pl.DataFrame(decisions)), ("allocations", pl.DataFrame(allocations))]


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
    return jobs.select("row", "position", *TABLES["submissions"].columns, *JOBS)


def _numbers(job_ids: pl.Series, known: pl.Series) -> np.ndarray:
    count = len(known)
    if count == 0:
        return np.zeros(len(job_ids), dtype=np.int64)
    numbers = pl.Series(range(count), dtype=pl.Int64)
    return job_ids.replace_strict(known, numbers, default=count, return_dtype=pl.Int64).to_numpy()
