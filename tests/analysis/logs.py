"""Logs made by hand from the real protocol structs, with figures that a person can check.

`good_run()` is one run of two jobs on two nodes. Times below are on the scheduler's clock; every agent and
the collector has a clock of its own, and all agree on the wall clock.

    t     a (completes)                               b (is cancelled)
    100   nodes n0 and n1 join, 2 slots each
    110   submitted
    112   1 replica on n0                             submitted
    116   2 replicas, n0 and n1                       1 replica on n0
    122   verified on n0
    124   completed
    126                                               cancelled
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from common.eventlog import encode_line
from common.protocol import (
    AgentJoined,
    CheckpointSaved,
    Evaluated,
    Event,
    EventRecord,
    GenerationStarted,
    JobCancelled,
    JobCompleted,
    JobStateChanged,
    JobSubmitted,
    ModelFitted,
    ReplicaExited,
    ReplicaStarted,
    RoundDecided,
    RunEnded,
    RunStarted,
    TrainingSample,
    VerificationStarted,
    Verified,
)
from common.types import (
    Allocation,
    GradientStatistics,
    JobConfig,
    JobSpec,
    JobState,
    Node,
    Placement,
    ThroughputParameters,
)

RUN_ID = "20260101-120000-pollux"
CLOCK_AHEAD_S = {"scheduler": 0.0, "collector": 300.0, "agent-n0": 5000.0, "agent-n1": -50.0}
WALL_AHEAD_S = 1_000_000.0
N0, N1 = Placement(node="n0", replicas=1), Placement(node="n1", replicas=1)
BATCH_16 = JobConfig(atomic_batch=16)
STATISTICS = GradientStatistics(sqr=0.5, var=1.0)
"""Gain at scale 2: (1 + 0.5) / (1 / 2 + 0.5) = 1.5."""
PARAMETERS = ThroughputParameters(
    alpha_c=1e-12, beta_c=0.01, alpha_n=0.04, beta_n=0.0, alpha_r=0.02, beta_r=0.0, gamma=1.0
)
"""Seconds of a step: 0.01 an example of a replica, + 0.02 within a node or + 0.04 across."""


@dataclass(frozen=True)
class Happening:
    """An event, who tells it, and when on the scheduler's clock."""

    source: str
    t_s: float
    event: Event


def spec(job_id: str, **fields: object) -> JobSpec:
    values: dict[str, object] = {
        "id": job_id,
        "application": "digits-cnn",
        "seed": 1,
        "target": 0.95,
        "max_progress": 1000.0,
        "replicas": 1,
        "batch_size": 16,
        "min_batch_size": 16,
        "max_batch_size": 128,
        "min_atomic_batch": 4,
        "max_atomic_batch": 64,
        "max_replicas": 4,
    }
    return JobSpec(**(values | fields))  # type: ignore[arg-type]


def sample(
    job_id: str, generation: int, window_s: float, replicas: int = 1, **fields: object
) -> TrainingSample:
    values: dict[str, object] = {
        "job_id": job_id,
        "generation": generation,
        "nodes": replicas,
        "replicas": replicas,
        "config": BATCH_16,
        "window_s": window_s,
        "steps": 20,
        "timed_steps": 20,
        "accumulation_s": 0.08,
        "step_s": 0.1,
        "sync_s": 0.0,
        "epoch": 0,
        "loss": 0.5,
        "gain": 1.0,
        "statistics": STATISTICS,
    }
    return TrainingSample(**(values | fields))  # type: ignore[arg-type]


def decided(number: int, allocations: dict[str, Allocation]) -> RoundDecided:
    return RoundDecided(
        round=number,
        trigger="interval",
        allocations=allocations,
        configs=dict.fromkeys(allocations, BATCH_16),
        reasons=dict.fromkeys(allocations, "its turn"),
    )


def changed(job_id: str, old: str, new: str) -> JobStateChanged:
    return JobStateChanged(job_id=job_id, old=JobState(old), new=JobState(new), reason="so it went")


def generation(job_id: str, number: int, allocation: Allocation, **fields: object) -> GenerationStarted:
    values: dict[str, object] = {
        "job_id": job_id,
        "generation": number,
        "old_replicas": 0,
        "allocation": allocation,
        "config": BATCH_16,
        "state_from": "survivor",
        "seconds_lost": 0.25,
        "progress": 0.0,
    }
    return GenerationStarted(**(values | fields))  # type: ignore[arg-type]


def evaluated(job_id: str, progress: float, metric: float, reached: bool) -> Evaluated:
    return Evaluated(job_id=job_id, progress=progress, step=0, metric=metric, reached=reached)


def verified(job_id: str, metric: float, reported: float, findings: tuple[str, ...] = ()) -> Verified:
    return Verified(
        job_id=job_id,
        ok=not findings,
        metric=metric,
        reported_metric=reported,
        epochs=1,
        findings=findings,
    )


def saved(job_id: str, progress: float) -> CheckpointSaved:
    return CheckpointSaved(
        job_id=job_id, path="c", digest="d", size_bytes=1, save_s=0.01, progress=progress, reason="final"
    )


def joined(node: str, slots: int = 2) -> AgentJoined:
    return AgentJoined(node=Node(name=node, slots=slots, slot_speed=0.2), incarnation="i1")


def started(job_id: str, node: str, replica: str, generation: int) -> ReplicaStarted:
    return ReplicaStarted(job_id=job_id, node=node, replica=replica, pid=1, generation=generation)


def exited(job_id: str, node: str, replica: str) -> ReplicaExited:
    return ReplicaExited(job_id=job_id, node=node, replica=replica, exit_code=0)


