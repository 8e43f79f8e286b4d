"""The whole stack with real trainers, on jobs of a second or two."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from analysis.log.frames import read
from analysis.summarize import summarize
from common.config import AgentConfig, Config, RunConfig, SchedulerConfig, TrainerConfig
from common.eventlog import read_events
from common.lifecycle import StopFlag
from common.messaging.publish_subscribe import OrdersSubscriber
from common.messaging.reactor import Reactor
from common.messaging.request_reply import RequestClient
from common.protocol import (
    CancelJob,
    Done,
    JobAccepted,
    JobFailed,
    JobTable,
    Orders,
    RoundDecided,
    SubmitJob,
)
from common.types import JobState
from services.launcher.stack import Stack
from services.scheduler.policies.registry import make_policy
from services.scheduler.service import make_core
from tests.fixtures import tiny_app
from tests.fixtures.scheduler_rig import decision_bytes, replayed
from workloads.applications import applications
from workloads.files.workload_file import JobFields, complete_spec

WAIT_S = 40.0
POLICIES = ("fixed", "dynamic", "throughput", "pollux")
APPLICATIONS = applications((tiny_app.MODULE,))


class Run:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.client = RequestClient(stack.config.endpoints.scheduler_requests)
        self.reactor = Reactor(StopFlag())
        self.orders = 0
        OrdersSubscriber(self.reactor, stack.config.endpoints.scheduler_orders, self.on_orders)

    def submit(self, job_id: str, **fields: Any) -> None:
        fields = {"target": 0.3, **fields}
        spec = complete_spec(JobFields(application="tiny", **fields), APPLICATIONS, job_id, 1)
        assert self.client.request(SubmitJob(spec=spec)) == JobAccepted(job_id=job_id)

    def on_orders(self, orders: Orders) -> None:
        self.orders += 1

    def wait(self, condition: Callable[[JobTable], bool]) -> JobTable:
        """Read the job table after each of the scheduler's orders, which it publishes at every change."""
        found: list[JobTable] = []
        seen = -1

        def look() -> bool:
            nonlocal seen
            if seen != self.orders:
                seen = self.orders
                table = self.stack.jobs()
                found.extend([table] if condition(table) else [])
            return bool(found)

        assert self.reactor.run_until(look, WAIT_S), f"not in {WAIT_S} s: {self.stack.jobs()}"
        return found[0]

    def wait_for_the_end(self) -> JobTable:
        return self.wait(lambda table: all(job.state.terminal for job in table.jobs))


@contextmanager
def running(folder: Path, policy: str) -> Iterator[Run]:
    config = Config(
        run=RunConfig(logs_dir=str(folder), run_id="run", seed=3),
        scheduler=SchedulerConfig(policy=policy, round_s=0.3, heartbeat_s=0.2),
        agent=AgentConfig(slots=3, slot_speed=0.3),
        trainer=TrainerConfig(sample_every_s=0.1),
    )
    config = msgspec.structs.replace(
        config, applications=msgspec.structs.replace(config.applications, modules=(tiny_app.MODULE,))
    )
    with Stack(config, os.environ) as stack:
        run = Run(stack)
        try:
            yield run
        finally:
            run.reactor.close()


def events(folder: Path, kind: type) -> list[Any]:
    log = read_events(folder / "run" / "events.jsonl")
    return [record.event for record in log if isinstance(record.event, kind)]


def assert_clean(folder: Path) -> None:
    _, result = summarize(read(folder / "run" / "events.jsonl"))
    assert result.audit.findings == ()
    assert result.audit.ok
    assert result.audit.gaps == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", POLICIES)
