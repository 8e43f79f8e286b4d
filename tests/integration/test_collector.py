"""The metrics-collector as a real process, with a real event-logger. The test acts as scheduler and agent."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from common.config import Config, EndpointsConfig, RunConfig, config_environment
from common.eventlog import EVENTS_FILE, read_events
from common.lifecycle import StopFlag
from common.messaging.publish_subscribe import EventPublisher
from common.messaging.reactor import Reactor
from common.messaging.request_reply import ReplyServer, RequestClient
from common.protocol import (
    GetJobs,
    GetProfiles,
    JobCompleted,
    ModelFitted,
    Profiles,
    Refused,
    Reply,
    Request,
    RunInfo,
    TrainingSample,
)
from common.types import GradientStatistics, JobProfile
from services.launcher.stack import free_endpoints
from tests.fixtures.training_samples import sample

ROOT = Path(__file__).parents[2]
WAIT_S = 20.0


class CollectorStack:
    """Collector and logger as processes; the scheduler and one agent are in the process of the test."""

    def __init__(self, logs_dir: Path) -> None:
        self.config = Config(
            run=RunConfig(logs_dir=str(logs_dir)), endpoints=free_endpoints(EndpointsConfig())
        )
        self.processes: list[subprocess.Popen[bytes]] = []
        self.run_id = "run-1"
        self.application = ""
        self.stop = StopFlag()
        self.reactor = Reactor(self.stop)
        self.scheduler: ReplyServer | None = None
        self.client = RequestClient(self.config.endpoints.collector_requests, reactor=self.reactor)
        self.logger = self.start("services.event_logger")
        self.collector = self.start("services.metrics_collector")

    def start(self, module: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **config_environment(self.config), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, "-m", module], cwd=ROOT, env=environment)
        self.processes.append(process)
        return process

    def start_scheduler(self) -> None:
        def handle(_: Request) -> Reply:
            return RunInfo(run_id=self.run_id, policy="pollux", seed=0)

        self.scheduler = ReplyServer(self.reactor, self.config.endpoints.scheduler_requests, handle)

    def agent(self, incarnation: str) -> EventPublisher:
        outbox = self.config.run_dir(self.run_id) / "outbox"
        return EventPublisher(
            self.reactor, self.run_id, "agent-node-1", incarnation, self.config.endpoints, outbox
        )

    def ask(self, request: Request) -> Reply:
        replies: list[Reply] = []
        self.client.post(request, replies.append, lambda: None, timeout_s=WAIT_S, attempts=1)
        assert self.reactor.run_until(lambda: bool(replies), WAIT_S), "no reply"
        return replies[0]

    def question(self, job_id: str) -> GetProfiles:
        if not self.application:
            return GetProfiles(job_ids=(job_id,))
        return GetProfiles(job_ids=(job_id,), applications=(self.application,), targets=(0.9,))

    def profile(self, job_id: str) -> JobProfile:
        reply = self.ask(self.question(job_id))
        assert isinstance(reply, Profiles)
        return reply.profiles[0]

    def wait_for(
        self, job_id: str, holds: Callable[[JobProfile], bool], publish: Callable[[], None]
    ) -> JobProfile:
        """Publish repeatedly, as an agent does, until the job's profile is as expected."""
        profiles: list[JobProfile] = []

        def look(reply: Reply) -> None:
            assert isinstance(reply, Profiles)
            profiles.extend(p for p in reply.profiles if holds(p))

        def turn() -> None:
            publish()
            self.client.post(self.question(job_id), look, lambda: None)

        beat = self.reactor.every(0.1, turn)
        assert self.reactor.run_until(lambda: bool(profiles), WAIT_S), "no such profile"
        beat.cancel()
        return profiles[0]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.reactor.close()
        self.stop.close()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[CollectorStack]:
    stack = CollectorStack(tmp_path)
    yield stack
    stack.close()


def sample_of(replicas: int, job_id: str = "a") -> TrainingSample:
    return sample(
        job_id,
        replicas=replicas,
        step_s=0.05 + 0.01 * replicas,
        sync_s=0.01 * (replicas - 1),
        progress=float(replicas),
        statistics=GradientStatistics(sqr=1.0, var=4.0),
    )


