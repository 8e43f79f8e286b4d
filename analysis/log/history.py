"""Find the logs of runs, read them, and rebuild from the records what every job did and when.

Everything after `read_log` is pure. All times of a rebuilt run are seconds on one clock, the scheduler's
(see `merge`).
"""

import heapq
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.eventlog import EVENTS_FILE, EventLogError, read_events
from common.protocol import (
    AgentJoined,
    AgentLeft,
    BatchChanged,
    Evaluated,
    Event,
    EventRecord,
    GenerationStarted,
    JobCancelled,
    JobCompleted,
    JobFailed,
    JobStateChanged,
    JobSubmitted,
    ModelFitted,
    RoundDecided,
    RunEnded,
    RunStarted,
    TrainingSample,
    Verified,
)
from common.types import JobSpec, JobState, replicas_of

RUN_MARKS = (EVENTS_FILE, "journal.msgpack", "outbox")
"""What the folder of a run holds; one with a journal or an outbox but no log has lost its log."""

SCHEDULER = "scheduler"
HOLDS_DECIDED_SLOTS = frozenset({JobState.STARTING, JobState.RUNNING})


class NoRuns(Exception):
    """There is nothing to read at the given place; the text is for people."""


class Line(NamedTuple):
    """A record, the number of its line in the log, and its time on the scheduler's clock."""

    number: int
    t_s: float
    record: EventRecord

    @property
    def event(self) -> Event:
        return self.record.event


@dataclass(frozen=True)
class RunLog:
    """A log as far as it could be read; `fault` says why the reading ended early ("" where it did not)."""

    path: Path
    records: list[EventRecord]
    fault: str = ""

    @property
    def run_id(self) -> str:
        return self.records[0].run_id if self.records else _utf8(self.path.parent.name)


def find_logs(place: Path) -> list[Path]:
    """Paths of the logs at `place`: a log, the folder of a run, or a folder with such folders at any depth;
    hidden ones in it, where a simulated run is until it is complete, are passed over.

    Raises NoRuns. A path is also given for the folder of a run whose log is missing.
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


def read_log(path: Path) -> RunLog:
    """Read a log up to its end or its first fault. Never raises for what stands in a file."""
    records: list[EventRecord] = []
    try:
        for record in read_events(path):
            records.append(record)
    except EventLogError as error:
        return RunLog(path, records, _utf8(str(error)))
    return RunLog(path, records)


def _utf8(text: str) -> str:
    """Names of folders may be any bytes; what goes on from here can be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()


# --------------------------------------------------------------------------- one order, one clock


def streams(records: Sequence[EventRecord]) -> dict[tuple[str, str], list[Line]]:
    """Lines by (source, incarnation), each list in order of seq, a repeated seq kept once.

    The log is in order of arrival, and a repaired event arrives late. Times are put on the clock of the
    scheduler's first incarnation by the median difference between wall clock and monotonic clock, so that
    agents on other machines fit in; within that incarnation they are its own, untouched.
    """
    by_stream: dict[tuple[str, str], list[tuple[int, EventRecord]]] = {}
    for number, record in enumerate(records, start=1):
        by_stream.setdefault((record.source, record.incarnation), []).append((number, record))
    reference = next((key for key in by_stream if key[0] == SCHEDULER), next(iter(by_stream), None))
    offsets_s = {
        key: statistics.median(record.wall_s - record.t_s for _, record in numbered)
        for key, numbered in by_stream.items()
    }
    ordered = {}
    for key, numbered in by_stream.items():
        assert reference is not None
        shift_s = 0.0 if key == reference else offsets_s[key] - offsets_s[reference]
        first_of_seq: dict[int, Line] = {}
        for number, record in numbered:
            first_of_seq.setdefault(record.seq, Line(number, record.t_s + shift_s, record))
        ordered[key] = [first_of_seq[seq] for seq in sorted(first_of_seq)]
    return ordered


def merge(by_stream: dict[tuple[str, str], list[Line]]) -> list[Line]:
    """All lines in order of time; the order within a stream is kept whatever its clock did."""

    def keyed(order: int, lines: Iterable[Line]) -> Iterable[tuple[float, int, int, Line]]:
        latest_s = float("-inf")
        for line in lines:
            latest_s = max(latest_s, line.t_s)
            yield latest_s, order, line.record.seq, line

    # At equal times the scheduler comes first: what it orders is done after.
    keys = sorted(by_stream, key=lambda key: (key[0] != SCHEDULER, key))
    merged = heapq.merge(*(keyed(order, by_stream[key]) for order, key in enumerate(keys)))
    return [line for *_, line in merged]


# --------------------------------------------------------------------------- what the jobs did


