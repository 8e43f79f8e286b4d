"""Replay a log and say what in it cannot be true of a run that went right.

Pure. Each rule yields sentences that name the job or source and the line. Within a source the order is
that of seq; between sources it is that of time on one clock (`analysis.log.history`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from analysis.log.history import END_STATES, JobHistory, Line, Replay
from common.eventlog import find_gaps
from common.job_states import TRANSITIONS
from common.protocol import (
    METRIC_TOLERANCE,
    AgentJoined,
    AgentLeft,
    Event,
    EventsDropped,
    GenerationStarted,
    JobCancelled,
    JobCompleted,
    JobFailed,
    JobRefused,
    JobStateChanged,
    JobSubmitted,
    ReplicaExited,
    ReplicaStarted,
    RoundDecided,
    TrainingSample,
    VerificationStarted,
    Verified,
)
from common.types import JobState, Struct

MAX_FINDINGS_A_RULE = 20
PROGRESS_TOLERANCE = 1e-6
"""Relative; progress is a float that is broadcast at a regrouping."""
CLOCK_TOLERANCE_S = 1.0
"""By how much the clocks of two machines may differ after `analysis.log.history` has aligned them."""
RUNNING_TOLERANCE = 1e-3
"""Relative; two clocks measured the running time and the completion time."""

LEGAL_CHANGES = {(old, new) for (old, _), new in TRANSITIONS.items() if old is not new}


class Audit(Struct, frozen=True):
    """`ok` exactly when `findings` is empty. `gaps` counts the events that are missing."""

    ok: bool
    events: int
    gaps: int
    findings: tuple[str, ...]


def audit(log: Replay, fault: str = "") -> Audit:
    """Judge a log; `fault` is why it could not be read to its end ("" where it could)."""
    findings = [fault] if fault else []
    for rule in RULES:
        found = list(rule(log))
        findings += found[:MAX_FINDINGS_A_RULE]
        if len(found) > MAX_FINDINGS_A_RULE:
            findings.append(f"... and {len(found) - MAX_FINDINGS_A_RULE} more like the last one")
    return Audit(ok=not findings, events=len(log.records), gaps=count_gaps(log), findings=tuple(findings))


def _at(line: Line) -> str:
    return f"(line {line.number}, {line.record.source} #{line.record.seq})"


def _job_id(event: Event) -> str | None:
    return getattr(event, "job_id", None)


# --------------------------------------------------------------------------- the log itself


def one_run(log: Replay) -> Iterator[str]:
    first = log.records[0].run_id if log.records else ""
    for number, record in enumerate(log.records, start=1):
        if record.run_id != first:
            yield f"line {number} is of run {record.run_id}, the log is of run {first}"


def _dropped(log: Replay) -> Iterator[tuple[Line, EventsDropped]]:
    for line in log.lines:
        if isinstance(line.event, EventsDropped):
            yield line, line.event


def count_gaps(log: Replay) -> int:
    """Events missing from 1 to the last one known of each (source, incarnation)."""
    last = {key: lines[-1].record.seq for key, lines in log.streams.items()}
    for _, event in _dropped(log):
        key = (event.source, event.incarnation)
        last[key] = max(last.get(key, 0), event.last_seq)
    present = {key: sum(line.record.seq >= 1 for line in lines) for key, lines in log.streams.items()}
    return sum(max(seq - present.get(key, 0), 0) for key, seq in last.items())


def complete_sequences(log: Replay) -> Iterator[str]:
    for (source, incarnation), ranges in find_gaps(log.records).items():
        for first, last in ranges:
            missing = f"event {first} is" if first == last else f"events {first} to {last} are"
            yield f"{source} ({incarnation}): {missing} missing"
    for number, record in enumerate(log.records, start=1):
        if record.seq < 1:
            yield f"{record.source}: an event has number {record.seq} (line {number}); they start at 1"
    for line, event in _dropped(log):
        lost = f"events {event.first_seq} to {event.last_seq} were dropped"
        yield f"{event.source} ({event.incarnation}): {lost} {_at(line)}"


def no_repetitions(log: Replay) -> Iterator[str]:
    kept = {line.number for lines in log.streams.values() for line in lines}
    if len(kept) == len(log.records):
        return
    for number, record in enumerate(log.records, start=1):
        if number not in kept:
            yield f"{record.source} ({record.incarnation}): event {record.seq} stands again in line {number}"


def steady_clocks(log: Replay) -> Iterator[str]:
    for (source, incarnation), lines in log.streams.items():
        for before, line in pairwise(lines):
            if line.record.t_s < before.record.t_s:
                back_s = before.record.t_s - line.record.t_s
                yield f"{source} ({incarnation}): its clock goes back by {back_s:.6g} s {_at(line)}"


# --------------------------------------------------------------------------- slots


def nodes_within_capacity(log: Replay) -> Iterator[str]:
    """Replicas and verifiers that live on a node, by its agent's own order of events, against its slots.

    An agent that is started anew begins with none: its processes die with it.
    """
    slots: dict[tuple[str, str], int] = {}
    latest: dict[str, int] = {}
    for line in log.lines:
        if isinstance(line.event, AgentJoined):
            node = line.event.node
            slots[node.name, line.event.incarnation] = latest[node.name] = node.slots
    for (_, incarnation), lines in log.streams.items():
        living: dict[str, set[str]] = {}
        for line in lines:
            event = line.event
            if isinstance(event, ReplicaStarted | VerificationStarted):
                here = living.setdefault(event.node, set())
                if event.replica in here:
                    yield f"job {event.job_id}: {event.replica} is started while it lives {_at(line)}"
                here.add(event.replica)
                capacity = slots.get((event.node, incarnation), latest.get(event.node))
                if capacity is None:
                    yield f"node {event.node}: runs {event.replica} but never joined {_at(line)}"
                elif len(here) > capacity:
                    yield (
                        f"node {event.node}: {len(here)} processes in {capacity} slots "
                        f"with {event.replica} of job {event.job_id} {_at(line)}"
                    )
            elif isinstance(event, ReplicaExited):
                here = living.setdefault(event.node, set())
                if event.replica not in here:
                    yield f"job {event.job_id}: {event.replica} exits without having been started {_at(line)}"
                here.discard(event.replica)


def decisions_within_capacity(log: Replay) -> Iterator[str]:
    slots: dict[str, int] = {}
    for line in log.lines:
        event = line.event
        if isinstance(event, AgentJoined):
            slots[event.node.name] = event.node.slots
        elif isinstance(event, AgentLeft):
            slots.pop(event.node, None)
        elif isinstance(event, RoundDecided):
            given: dict[str, int] = {}
            for allocation in event.allocations.values():
                for placement in allocation:
                    given[placement.node] = given.get(placement.node, 0) + placement.replicas
            for node, replicas in given.items():
                if replicas > slots.get(node, 0):
                    yield (
                        f"round {event.round} gives away {replicas} slots of node {node}, "
                        f"which has {slots.get(node, 0)} {_at(line)}"
                    )


# --------------------------------------------------------------------------- the life of a job


def only_submitted_jobs(log: Replay) -> Iterator[str]:
    strangers: dict[str, Line] = {}
    for line in log.lines:
        event = line.event
        if isinstance(event, JobRefused):
            continue
        job_id = _job_id(event)
        named: Iterable[str] = (
            event.allocations if isinstance(event, RoundDecided) else (job_id,) if job_id else ()
        )
        for name in named:
            if name not in log.run.jobs:
                strangers.setdefault(name, line)
    for name, line in strangers.items():
        yield f"job {name}: {type(line.event).__name__} names it, but it was never submitted {_at(line)}"


def submitted_once(log: Replay) -> Iterator[str]:
    seen: set[str] = set()
    for line in log.lines:
        if isinstance(line.event, JobSubmitted):
            job_id = line.event.spec.id
            if job_id in seen:
                yield f"job {job_id}: submitted again {_at(line)}"
            seen.add(job_id)


def legal_transitions(log: Replay) -> Iterator[str]:
    states: dict[str, JobState] = {}
    for line in log.lines:
        event = line.event
        if isinstance(event, JobStateChanged):
            state = states.get(event.job_id, JobState.PENDING)
            if event.old is not state:
                yield f"job {event.job_id}: is said to leave {event.old}, but it was {state} {_at(line)}"
            elif (event.old, event.new) not in LEGAL_CHANGES:
                yield f"job {event.job_id}: cannot go from {event.old} to {event.new} {_at(line)}"
            states[event.job_id] = event.new


def one_end_a_job(log: Replay) -> Iterator[str]:
    """Exactly one end, equal to the last state. Only an ended run has to have ended its jobs, but for those
    that it names as under way when it was stopped."""
    ends: dict[str, list[Line]] = {job_id: [] for job_id in log.run.jobs}
    states: dict[str, JobState] = {}
    for line in log.lines:
        event = line.event
        if isinstance(event, JobCompleted | JobFailed | JobCancelled) and event.job_id in ends:
            ends[event.job_id].append(line)
        elif isinstance(event, JobStateChanged):
            states[event.job_id] = event.new
    for job_id, lines in ends.items():
        state = states.get(job_id, JobState.PENDING)
        kinds = [END_STATES[type(line.event)] for line in lines]
        if len(kinds) > 1:
            yield f"job {job_id}: ends {len(kinds)} times, as {', '.join(kinds)} {_at(lines[-1])}"
        elif not kinds and log.run.ended and job_id not in log.run.active_at_end:
            yield f"job {job_id}: has no end though the run has ended; it is {state}"
        elif kinds and kinds[0] is not state and (state.terminal or log.run.ended):
            yield f"job {job_id}: ends as {kinds[0]} but is {state} {_at(lines[0])}"


def monotone_progress(log: Replay) -> Iterator[str]:
    """Progress, steps and examples of a job never go back, but where a generation says that work was lost,
    or that its state is from disk or new."""
    by_job: dict[str, list[Line]] = {}
    for line in log.lines:
        if isinstance(line.event, TrainingSample | GenerationStarted):
            by_job.setdefault(line.event.job_id, []).append(line)
    for job_id, lines in by_job.items():
        progress, steps, examples = 0.0, 0, 0
        # Rank 0 moves between nodes: generations order its reports, whatever the nodes' clocks say.
        for line in sorted(lines, key=_generation):
            event = line.event
            if isinstance(event, GenerationStarted):
                if event.progress_lost > 0 or event.state_from in ("checkpoint", "scratch"):
                    progress, steps, examples = event.progress, 0, 0
            elif isinstance(event, TrainingSample):
                if event.total_steps < steps or event.total_examples < examples:
                    yield (
                        f"job {job_id}: steps and examples go back from {steps} and {examples} "
                        f"to {event.total_steps} and {event.total_examples} {_at(line)}"
                    )
                steps, examples = event.total_steps, event.total_examples
            else:
                continue
            now = event.progress
            if not math.isfinite(now):
                yield f"job {job_id}: progress is {now} {_at(line)}"
                continue
            if now < progress - PROGRESS_TOLERANCE * max(abs(progress), 1.0):
                yield f"job {job_id}: progress goes back from {progress:.6g} to {now:.6g} {_at(line)}"
            progress = now


def _generation(line: Line) -> int:
    generation: int = getattr(line.event, "generation", 0)
    return generation


# --------------------------------------------------------------------------- completions


def _completions(log: Replay) -> Iterator[tuple[Line, JobCompleted, JobHistory]]:
    for line in log.lines:
        if isinstance(line.event, JobCompleted) and line.event.job_id in log.run.jobs:
            yield line, line.event, log.run.jobs[line.event.job_id]


def completions_verified(log: Replay) -> Iterator[str]:
    verdicts: dict[str, list[Line]] = {}
    for line in log.lines:
        if isinstance(line.event, Verified):
            verdicts.setdefault(line.event.job_id, []).append(line)
    for line, completed, _ in _completions(log):
        who = f"job {completed.job_id}"
        if not completed.verified:
            yield f"{who}: completed without verification {_at(line)}"
            continue
        earlier = [v for v in verdicts.get(completed.job_id, []) if v.t_s <= line.t_s + CLOCK_TOLERANCE_S]
        verdict = earlier[-1].event if earlier else None
        if not isinstance(verdict, Verified):
            yield f"{who}: completed, but no verifier had said anything {_at(line)}"
        elif not verdict.ok or verdict.findings:
            yield f"{who}: completed though its verifier found: {'; '.join(verdict.findings)} {_at(line)}"
        else:
            for name, other in (
                ("reported", verdict.reported_metric),
                ("completed with", completed.metric),
            ):
                if not abs(verdict.metric - other) <= METRIC_TOLERANCE:
                    yield (
                        f"{who}: its verifier measured {verdict.metric:.6g}, but {other:.6g} was {name} "
                        f"{_at(earlier[-1])}"
                    )


def completions_meet_target(log: Replay) -> Iterator[str]:
    """A log does not say whether an application's target is reached from above or from below; its
    evaluations do: each was either short of the target or had reached it."""
    directions: dict[str, str] = {}
    for job in log.run.jobs.values():
        target = job.spec.target
        for evaluated in job.evaluations:
            if evaluated.metric == target or not math.isfinite(evaluated.metric):
                continue
            direction = "max" if evaluated.reached == (evaluated.metric > target) else "min"
            if directions.setdefault(job.spec.application, direction) != direction:
                yield (
                    f"job {job.spec.id}: an evaluation of {evaluated.metric:.6g} at progress "
                    f"{evaluated.progress:.6g} is said to have {'' if evaluated.reached else 'not '}reached "
                    f"{target:.6g}, against the others of {job.spec.application}"
                )
    for line, completed, job in _completions(log):
        direction = directions.get(job.spec.application, "")
        short = {"max": job.spec.target - completed.metric, "min": completed.metric - job.spec.target}
        if not short.get(direction, 0.0) <= METRIC_TOLERANCE:
            yield (
                f"job {job.spec.id}: completed with {completed.metric:.6g}, short of its target "
                f"{job.spec.target:.6g} {_at(line)}"
            )


def completions_last_as_long_as_they_ran(log: Replay) -> Iterator[str]:
    for line, completed, job in _completions(log):
        jct_s = line.t_s - job.submitted_s
        running_s = sum(sample.window_s for _, sample in job.samples)
        if running_s > jct_s * (1 + RUNNING_TOLERANCE):
            yield (
                f"job {completed.job_id}: trained for {running_s:.6g} s, longer than its completion time of "
                f"{jct_s:.6g} s {_at(line)}"
            )


RULES: tuple[Callable[[Replay], Iterator[str]], ...] = (
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