def test_samples_become_profiles_that_survive_a_killed_collector(stack: CollectorStack) -> None:
    stack.start_scheduler()
    agent = stack.agent("one")
    for replicas in (1, 2, 4):
        known = stack.wait_for(
            "a",
            lambda p, most=replicas: p.max_profiled_replicas == most,
            lambda most=replicas: agent.publish(sample_of(most)),
        )
    assert known.parameters is not None
    assert known.statistics == GradientStatistics(sqr=1.0, var=4.0)
    assert stack.reactor.run_until(lambda: agent.pending == 0, WAIT_S), "the logger lacks events"

    stack.collector.kill()
    stack.collector.wait()
    stack.collector = stack.start("services.metrics_collector")
    # The trainer repeats only its present configuration, one replica. The rest comes from the log.
    again = stack.wait_for(
        "a",
        lambda p: p.max_profiled_replicas == 4 and p.parameters is not None,
        lambda: agent.publish(sample_of(1)),
    )
    assert again.statistics == known.statistics
    assert agent.close(WAIT_S)

    stack.collector.send_signal(signal.SIGTERM)
    assert stack.collector.wait(WAIT_S) == 0
    stack.logger.send_signal(signal.SIGTERM)
    assert stack.logger.wait(WAIT_S) == 0
    log = list(read_events(stack.config.run_dir("run-1") / EVENTS_FILE))
    fitted = [r for r in log if isinstance(r.event, ModelFitted)]
    assert {r.source for r in fitted} == {"collector"}
    assert len({r.incarnation for r in fitted}) == 2
    assert all(r.event.fit_s > 0 and r.event.error < 0.2 for r in fitted if isinstance(r.event, ModelFitted))


def test_another_run_starts_without_profiles(stack: CollectorStack) -> None:
    stack.start_scheduler()
    first = stack.agent("one")
    stack.wait_for("a", lambda p: p.max_profiled_replicas == 1, lambda: first.publish(sample_of(1)))
    assert first.close(WAIT_S)
    stack.run_id = "run-2"
    second = stack.agent("two")
    stack.wait_for("b", lambda p: p.max_profiled_replicas == 2, lambda: second.publish(sample_of(2, "b")))
    assert stack.profile("a") == JobProfile(job_id="a")
    assert second.close(WAIT_S)


def test_measurements_of_an_application_are_used_in_later_runs(stack: CollectorStack) -> None:
    stack.start_scheduler()
    agent = stack.agent("one")
    stack.application = "app"
    known = stack.wait_for("a", lambda p: p.parameters is not None, lambda: agent.publish(sample_of(2)))
    done = JobCompleted(job_id="a", verified=True, metric=0.91, progress=70.0)
    new = stack.wait_for("new", lambda p: p.needed_progress == 70.0, lambda: agent.publish(done))
    assert new.parameters == known.parameters
    assert agent.close(WAIT_S)

    stack.collector.send_signal(signal.SIGTERM)
    assert stack.collector.wait(WAIT_S) == 0
    stack.run_id = "run-2"
    stack.collector = stack.start("services.metrics_collector")
    recalled = stack.wait_for("a", lambda p: p.needed_progress == 70.0, lambda: None)
    assert recalled.parameters == known.parameters
    assert recalled.statistics == GradientStatistics(sqr=1.0, var=4.0)
    assert (recalled.application_replicas, recalled.max_profiled_replicas, recalled.progress) == (2, 0, 0.0)
    stack.application = "another"
    assert stack.profile("b") == JobProfile(job_id="b")
    reply = stack.ask(GetProfiles(job_ids=("a", "b"), applications=("app",), targets=(0.9,)))
    assert isinstance(reply, Refused)


def test_a_collector_without_a_scheduler_answers_with_empty_profiles_and_is_idle(
    stack: CollectorStack,
) -> None:
    assert stack.profile("a") == JobProfile(job_id="a")
    process = psutil.Process(stack.collector.pid)
    assert process.memory_info().rss < 120e6
    before = process.cpu_times()
    stack.reactor.run_until(lambda: False, 2.0)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system <= 0.05


def test_a_request_for_another_service_is_refused_and_the_collector_continues(stack: CollectorStack) -> None:
    stack.start_scheduler()
    reply = stack.ask(GetJobs())
    assert isinstance(reply, Refused)
    assert "not a request for the metrics-collector" in reply.reason
    agent = stack.agent("one")
    stack.wait_for("a", lambda p: p.max_profiled_replicas == 1, lambda: agent.publish(sample_of(1)))
    assert agent.close(WAIT_S)
