"""The metrics-collector as a real process, with a real event-logger; the test plays scheduler and agent."""

import contextlib
import itertools
import os
import signal
import socket
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
from common.types import GradientStatistics, JobConfig, JobProfile

ROOT = Path(__file__).parents[2]
WAIT_S = 20.0
HOSTS = (f"127.81.{os.getpid() // 250 % 250}.{os.getpid() % 250 + n}" for n in itertools.count(1))
"""Loopback addresses of this test process alone."""


def endpoints() -> EndpointsConfig:
    """Free ports, all of them held until the last one is known."""
    host = next(HOSTS)
    names = EndpointsConfig.__struct_fields__[:6]
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in names]
        for probe in probes:
            probe.bind((host, 0))
        ports = [probe.getsockname()[1] for probe in probes]
    found = {name: f"tcp://{host}:{port}" for name, port in zip(names, ports, strict=True)}
    return EndpointsConfig(**found)


class Stack:
    """Collector and logger as processes; scheduler and one agent in this one."""

    def __init__(self, logs_dir: Path) -> None:
        self.config = Config(run=RunConfig(logs_dir=str(logs_dir)), endpoints=endpoints())
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
        """Publish, as an agent goes on doing, until the job's profile is as it should be."""
        profiles: list[JobProfile] = []

        def look(reply: Reply) -> None:
            assert isinstance(reply, Profiles)
            profiles.extend(p for p in reply.profiles if holds(p))

        def turn() -> None:
            publish()
            self.client.post(self.question(job_id), look, lambda: None)

        beat = self.reactor.every(0.1, turn)
        assert self.reactor.run_until(lambda: bool(profiles), WAIT_S), "the profile never came to that"
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
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    yield stack
    stack.close()


def sample(replicas: int, job_id: str = "a") -> TrainingSample:
    return TrainingSample(
        job_id=job_id,
        generation=1,
        nodes=1,
        replicas=replicas,
        config=JobConfig(atomic_batch=16),
        window_s=0.5,
        steps=5,
        timed_steps=5,
        accumulation_s=0.06,
        step_s=0.05 + 0.01 * replicas,
        sync_s=0.01 * (replicas - 1),
        total_steps=5,
        total_examples=80,
        progress=float(replicas),
        epoch=0,
        loss=1.0,
        gain=1.0,
        statistics=GradientStatistics(sqr=1.0, var=4.0),
    )


def test_samples_become_profiles_that_survive_a_killed_collector(stack: Stack) -> None:
    stack.start_scheduler()
    agent = stack.agent("one")
    for replicas in (1, 2, 4):
        known = stack.wait_for(
            "a",
            lambda p, most=replicas: p.max_profiled_replicas == most,
            lambda most=replicas: agent.publish(sample(most)),
        )
    assert known.parameters is not None
    assert known.statistics == GradientStatistics(sqr=1.0, var=4.0)
    assert stack.reactor.run_until(lambda: agent.pending == 0, WAIT_S), "the logger has everything"

    stack.collector.kill()
    stack.collector.wait()
    stack.collector = stack.start("services.metrics_collector")
    # The trainer repeats only what it does now: one replica. The rest comes from the log.
    again = stack.wait_for(
        "a",
        lambda p: p.max_profiled_replicas == 4 and p.parameters is not None,
        lambda: agent.publish(sample(1)),
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


def test_a_new_run_of_the_scheduler_starts_afresh(stack: Stack) -> None:
    stack.start_scheduler()
    first = stack.agent("one")
    stack.wait_for("a", lambda p: p.max_profiled_replicas == 1, lambda: first.publish(sample(1)))
    assert first.close(WAIT_S)
    stack.run_id = "run-2"
    second = stack.agent("two")
    stack.wait_for("b", lambda p: p.max_profiled_replicas == 2, lambda: second.publish(sample(2, "b")))
    assert stack.profile("a") == JobProfile(job_id="a")
    assert second.close(WAIT_S)


def test_what_jobs_have_shown_starts_jobs_of_their_application_in_later_runs(stack: Stack) -> None:
    stack.start_scheduler()
    agent = stack.agent("one")
    stack.application = "app"
    known = stack.wait_for("a", lambda p: p.parameters is not None, lambda: agent.publish(sample(2)))
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


def test_without_a_scheduler_it_answers_empty_profiles_and_stays_small_and_idle(stack: Stack) -> None:
    assert stack.profile("a") == JobProfile(job_id="a")
    process = psutil.Process(stack.collector.pid)
    assert process.memory_info().rss < 120e6
    before = process.cpu_times()
    stack.reactor.run_until(lambda: False, 2.0)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system <= 0.05


def test_what_is_not_for_the_collector_is_refused_and_it_goes_on(stack: Stack) -> None:
    stack.start_scheduler()
    reply = stack.ask(GetJobs())
    assert isinstance(reply, Refused)
    assert "not a request for the metrics-collector" in reply.reason
    agent = stack.agent("one")
    stack.wait_for("a", lambda p: p.max_profiled_replicas == 1, lambda: agent.publish(sample(1)))
    assert agent.close(WAIT_S)