def test_all_jobs_are_verified_the_log_is_clean_and_the_journal_gives_the_same_decisions(
    policy: str, tmp_path: Path
) -> None:
    with running(tmp_path, policy) as run:
        for number in range(5):
            settings = {"sleep_ms": 2.0 * (number % 2), "dropout": 0.0}
            run.submit(
                f"job-{number}",
                seed=number,
                replicas=1 + number % 3,
                batch_size=24 * (1 + number % 3),
                settings=settings,
            )
        table = run.wait_for_the_end()
        assert [job.state for job in table.jobs] == [JobState.COMPLETED] * 5
        assert all(job.reason == "verified" for job in table.jobs)
    assert_clean(tmp_path)
    _, result = summarize(read(tmp_path / "run" / "events.jsonl"))
    assert (result.policy, result.jobs.submitted, result.jobs.verified) == (policy, 5, 5)
    core = make_core(run.stack.config, make_policy(policy))
    live = [decision_bytes(event) for event in events(tmp_path, RoundDecided)]
    assert live
    assert replayed(core, run.stack.run_dir) == live, "replaying the journal gives the same bytes"
    assert run.stack.killed == ()


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One stack for the tests below, each with its own jobs. Its log is audited after the last test."""
    folder = tmp_path_factory.mktemp("fixed")
    with running(folder, "fixed") as run:
        yield run
    assert_clean(folder)
    failures = {event.job_id: event for event in events(folder, JobFailed)}
    assert set(failures) == {"raises", "diverges", "exits"}
    assert "RuntimeError" in failures["raises"].output_tail


@pytest.mark.timeout(120)
def test_broken_jobs_fail_with_their_reason_and_the_others_continue(fixed: Run) -> None:
    fixed.submit("raises", settings={"raise_at": 9.0})
    fixed.submit("diverges", settings={"nan_at": 9.0})
    fixed.submit("exits", settings={"exit_at": 9.0})
    fixed.submit("good", seed=5)
    rows = {job.id: job for job in fixed.wait_for_the_end().jobs}
    assert rows["good"].state is JobState.COMPLETED
    for job_id, reason in (
        ("raises", "raises in loss 9"),
        ("diverges", "diverged"),
        ("exits", "exited with code 0"),
    ):
        assert rows[job_id].state is JobState.FAILED
        assert reason in rows[job_id].reason


@pytest.mark.timeout(120)
def test_a_killed_replica_does_not_end_its_job(fixed: Run) -> None:
    fixed.submit("survivor", replicas=2, batch_size=48, settings={"sleep_ms": 5.0})
    fixed.wait(lambda table: state_of(table, "survivor") is JobState.RUNNING)
    folder = fixed.stack.run_dir / "jobs" / "survivor"
    victims = [process for process in fixed.stack.processes() if is_replica(process, folder)]
    victims[0].send_signal(signal.SIGKILL)
    table = fixed.wait(lambda table: state_of(table, "survivor").terminal)
    assert state_of(table, "survivor") is JobState.COMPLETED
    assert len(list(folder.glob("*.log"))) == 4, "two replicas, one replacement, the verifier"


def state_of(table: JobTable, job_id: str) -> JobState:
    return next(job.state for job in table.jobs if job.id == job_id)


def is_replica(process: psutil.Process, folder: Path) -> bool:
    """Whether its output goes to a file in the folder of its job."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1").startswith(str(folder))
    except OSError:
        return False


@pytest.mark.timeout(120)
def test_a_cancelled_job_frees_its_slots_for_the_next(fixed: Run) -> None:
    fixed.submit("endless", replicas=6, batch_size=48, target=0.0, max_progress=1e8)
    fixed.submit("waits", replicas=6, batch_size=48)
    table = fixed.wait(lambda table: state_of(table, "endless") is JobState.RUNNING)
    assert state_of(table, "waits") is JobState.PENDING
    assert fixed.client.request(CancelJob(job_id="endless")) == Done()
    table = fixed.wait_for_the_end()
    assert state_of(table, "endless") is JobState.CANCELLED
    assert state_of(table, "waits") is JobState.COMPLETED


@pytest.mark.timeout(120)
def test_a_stack_whose_honcho_is_killed_ends_by_itself(tmp_path: Path) -> None:
    with running(tmp_path, "fixed") as run:
        run.submit("endless", replicas=2, batch_size=48, target=0.0, max_progress=1e8)
        run.wait(lambda table: table.jobs[0].state is JobState.RUNNING)
        processes = run.stack.processes()
        honcho = next(process for process in processes if "honcho" in process.cmdline())
        honcho.kill()
        _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
        assert alive == []
    assert_clean(tmp_path)