@dataclass
class JobHistory:
    """One job. Lists of (time, ...) pairs are in order."""

    spec: JobSpec
    submitted_s: float
    accumulates_alone: bool = False
    """As in `JobSubmitted`."""
    state: JobState = JobState.PENDING
    ended_s: float | None = None
    end: JobState | None = None
    reason: str = ""
    """Why it failed."""
    completed: JobCompleted | None = None
    verified: Verified | None = None
    verifying_s: float | None = None
    """When its verification began."""
    decided: int = 0
    """Replicas of the last decision."""
    slots: list[tuple[float, int]] = field(default_factory=list)
    """Slots for training from that time on, by the scheduler's decisions, while it is starting or running."""
    verifier: list[tuple[float, int]] = field(default_factory=list)
    """Slots of its verifier from that time on: 1 while it is verifying."""
    generations: list[tuple[float, GenerationStarted]] = field(default_factory=list)
    """Each at the end of its first step."""
    batch_changes: int = 0
    samples: list[tuple[float, TrainingSample]] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    fits: list[tuple[float, ModelFitted]] = field(default_factory=list)

    @property
    def jct_s(self) -> float | None:
        """Verified completion - submission, by the scheduler's clock; None unless completed."""
        return self.ended_s - self.submitted_s if self.completed and self.ended_s is not None else None

    def note_slots(self, t_s: float) -> None:
        """Append to `slots` and `verifier` where the state or the decision has changed them."""
        training = self.decided if self.state in HOLDS_DECIDED_SLOTS else 0
        if training != (self.slots[-1][1] if self.slots else 0):
            self.slots.append((t_s, training))
        verifying = int(self.state is JobState.VERIFYING)
        if verifying != (self.verifier[-1][1] if self.verifier else 0):
            self.verifier.append((t_s, verifying))


@dataclass
class RunHistory:
    """A run, rebuilt from its log."""

    jobs: dict[str, JobHistory] = field(default_factory=dict)
    started: RunStarted | None = None
    ended: bool = False
    """By a RunEnded that no later RunStarted takes back."""
    active_at_end: frozenset[str] = frozenset()
    """Jobs that it names as under way."""
    nodes: dict[str, int] = field(default_factory=dict)
    """Slots of each node that is there."""
    capacity: list[tuple[float, int]] = field(default_factory=list)
    """Slots of all nodes from that time on."""
    largest_node: int = 0
    last_s: float = 0.0

    def note_capacity(self, t_s: float) -> None:
        self.capacity.append((t_s, sum(self.nodes.values())))
        self.largest_node = max(self.largest_node, *self.nodes.values(), 0)


def rebuild(lines: Sequence[Line]) -> RunHistory:
    """Replay merged lines. What names a job that was never submitted is passed over (the audit tells)."""
    run = RunHistory()
    for _, t_s, record in lines:
        event = record.event
        run.last_s = max(run.last_s, t_s)
        match event:
            case RunStarted():
                run.started = run.started or event
                run.ended = False
            case RunEnded():
                run.ended = True
                run.active_at_end = frozenset(event.active)
            case AgentJoined():
                run.nodes[event.node.name] = event.node.slots
                run.note_capacity(t_s)
            case AgentLeft():
                run.nodes.pop(event.node, None)
                run.note_capacity(t_s)
            case JobSubmitted():
                run.jobs.setdefault(event.spec.id, JobHistory(event.spec, t_s, event.accumulates_alone))
            case RoundDecided():
                for job_id, allocation in event.allocations.items():
                    if job := run.jobs.get(job_id):
                        job.decided = replicas_of(allocation)
                        job.note_slots(t_s)
            case _:
                if job := run.jobs.get(getattr(event, "job_id", "")):
                    _note(job, t_s, event)
    for job in run.jobs.values():
        # Rank 0 moves between nodes: generations order its samples, whatever the nodes' clocks say.
        job.samples.sort(key=lambda sample: sample[1].generation)
        job.generations.sort(key=lambda started: started[1].generation)
    return run


@dataclass(frozen=True)
class Replay:
    """Everything that audit and metrics need of one log."""

    records: Sequence[EventRecord]
    streams: dict[tuple[str, str], list[Line]]
    lines: list[Line]
    run: RunHistory


def replay(records: Sequence[EventRecord]) -> Replay:
    by_stream = streams(records)
    lines = merge(by_stream)
    return Replay(records, by_stream, lines, rebuild(lines))


def _note(job: JobHistory, t_s: float, event: Event) -> None:
    match event:
        case JobStateChanged():
            job.state = event.new
            job.note_slots(t_s)
            if event.new is JobState.VERIFYING:
                job.verifying_s = t_s
        case GenerationStarted():
            job.generations.append((t_s, event))
        case BatchChanged():
            job.batch_changes += 1
        case TrainingSample():
            job.samples.append((t_s, event))
        case Evaluated():
            job.evaluations.append(event)
        case ModelFitted():
            job.fits.append((t_s, event))
        case Verified():
            job.verified = event
        case JobCompleted() | JobFailed() | JobCancelled() if job.end is None:
            job.end = END_STATES[type(event)]
            job.ended_s = t_s
            job.state = job.end
            job.note_slots(t_s)
            job.completed = event if isinstance(event, JobCompleted) else None
            job.reason = event.reason if isinstance(event, JobFailed) else ""
        case _:
            pass


END_STATES: dict[type[Event], JobState] = {
    JobCompleted: JobState.COMPLETED,
    JobFailed: JobState.FAILED,
    JobCancelled: JobState.CANCELLED,
}


def integral(steps: Sequence[tuple[float, int]], start_s: float, end_s: float) -> float:
    """Integral over [start_s, end_s] of the function that is `value` from each `t_s` on, and 0 before."""
    if not steps or not end_s > start_s:
        return 0.0
    times, values = np.array(steps, dtype=float).T
    return float(values @ np.diff(np.clip(np.append(times, np.inf), start_s, end_s)))
