"""How long the start and the end of a real job take on a whole stack: from its slots to its first step, and
from its target to its verified completion. All jobs get easy targets, because only starts and ends matter."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from common.config import Config
from common.eventlog import EVENTS_FILE, read_events
from common.protocol import (
    CheckpointSaved,
    Evaluated,
    EventRecord,
    GenerationStarted,
    JobAccepted,
    JobCompleted,
    JobStateChanged,
    ReplicaExited,
    SubmitJob,
    VerificationStarted,
)
from common.types import ApplicationSpec, JobState
from services.bench.agent_cluster import BenchError
from services.calibration.calibration_plan import LifecycleTimes, easiest_target
from services.launcher.client import Client
from services.launcher.stack import Stack
from workloads.files.workload_file import JobFields, complete_spec

RUN_ID = "lifecycles"
POLL_S = 0.1
JOBS_S = 180.0
"""Timeout for all jobs together."""


def measure_lifecycles(
    config: Config, applications: Sequence[ApplicationSpec], jobs: int
) -> dict[str, list[LifecycleTimes]]:
    """Run `jobs` jobs of one replica, of the applications in turn, first come first served. Returns the times
    of all jobs, by application. Raises BenchError if a job does not complete, and StackError."""
    replace = msgspec.structs.replace
    known = {application.name: application for application in applications}
    specs = [
        complete_spec(
            JobFields(application=application.name, target=easiest_target(application)),
            known,
            f"{application.name}-{number}",
            number,
        )
        for number, application in ((n, applications[n % len(applications)]) for n in range(jobs))
    ]
    with TemporaryDirectory(prefix="coadapt-calibrate-") as folder:
        config = replace(
            config,
            run=replace(config.run, logs_dir=folder, run_id=RUN_ID),
            scheduler=replace(config.scheduler, policy="fixed"),
            collector=replace(config.collector, memory=False),
        )
        with Stack(config, os.environ) as stack, Client(stack.config) as client:
            for spec in specs:
                client.ask(SubmitJob(spec=spec), JobAccepted)
            end_s = time.monotonic() + JOBS_S
            while not all(job.state.terminal for job in stack.jobs().jobs):
                if time.monotonic() > end_s:
                    raise BenchError(f"{jobs} jobs with easy targets did not end in {JOBS_S:g} s")
                time.sleep(POLL_S)
            failed = [job for job in stack.jobs().jobs if job.state is not JobState.COMPLETED]
            if failed:
                raise BenchError(f"{failed[0].id}: {failed[0].state}: {failed[0].reason}")
        times = read_lifecycles(read_events(Path(folder) / RUN_ID / EVENTS_FILE))
    by_application: dict[str, list[LifecycleTimes]] = {}
    for spec in specs:
        by_application.setdefault(spec.application, []).append(times[spec.id])
    return by_application


def read_lifecycles(records: Iterable[EventRecord]) -> dict[str, LifecycleTimes]:
    """The times of every completed job of one replica, by job. They are read from the wall clock, because the
    events come from several processes."""
    seen: dict[tuple[str, str], float] = {}
    completed_s: dict[str, float] = {}
    for record in records:
        t_s, event = record.wall_s, record.event
        match event:
            case JobStateChanged(new=JobState.STARTING):
                seen.setdefault((event.job_id, "ordered"), t_s)
            case GenerationStarted():
                seen.setdefault((event.job_id, "started"), t_s - event.first_step_s)
            case Evaluated(reached=True):
                seen[event.job_id, "reached"] = t_s
            case CheckpointSaved(reason="final"):
                seen[event.job_id, "saved"] = t_s
            case ReplicaExited():  # the first is the replica, a later one the verifier
                seen.setdefault((event.job_id, "exited"), t_s)
            case VerificationStarted():
                seen[event.job_id, "verifying"] = t_s
            case JobCompleted():
                completed_s[event.job_id] = t_s

    def between(job_id: str, start: str, end: str) -> float:
        return max(seen[job_id, end] - seen[job_id, start], 0.0)

    return {
        job_id: LifecycleTimes(
            start_s=between(job_id, "ordered", "started"),
            save_s=between(job_id, "reached", "saved"),
            exit_s=between(job_id, "saved", "exited"),
            verify_s=end_s - seen[job_id, "verifying"],
        )
        for job_id, end_s in completed_s.items()
    }
