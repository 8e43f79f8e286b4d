"""Lifecycle times of real jobs, read from the log of a run."""

import pytest
from msgspec.structs import replace

from common.protocol import (
    CheckpointSaved,
    Evaluated,
    Event,
    EventRecord,
    GenerationStarted,
    JobCompleted,
    JobStateChanged,
    ReplicaExited,
    VerificationStarted,
)
from common.types import JobConfig, JobState
from services.calibration.calibration_plan import LifecycleTimes
from services.calibration.job_costs import read_lifecycles


def test_lifecycle_times_are_read_from_the_log_of_a_run():
    started = GenerationStarted(
        job_id="a",
        generation=1,
        old_replicas=0,
        allocation=(),
        config=JobConfig(atomic_batch=16),
        state_from="scratch",
        seconds_lost=0.0,
        progress=1.0,
        first_step_s=0.5,
    )
    saved = CheckpointSaved(
        job_id="a", path="", digest="", size_bytes=1, save_s=0.1, progress=1.0, reason="final"
    )
    events: list[tuple[float, Event]] = [
        (10.0, JobStateChanged(job_id="a", old=JobState.PENDING, new=JobState.STARTING, reason="")),
        (12.0, started),
        (14.0, replace(saved, reason="periodic")),
        (20.0, Evaluated(job_id="a", progress=1.0, step=1, metric=1.0, reached=True)),
        (20.3, saved),
        (20.5, ReplicaExited(job_id="a", node="n", replica="n-1", exit_code=0)),
        (21.0, VerificationStarted(job_id="a", node="n", replica="n-2", pid=1)),
        (21.8, ReplicaExited(job_id="a", node="n", replica="n-2", exit_code=0)),
        (22.0, JobCompleted(job_id="a", verified=True, metric=1.0, progress=1.0)),
        (23.0, started),
    ]
    records = [
        EventRecord(run_id="r", source="s", incarnation="i", seq=n, t_s=0.0, wall_s=t, event=event)
        for n, (t, event) in enumerate(events, start=1)
    ]
    life = read_lifecycles(records)["a"]
    assert life == LifecycleTimes(
        start_s=1.5, save_s=pytest.approx(0.3), exit_s=pytest.approx(0.2), verify_s=1.0
    )
