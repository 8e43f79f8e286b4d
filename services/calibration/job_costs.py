"""What a real job's start and end cost, on a whole stack: from its slots to its first step, and from its
target to its verified completion. All targets are easy, so that little but starts and ends is left."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from common.config import Config
from common.eventlog import read_events
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
from services.calibration.calibration_plan import Life, easiest
from services.launcher.client import Client
from services.launcher.stack import Stack
from workloads.files.workload_file import JobFields, complete_spec

RUN_ID = "lives"
POLL_S = 0.1
JOBS_S = 180.0
"""All of them have ended by then."""


def measure(config: Config, applications: Sequence[ApplicationSpec], jobs: int) -> dict[str, list[Life]]:
    """Of so many jobs of one replica, of the applications in turn, first come first served."""
    replace = msgspec.structs.replace
    known = {application.name: application for application in applications}
    specs = [
        complete_spec(
            JobFields(application=application.name, target=easiest(application)),
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
        lives = read(read_events(Path(folder) / RUN_ID / "events.jsonl"))
    by_application: dict[str, list[Life]] = {}
    for spec in specs:
        by_application.setdefault(spec.application, []).append(lives[spec.id])
    return by_application


def read(records: Iterable[EventRecord]) -> dict[str, Life]:
    """Of every completed job of one replica. By the wall clock, since the events are of several processes."""
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
            case ReplicaExited():  # the verifier does later, too
                seen.setdefault((event.job_id, "exited"), t_s)
            case VerificationStarted():
                seen[event.job_id, "verifies"] = t_s
            case JobCompleted():
                completed_s[event.job_id] = t_s

    def between(job_id: str, start: str, end: str) -> float:
        return max(seen[job_id, end] - seen[job_id, start], 0.0)

    return {
        job_id: Life(
            start_s=between(job_id, "ordered", "started"),
            save_s=between(job_id, "reached", "saved"),
            exit_s=between(job_id, "saved", "exited"),
            verify_s=end_s - seen[job_id, "verifies"],
        )
        for job_id, end_s in completed_s.items()
    }
