"""What each job of a run did and when: a view of the frames for algorithms that go through one job at a time.

Pure. All times are seconds on the scheduler's clock.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from analysis.log.frames import SORTED_BY_JOB, Frames
from common.protocol import AgentJoined, JobCompleted, RunEnded, RunStarted
from common.types import JobSpec, JobState, Node

HOLDS_DECIDED_SLOTS = (JobState.STARTING, JobState.RUNNING)
SPEC_FIELDS = [name for name in JobSpec.__struct_fields__ if name not in ("id", "settings")]
Steps = list[tuple[float, int]]
"""(time, value): a function of time that has the value from that time on, and 0 before."""


@dataclass(frozen=True)
class JobHistory:
    """One job."""

    spec: JobSpec
    accumulates_alone: bool
    """As in `JobSubmitted`."""
    submitted_s: float
    state: JobState
    """At the end of the log."""
    end: JobState | None
    ended_s: float | None
    reason: str
    """Why it failed."""
    completed: JobCompleted | None
    verified: bool
    """Completed, and the last word of its verifier is that nothing is wrong."""
    verifying_s: float | None
    """When its verification began."""
    batch_changes: int
    slots: Steps
    """Slots for training, by the scheduler's decisions, while the job is starting or running."""
    verifier: Steps
    """Slots of its verifier: 1 while the job is being verified."""
    frames: Frames = field(repr=False)
    rows: dict[str, slice] = field(repr=False)
    """The job's rows in the frames that are sorted by job."""

    @property
    def jct_s(self) -> float | None:
        """Seconds from submission to verified completion; None unless completed."""
        return self.ended_s - self.submitted_s if self.completed and self.ended_s is not None else None

    @cached_property
    def samples(self) -> pl.DataFrame:
        return self._of_job("samples")

    @cached_property
    def generations(self) -> pl.DataFrame:
        return self._of_job("generations")

    @cached_property
    def evaluations(self) -> pl.DataFrame:
        return self._of_job("evaluations")

    @cached_property
    def models(self) -> pl.DataFrame:
        return self._of_job("models")

    def _of_job(self, name: str) -> pl.DataFrame:
        rows = self.rows[name]
        frame: pl.DataFrame = getattr(self.frames, name)
        return frame.slice(rows.start, rows.stop - rows.start)


@dataclass(frozen=True)
class RunHistory:
    """A run as a whole, and its jobs by id in the order of submission."""

    frames: Frames = field(repr=False)
    jobs: dict[str, JobHistory]
    started: RunStarted | None
    """The first start: a run that was resumed has several."""
    ended: bool
    """The run has ended and was not resumed."""
    active_at_end: frozenset[str]
    """Jobs that were under way when the run ended."""
    nodes: tuple[Node, ...]
    """Every node that ever joined, by name, as it joined last."""
    capacity: Steps
    """Slots of all nodes that are there."""
    largest_node: int
    """Most slots of a node."""
    last_s: float
    """Time of the last event."""


def history(frames: Frames) -> RunHistory:
    """Rebuild a run. Events of a job that was never submitted are ignored; the audit reports them."""
    starts = frames.runs.filter(pl.col("type") == RunStarted.__name__)
    ends = frames.runs.filter(pl.col("type") == RunEnded.__name__)
    started = None
    if len(starts):
        row = starts.row(0, named=True)
        started = RunStarted(**{name: row[name] for name in RunStarted.__struct_fields__})
    nodes, capacity, largest = _nodes(frames.nodes)
    times_s = frames.events.filter(~pl.col("repeated"))["time_s"].to_numpy()
    return RunHistory(
        frames=frames,
        jobs=_jobs(frames),
        started=started,
        ended=bool(len(frames.runs)) and frames.runs["type"][-1] == RunEnded.__name__,
        active_at_end=frozenset(ends["active"][-1] if len(ends) else ()),
        nodes=nodes,
        capacity=capacity,
        largest_node=largest,
        last_s=float(np.fmax.reduce(times_s, initial=0.0)),
    )


def integral(steps: Steps, start_s: float, end_s: float) -> float:
    """Integral of a step function over [start_s, end_s]."""
    if not steps or not end_s > start_s:
        return 0.0
    times, values = np.array(steps, dtype=float).T
    return float(values @ np.diff(np.clip(np.append(times, np.inf), start_s, end_s)))


def _nodes(changes: pl.DataFrame) -> tuple[tuple[Node, ...], Steps, int]:
    """Every node that joined, the slots of those that are there over time, and the slots of the largest."""
    known: dict[str, Node] = {}
    there: dict[str, int] = {}
    capacity: Steps = []
    largest = 0
    for row in changes.iter_rows(named=True):
        if row["type"] == AgentJoined.__name__:
            fields = ("slots", "slot_speed", "store_host", "store_port")
            known[row["node"]] = Node(name=row["node"], **{name: row[name] for name in fields})
            there[row["node"]] = row["slots"]
            largest = max(largest, row["slots"])
        else:
            there.pop(row["node"], None)
        capacity.append((row["time_s"], sum(there.values())))
    return tuple(known[name] for name in sorted(known)), capacity, largest


