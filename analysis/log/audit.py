"""Check a log against what is true of every run that went right. Pure.

Each rule yields sentences that name the job or source and the line. The order within a source is that of
`seq`, between sources that of time on one clock (`analysis.log.one_clock`).
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import polars as pl

from analysis.log.frames import END_STATES
from analysis.log.history import JobHistory, RunHistory
from common.job_states import TRANSITIONS
from common.protocol import METRIC_TOLERANCE, AgentJoined, JobCompleted, ReplicaExited
from common.types import JobState, Struct

MAX_FINDINGS_A_RULE = 20
PROGRESS_TOLERANCE = 1e-6
"""Relative; progress is a float that is broadcast at a regrouping."""
CLOCK_TOLERANCE_S = 1.0
"""How far the clocks of two machines may differ after they have been aligned."""
RUNNING_TOLERANCE = 1e-3
"""Relative; two clocks measured the running time and the completion time."""
STREAM = ("source", "incarnation")

LEGAL_CHANGES = {(old, new) for (old, _), new in TRANSITIONS.items() if old is not new}


class Audit(Struct, frozen=True):
    """`ok` exactly when `findings` is empty. `gaps` counts the events that are missing."""

    ok: bool
    events: int
    gaps: int
    findings: tuple[str, ...]


def audit(run: RunHistory) -> Audit:
    """Judge a run. What could not be read of its log comes first."""
    findings = list(run.frames.faults)
    for rule in RULES:
        found = list(rule(run))
        findings += found[:MAX_FINDINGS_A_RULE]
        if len(found) > MAX_FINDINGS_A_RULE:
            findings.append(f"... and {len(found) - MAX_FINDINGS_A_RULE} more like the last one")
    return Audit(
        ok=not findings, events=len(run.frames.events), gaps=count_gaps(run), findings=tuple(findings)
    )


def _at(run: RunHistory, row: int) -> str:
    line, source, seq = run.frames.events.select("line", "source", "seq").row(row)
    return f"(line {line}, {source} #{seq})"


# --------------------------------------------------------------------------- the log itself


def one_run(run: RunHistory) -> Iterator[str]:
    others = run.frames.events.filter(pl.col("run_id") != run.frames.run_id)
    for line, run_id in others.select("line", "run_id").iter_rows():
        yield f"line {line} is of run {run_id}, the log is of run {run.frames.run_id}"


def count_gaps(run: RunHistory) -> int:
    """Events missing from 1 to the last known one of each (source, incarnation)."""
    counted = run.frames.in_streams.group_by(STREAM).agg(
        last=pl.col("seq").max(), present=(pl.col("seq") >= 1).sum()
    )
    present = {(source, incarnation): count for source, incarnation, _, count in counted.iter_rows()}
    last = {(source, incarnation): seq for source, incarnation, seq, _ in counted.iter_rows()}
    for source, incarnation, seq in run.frames.drops.select(*STREAM, "last_seq").iter_rows():
        last[source, incarnation] = max(last.get((source, incarnation), 0), seq)
    return sum(max(seq - present.get(stream, 0), 0) for stream, seq in last.items())


def complete_sequences(run: RunHistory) -> Iterator[str]:
    before = pl.col("seq").shift(1, fill_value=0).over("stream")
    numbered = run.frames.in_streams.filter(pl.col("seq") >= 1).with_columns(first=before + 1)
    gaps = numbered.filter(pl.col("first") < pl.col("seq"))
    for source, incarnation, first, seq in gaps.select(*STREAM, "first", "seq").iter_rows():
        missing = f"event {first} is" if first == seq - 1 else f"events {first} to {seq - 1} are"
        yield f"{source} ({incarnation}): {missing} missing"
    below = run.frames.events.filter(pl.col("seq") < 1)
    for source, seq, line in below.select("source", "seq", "line").iter_rows():
        yield f"{source}: an event has number {seq} (line {line}); they start at 1"
    for row in run.frames.drops.iter_rows(named=True):
        lost = f"events {row['first_seq']} to {row['last_seq']} were dropped"
        yield f"{row['source']} ({row['incarnation']}): {lost} {_at(run, row['row'])}"


def no_repetitions(run: RunHistory) -> Iterator[str]:
    again = run.frames.events.filter(pl.col("repeated"))
    for source, incarnation, seq, line in again.select(*STREAM, "seq", "line").iter_rows():
        yield f"{source} ({incarnation}): event {seq} is there again in line {line}"


def steady_clocks(run: RunHistory) -> Iterator[str]:
    back_s = pl.col("t_s").shift(1).over("stream") - pl.col("t_s")
    back = run.frames.in_streams.with_columns(back_s=back_s).filter(pl.col("back_s") > 0)
    for source, incarnation, seconds, row in back.select(*STREAM, "back_s", "row").iter_rows():
        if not np.isnan(seconds):
            yield f"{source} ({incarnation}): its clock goes back by {seconds:.6g} s {_at(run, row)}"


# --------------------------------------------------------------------------- slots


def nodes_within_capacity(run: RunHistory) -> Iterator[str]:
    """Replicas and verifiers that live on a node, by its agent's own order of events, against its slots.

    An agent that is restarted begins with none: its processes die with it.
    """
    frames = run.frames
    if frames.processes.is_empty():
        return
    joined = frames.nodes.filter(pl.col("type") == AgentJoined.__name__)
    slots = {(row["node"], row["incarnation"]): row["slots"] for row in joined.iter_rows(named=True)}
    latest = {row["node"]: row["slots"] for row in joined.iter_rows(named=True)}
    streams = frames.in_streams.select("row", "incarnation", "stream").with_row_index("order")
    processes = frames.processes.join(streams, on="row").sort("order")
    living: dict[tuple[int, str], set[str]] = {}
    columns = ("type", "job_id", "node", "replica", "incarnation", "stream", "row")
    for kind, job_id, node, replica, incarnation, stream, row in processes.select(columns).iter_rows():
        here = living.setdefault((stream, node), set())
        if kind == ReplicaExited.__name__:
            if replica not in here:
                yield f"job {job_id}: {replica} exits without having been started {_at(run, row)}"
            here.discard(replica)
            continue
        if replica in here:
            yield f"job {job_id}: {replica} is started while it lives {_at(run, row)}"
        here.add(replica)
        capacity = slots.get((node, incarnation), latest.get(node))
        if capacity is None:
            yield f"node {node}: runs {replica} but never joined {_at(run, row)}"
        elif len(here) > capacity:
            yield (
                f"node {node}: {len(here)} processes in {capacity} slots "
                f"with {replica} of job {job_id} {_at(run, row)}"
            )


def decisions_within_capacity(run: RunHistory) -> Iterator[str]:
    frames = run.frames
    given = frames.allocations.group_by("position", "node").agg(
        pl.col("replicas").sum(), pl.col("row").first()
    )
    there = frames.nodes.select("position", "node", pl.col("slots").fill_null(0))
    known = given.sort("position").join_asof(there, on="position", by="node", check_sortedness=False)
    over = known.with_columns(pl.col("slots").fill_null(0)).filter(pl.col("replicas") > pl.col("slots"))
    rounds = over.join(frames.rounds.select("position", "round"), on="position").sort("position", "node")
    for row in rounds.iter_rows(named=True):
        yield (
            f"round {row['round']} gives away {row['replicas']} slots of node {row['node']}, "
            f"which has {row['slots']} {_at(run, row['row'])}"
        )


# --------------------------------------------------------------------------- the life of a job


def only_submitted_jobs(run: RunHistory) -> Iterator[str]:
    frames = run.frames
    mentions = [
        frame.filter(~pl.col("job_id").is_in(frames.jobs["job_id"].implode())).select(
            "job_id", "position", "row"
        )
        for name, frame in frames.by_name().items()
        if name not in ("events", "jobs", "submissions", "refusals", "allocations")
        and "job_id" in frame.columns
    ]
    unknown = pl.concat(mentions).sort("position", maintain_order=True).unique("job_id", maintain_order=True)
    for job_id, _, row in unknown.iter_rows():
        kind = frames.events["type"][row]
        yield f"job {job_id}: {kind} names it, but it was never submitted {_at(run, row)}"


def submitted_once(run: RunHistory) -> Iterator[str]:
    again = run.frames.submissions.filter(~pl.col("job_id").is_first_distinct())
    for job_id, row in again.select("job_id", "row").iter_rows():
        yield f"job {job_id}: submitted again {_at(run, row)}"


def legal_transitions(run: RunHistory) -> Iterator[str]:
    states: dict[str, str] = {}
    for job_id, old, new, row in run.frames.states.select("job_id", "old", "new", "row").iter_rows():
        state = states.get(job_id, JobState.PENDING)
        if old != state:
            yield f"job {job_id}: is said to leave {old}, but it was {state} {_at(run, row)}"
        elif (old, new) not in LEGAL_CHANGES:
            yield f"job {job_id}: cannot go from {old} to {new} {_at(run, row)}"
        states[job_id] = new


def one_end_a_job(run: RunHistory) -> Iterator[str]:
    """Exactly one end, equal to the last state. Only an ended run must have ended its jobs, except those that
    it names as under way when it was stopped."""
    ends: dict[str, list[tuple[JobState, int]]] = {job_id: [] for job_id in run.jobs}
    for job_id, kind, row in run.frames.ends.select("job_id", "type", "row").iter_rows():
        if job_id in ends:
            ends[job_id].append((END_STATES[kind], row))
    last_states = dict(run.frames.states.select("job_id", "new").iter_rows())
    for job_id, of_job in ends.items():
        state = JobState(last_states.get(job_id, JobState.PENDING))
        kinds = [kind for kind, _ in of_job]
        if len(kinds) > 1:
            yield f"job {job_id}: ends {len(kinds)} times, as {', '.join(kinds)} {_at(run, of_job[-1][1])}"
        elif not kinds and run.ended and job_id not in run.active_at_end:
            yield f"job {job_id}: has no end though the run has ended; it is {state}"
        elif kinds and kinds[0] is not state and (state.terminal or run.ended):
            yield f"job {job_id}: ends as {kinds[0]} but is {state} {_at(run, of_job[0][1])}"


def monotone_progress(run: RunHistory) -> Iterator[str]:
    """Progress, steps and examples of a job never go back, except where a generation says that work was lost,
    or that its state is from disk or new."""
    reports = _progress_reports(run)
    resumes = reports["resumes"].to_numpy()
    progress = reports["progress"].to_numpy()
    before = reports["progress_before"].to_numpy()
    went_back = reports.select(
        steps=(pl.col("total_steps") < pl.col("steps_before"))
        | (pl.col("total_examples") < pl.col("examples_before"))
    )["steps"].fill_null(False)
    with np.errstate(all="ignore"):
        lower = progress < before - PROGRESS_TOLERANCE * np.maximum(np.abs(before), 1.0)
    finite = np.isfinite(progress)
    suspects = reports.filter(pl.Series(went_back.to_numpy() | ~finite | (lower & ~resumes)))
    for report in suspects.iter_rows(named=True):
        who, where = f"job {report['job_id']}", _at(run, report["row"])
        steps, examples = report["total_steps"], report["total_examples"]
        if steps is not None and (steps < report["steps_before"] or examples < report["examples_before"]):
            yield (
                f"{who}: steps and examples go back from {report['steps_before']} and "
                f"{report['examples_before']} to {steps} and {examples} {where}"
            )
        now, earlier = report["progress"], report["progress_before"]
        if not np.isfinite(now):
            yield f"{who}: progress is {now} {where}"
        elif not report["resumes"] and now < earlier - PROGRESS_TOLERANCE * max(abs(earlier), 1.0):
            yield f"{who}: progress goes back from {earlier:.6g} to {now:.6g} {where}"


def _progress_reports(run: RunHistory) -> pl.DataFrame:
    """Samples and starts of generations by job, with the progress, steps and examples that were known before.
    `resumes`: a generation that may start behind, from where work is counted again."""
    frames = run.frames
    place = ("row", "position", "job_id", "generation", "progress")
    lost = (pl.col("progress_lost") > 0) | pl.col("state_from").is_in(["checkpoint", "scratch"])
    starts = frames.generations.select(*place, resumes=lost)
    samples = frames.samples.select(*place, "total_steps", "total_examples", resumes=pl.lit(False))
    reports = pl.concat([samples, starts], how="diagonal").with_columns(
        job=pl.col("job_id").cast(pl.Categorical).to_physical()
    )
    reports = reports.sort("job", "generation", "position")
    # Numbers that are not finite are reported, and not remembered unless work resumes from them.
    known = pl.when(pl.col("progress").is_finite() | pl.col("resumes")).then("progress")
    totals = [
        pl.when(pl.col("resumes"))
        .then(0)
        .otherwise(pl.col(name))
        .forward_fill()
        .shift(1, fill_value=0)
        .over("job")
        for name in ("total_steps", "total_examples")
    ]
    return reports.with_columns(
        progress_before=known.forward_fill().shift(1).over("job").fill_null(0.0),
        steps_before=totals[0].fill_null(0),
        examples_before=totals[1].fill_null(0),
    )


# --------------------------------------------------------------------------- completions


def _completions(run: RunHistory) -> Iterator[tuple[dict[str, Any], JobHistory]]:
    """The rows of the completions of jobs that were submitted."""
    completions = run.frames.ends.filter(pl.col("type") == JobCompleted.__name__)
    for row in completions.iter_rows(named=True):
        if row["job_id"] in run.jobs:
            yield row, run.jobs[row["job_id"]]


def completions_verified(run: RunHistory) -> Iterator[str]:
    verdicts: dict[str, list[dict[str, Any]]] = {}
    for row in run.frames.verifications.iter_rows(named=True):
        verdicts.setdefault(row["job_id"], []).append(row)
    for completed, job in _completions(run):
        who, row = f"job {job.spec.id}", completed["row"]
        if not completed["verified"]:
            yield f"{who}: completed without verification {_at(run, row)}"
            continue
        until_s = completed["time_s"] + CLOCK_TOLERANCE_S
        earlier = [verdict for verdict in verdicts.get(job.spec.id, []) if verdict["time_s"] <= until_s]
        if not earlier:
            yield f"{who}: completed before any verifier had reported {_at(run, row)}"
            continue
        verdict = earlier[-1]
        if not verdict["ok"] or verdict["findings"]:
            found = "; ".join(verdict["findings"])
            yield f"{who}: completed though its verifier found: {found} {_at(run, row)}"
            continue
        for name, other in (
            ("reported", verdict["reported_metric"]),
            ("completed with", completed["metric"]),
        ):
            if not abs(verdict["metric"] - other) <= METRIC_TOLERANCE:
                yield (
                    f"{who}: its verifier measured {verdict['metric']:.6g}, but {other:.6g} was {name} "
                    f"{_at(run, verdict['row'])}"
                )


def completions_meet_target(run: RunHistory) -> Iterator[str]:
    """A log does not say whether an application's target is reached from above or from below; its evaluations
    do: each was either short of the target or had reached it."""
    jobs = run.frames.jobs.select("job_id", "application", "target")
    judged = run.frames.evaluations.join(jobs, on="job_id", maintain_order="left").filter(
        pl.col("metric").is_finite() & (pl.col("metric") != pl.col("target"))
    )
    from_below = pl.col("reached") == (pl.col("metric") > pl.col("target"))
    judged = judged.with_columns(mode=pl.when(from_below).then(pl.lit("max")).otherwise(pl.lit("min")))
    first = pl.col("mode").first().over("application")
    for row in judged.filter(pl.col("mode") != first).iter_rows(named=True):
        yield (
            f"job {row['job_id']}: an evaluation of {row['metric']:.6g} at progress {row['progress']:.6g} "
            f"is said to have {'' if row['reached'] else 'not '}reached {row['target']:.6g}, "
            f"against the others of {row['application']}"
        )
    modes = dict(judged.unique("application", keep="first").select("application", "mode").iter_rows())
    for completed, job in _completions(run):
        target, reached = job.spec.target, completed["metric"]
        short = {"max": target - reached, "min": reached - target}
        if not short.get(modes.get(job.spec.application, ""), 0.0) <= METRIC_TOLERANCE:
            yield (
                f"job {job.spec.id}: completed with {reached:.6g}, short of its target {target:.6g} "
                f"{_at(run, completed['row'])}"
            )


def completions_last_as_long_as_they_ran(run: RunHistory) -> Iterator[str]:
    samples = run.frames.samples.select("job_id", "window_s")
    trained_s = dict(samples.group_by("job_id").agg(pl.col("window_s").sum()).iter_rows())
    for completed, job in _completions(run):
        jct_s, running_s = completed["time_s"] - job.submitted_s, trained_s.get(job.spec.id, 0.0)
        if running_s > jct_s * (1 + RUNNING_TOLERANCE):
            yield (
                f"job {job.spec.id}: trained for {running_s:.6g} s, longer than its completion time of "
                f"{jct_s:.6g} s {_at(run, completed['row'])}"
            )


RULES: tuple[Callable[[RunHistory], Iterator[str]], ...] = (
    one_run,
    complete_sequences,
    no_repetitions,
    steady_clocks,
    nodes_within_capacity,
    decisions_within_capacity,
    only_submitted_jobs,
    submitted_once,
    legal_transitions,
    one_end_a_job,
    monotone_progress,
    completions_verified,
    completions_meet_target,
    completions_last_as_long_as_they_ran,
)
