"""A real scheduler that is killed and restarted in the middle of a run, with a real logger."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.log.frames import from_records
from analysis.log.history import history
from common.config import (
    Config,
    EndpointsConfig,
    RunConfig,
    SchedulerConfig,
    config_environment,
)
from common.eventlog import find_gaps, read_events
from common.messaging.request_reply import RequestClient
from common.protocol import (
    AgentJoined,
    CancelJob,
    Done,
    GetJobs,
    Heartbeat,
    JobAccepted,
    JobSubmitted,
    JobTable,
    RegisterAgent,
    Registered,
    RunEnded,
    RunStarted,
    SubmitJob,
)
from common.types import JobState
from services.launcher.stack import free_endpoints
from tests.fixtures.scheduler_driver import make_node
from workloads.applications import applications
from workloads.files.workload_file import JobFields, complete_spec

ROOT = Path(__file__).parents[2]
WAIT_S = 20


class Services:
    """Scheduler and logger as processes; the test acts as client and agent."""

    def __init__(self, folder: Path) -> None:
        self.config = Config(
            run=RunConfig(logs_dir=str(folder), run_id="run"),
            endpoints=free_endpoints(EndpointsConfig()),
            scheduler=SchedulerConfig(policy="fixed", agent_timeout_s=60.0),
        )
        self.run_dir = folder / "run"
        self.processes: list[subprocess.Popen[str]] = []
        self.client = RequestClient(self.config.endpoints.scheduler_requests)

    def spawn(self, module: str, **variables: str) -> "subprocess.Popen[str]":
        environment = {**os.environ, **config_environment(self.config), **variables}
        process = subprocess.Popen(
            [sys.executable, "-m", module], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def ask(self, request: Any) -> Any:
        return self.client.request(request, timeout_s=0.5, attempts=8)

    def close(self) -> None:
        self.client.close()
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path)
    yield services
    services.close()


def submission(number: int) -> SubmitJob:
    fields = JobFields(application="digits-cnn")
    return SubmitJob(spec=complete_spec(fields, applications(), f"job-{number}", 1))


def test_a_killed_scheduler_continues_its_run(services):
    logger = services.spawn("services.event_logger")
    scheduler = services.spawn("services.scheduler")
    joined = services.ask(RegisterAgent(node=make_node("a", slots=2), incarnation="first"))
    assert isinstance(joined, Registered)
    for number in range(3):
        assert services.ask(submission(number)) == JobAccepted(job_id=f"job-{number}")
    for number in range(3, 9):
        scheduler.kill()  # right after a reply, while rounds and events are under way
        scheduler.wait(WAIT_S)
        scheduler = services.spawn("services.scheduler")
        again = services.ask(submission(number - 1))
        assert again == JobAccepted(job_id=f"job-{number - 1}", duplicate=True)
        assert services.ask(submission(number)) == JobAccepted(job_id=f"job-{number}")
    table = services.ask(GetJobs())
    assert isinstance(table, JobTable)
    assert [row.id for row in table.jobs] == [f"job-{number}" for number in range(9)]
    assert [node.name for node in table.nodes] == ["a"]
    assert services.ask(Heartbeat(node="a", incarnation="first", orders_version=-1)).run_id == "run"
    for number in range(9):
        assert services.ask(CancelJob(job_id=f"job-{number}")) == Done()
    for process in (scheduler, logger):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0

    records = list(read_events(services.run_dir / "events.jsonl"))
    events = [record.event for record in records]
    assert find_gaps(records) == {}
    assert len([event for event in events if isinstance(event, RunStarted)]) == 7
    assert len([event for event in events if isinstance(event, AgentJoined)]) == 1
    submitted = [event.spec.id for event in events if isinstance(event, JobSubmitted)]
    assert sorted(submitted) == [f"job-{number}" for number in range(9)]
    run = history(from_records(records))
    assert run.ended
    assert {job.end for job in run.jobs.values()} == {JobState.CANCELLED}
    assert isinstance(events[-1], RunEnded)
    assert list(services.run_dir.glob("outbox/*")) == []


def test_a_run_is_not_resumed_under_another_policy(services):
    scheduler = services.spawn("services.scheduler")
    assert services.ask(submission(0)) == JobAccepted(job_id="job-0")
    scheduler.kill()
    scheduler.wait(WAIT_S)
    other = services.spawn("services.scheduler", COADAPT_SCHEDULER_POLICY="pollux")
    _, errors = other.communicate(timeout=WAIT_S)
    assert other.returncode == 2
    (line,) = errors.splitlines()
    assert line == (
        "scheduler: run 'run' was started with scheduler.policy = fixed and cannot be resumed with pollux: "
        "set it back, or choose another run.run_id"
    )


def test_an_interrupt_ends_a_scheduler_with_130(services):
    scheduler = services.spawn("services.scheduler")
    assert isinstance(services.ask(GetJobs()), JobTable)
    scheduler.send_signal(signal.SIGINT)
    scheduler.communicate(timeout=WAIT_S)
    assert scheduler.returncode == 130