def scheduler_tells() -> list[Happening]:
    told: list[tuple[float, Event]] = [
        (100.0, RunStarted(policy="pollux", workload="demo.toml", seed=7, round_s=2.0, version="0")),
        (100.0, joined("n0")),
        (100.0, joined("n1")),
        (110.0, JobSubmitted(spec=spec("a"))),
        (112.0, JobSubmitted(spec=spec("b"))),
        (112.0, decided(1, {"a": (N0,)})),
        (112.0, changed("a", "pending", "starting")),
        (113.0, changed("a", "starting", "running")),
        (116.0, decided(2, {"a": (N0, N1), "b": (N0,)})),
        (116.0, changed("b", "pending", "starting")),
        (117.5, changed("b", "starting", "running")),
        (122.0, changed("a", "running", "verifying")),
        (122.0, decided(3, {"b": (N0,)})),
        (124.0, changed("a", "verifying", "completed")),
        (124.0, JobCompleted(job_id="a", verified=True, metric=0.96, progress=80.0)),
        (126.0, changed("b", "running", "cancelled")),
        (126.0, JobCancelled(job_id="b")),
        (127.0, RunEnded(reason="stopped")),
    ]
    return [Happening("scheduler", t_s, event) for t_s, event in told]


def nodes_tell() -> list[Happening]:
    totals = {"total_steps": 20, "total_examples": 320, "progress": 20.0}
    told: list[tuple[str, float, Event]] = [
        ("agent-n0", 112.5, started("a", "n0", "n0-1", 1)),
        ("agent-n0", 113.0, generation("a", 1, (N0,), state_from="scratch", seconds_lost=0.5)),
        ("agent-n0", 115.0, sample("a", 1, 2.0, **totals)),
        ("agent-n1", 116.5, started("a", "n1", "n1-1", 2)),
        ("agent-n0", 116.5, started("b", "n0", "n0-2", 1)),
        ("agent-n0", 117.0, generation("a", 2, (N0, N1), old_replicas=1, progress=21.5)),
        ("agent-n0", 117.5, generation("b", 1, (N0,), state_from="scratch", seconds_lost=0.5)),
        (
            "agent-n0",
            119.0,
            sample("a", 2, 2.0, 2, total_steps=40, total_examples=960, progress=50.0, gain=1.5),
        ),
        ("agent-n0", 119.0, evaluated("a", 50.0, 0.90, False)),
        ("agent-n0", 120.0, sample("b", 1, 3.0, total_steps=30, total_examples=480, progress=30.0)),
        (
            "agent-n0",
            121.0,
            sample("a", 2, 2.0, 2, total_steps=60, total_examples=1600, progress=80.0, gain=1.5),
        ),
        ("agent-n0", 121.0, evaluated("a", 80.0, 0.96, True)),
        ("agent-n0", 121.5, saved("a", 80.0)),
        ("agent-n0", 122.0, exited("a", "n0", "n0-1")),
        ("agent-n1", 122.0, exited("a", "n1", "n1-1")),
        ("agent-n0", 122.5, VerificationStarted(job_id="a", node="n0", replica="n0-3", pid=1)),
        ("agent-n0", 123.5, verified("a", 0.96, 0.96)),
        ("agent-n0", 123.5, exited("a", "n0", "n0-3")),
        ("agent-n0", 126.5, exited("b", "n0", "n0-2")),
        (
            "collector",
            118.0,
            ModelFitted(
                job_id="a", parameters=PARAMETERS, statistics=STATISTICS, error=0.01, points=2, fit_s=0.005
            ),
        ),
    ]
    return [Happening(source, t_s, event) for source, t_s, event in told]


def good_run() -> list[Happening]:
    return sorted(scheduler_tells() + nodes_tell(), key=lambda happening: happening.t_s)


def written(happenings: Iterable[Happening], run_id: str = RUN_ID) -> list[EventRecord]:
    """The records of a log in that order, numbered a source from 1."""
    numbers: dict[str, int] = {}
    records = []
    for happening in happenings:
        numbers[happening.source] = numbers.get(happening.source, 0) + 1
        records.append(
            EventRecord(
                run_id=run_id,
                source=happening.source,
                incarnation="i1",
                seq=numbers[happening.source],
                t_s=happening.t_s + CLOCK_AHEAD_S.get(happening.source, 0.0),
                wall_s=happening.t_s + WALL_AHEAD_S,
                event=happening.event,
            )
        )
    return records


def without(happenings: Iterable[Happening], *events: Event) -> list[Happening]:
    return [happening for happening in happenings if happening.event not in events]


def swap(happenings: Iterable[Happening], old: Event, new: Event) -> list[Happening]:
    """With `new` told in the place of `old`, which must be there."""
    changed_run = [replace(h, event=new) if h.event == old else h for h in happenings]
    assert any(happening.event == new for happening in changed_run)
    return changed_run


def add(happenings: Iterable[Happening], source: str, t_s: float, *events: Event) -> list[Happening]:
    extra = [Happening(source, t_s, event) for event in events]
    return sorted([*happenings, *extra], key=lambda happening: happening.t_s)


def only(happenings: Iterable[Happening], kind: type, job_id: str, nth: int = 0) -> Event:
    """The nth event of that kind about that job."""
    of_kind = [h.event for h in happenings if isinstance(h.event, kind) and h.event.job_id == job_id]
    return of_kind[nth]


def save(records: Iterable[EventRecord], run_dir: Path) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "events.jsonl"
    path.write_bytes(b"".join(encode_line(record) for record in records))
    return path