def _jobs(frames: Frames) -> dict[str, JobHistory]:
    count = len(frames.jobs)
    timeline = _timeline(frames)
    slots, verifier = (_steps(timeline, value, count) for value in ("training", "verifying"))
    states = _last(timeline, pl.col("state"), "state")
    began = _last(timeline.filter(pl.col("changed") == JobState.VERIFYING), pl.col("time_s"), "time_s")
    ends = frames.ends.unique("job_id", keep="first", maintain_order=True)
    by_job = {row["job_id"]: row for row in ends.iter_rows(named=True)}
    ok = dict(frames.verifications.select("job_id", "ok").iter_rows())  # the last one counts
    changes = np.bincount(frames.job_numbers(frames.batches["job_id"]), minlength=count + 1).tolist()
    by_name = frames.by_name()
    rows = {name: _slices(frames.job_numbers(by_name[name]["job_id"]), count) for name in SORTED_BY_JOB}
    jobs = {}
    for number, job in enumerate(frames.jobs.iter_rows(named=True)):
        job_id = job["job_id"]
        end = by_job.get(job_id)
        completed = None
        if end and end["type"] == JobCompleted.__name__:
            fields = JobCompleted.__struct_fields__
            completed = JobCompleted(**{name: end[name] for name in fields})
        jobs[job_id] = JobHistory(
            spec=JobSpec(
                id=job_id,
                settings={one["name"]: one["value"] for one in job["settings"]},
                **{name: job[name] for name in SPEC_FIELDS},
            ),
            accumulates_alone=job["accumulates_alone"],
            submitted_s=job["submitted_s"],
            state=JobState(states.get(number, JobState.PENDING)),
            end=JobState(job["end"]) if job["end"] else None,
            ended_s=job["ended_s"],
            reason=(end and end["reason"]) or "",
            completed=completed,
            verified=bool(completed and completed.verified and ok.get(job_id)),
            verifying_s=began.get(number),
            batch_changes=changes[number],
            slots=slots[number],
            verifier=verifier[number],
            frames=frames,
            rows={name: slices[number] for name, slices in rows.items()},
        )
    return jobs


def _timeline(frames: Frames) -> pl.DataFrame:
    """Decisions, changes of state and the first end of each job, by job and time, with what holds after them:
    `state`, slots for `training` and slots for `verifying`."""
    place = ("job_id", "position", "time_s")
    decided = frames.decisions.filter(pl.col("replicas").is_not_null())
    changed = frames.states.select(*place, changed="new")
    ended = frames.jobs.filter(pl.col("end").is_not_null()).select("job_id", changed="end")
    ends = frames.ends.unique("job_id", keep="first", maintain_order=True).select(*place)
    parts = [decided.select(*place, "replicas"), changed, ends.join(ended, on="job_id")]
    events = pl.concat(parts, how="diagonal")
    events = events.with_columns(job=pl.Series(frames.job_numbers(events["job_id"])))
    events = events.filter(pl.col("job") < len(frames.jobs)).drop("job_id")
    held = events.sort("job", "position", maintain_order=True).with_columns(
        replicas=pl.col("replicas").forward_fill().over("job").fill_null(0),
        state=pl.col("changed").forward_fill().over("job").fill_null(JobState.PENDING),
    )
    return held.with_columns(
        training=pl.when(pl.col("state").is_in(HOLDS_DECIDED_SLOTS)).then("replicas").otherwise(0),
        verifying=(pl.col("state") == JobState.VERIFYING).cast(pl.Int64),
    )


def _steps(timeline: pl.DataFrame, value: str, jobs: int) -> list[Steps]:
    """Where the value of each job changes, from 0."""
    before = pl.col(value).shift(1, fill_value=0).over("job")
    changes = timeline.filter(pl.col(value) != before).select("job", "time_s", value)
    steps = list(zip(changes["time_s"].to_list(), changes[value].to_list(), strict=True))
    return [steps[rows] for rows in _slices(changes["job"].to_numpy(), jobs)]


def _last(timeline: pl.DataFrame, value: pl.Expr, name: str) -> dict[int, Any]:
    """The last value of each job that has one."""
    return dict(timeline.group_by("job").agg(value.last()).select("job", name).iter_rows())


def _slices(jobs: np.ndarray, count: int) -> list[slice]:
    """The rows of each job, where rows are sorted by the number of their job."""
    bounds = np.searchsorted(jobs, np.arange(count + 1)).tolist()
    return [slice(first, last) for first, last in pairwise(bounds)]
