"""A real agent with real replicas; the test plays the scheduler, with the real logger's code beside it."""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest

from common.config import (
    AgentConfig,
    ApplicationsConfig,
    Config,
    EndpointsConfig,
    RunConfig,
    SchedulerConfig,
    TrainerConfig,
    config_environment,
)
from common.eventlog import EVENTS_FILE, read_events
from common.lifecycle import StopFlag
from common.messaging.publish_subscribe import OrdersPublisher
from common.messaging.reactor import Reactor
from common.messaging.request_reply import ReplyServer
from common.protocol import (
    Done,
    Event,
    Fact,
    GenerationRunning,
    GenerationStarted,
    Heartbeat,
    JobOrder,
    JobRaised,
    JobSaved,
    LeaveAgent,
    Orders,
    Refused,
    RegisterAgent,
    Registered,
    ReplicaExited,
    ReplicaLost,
    ReplicaStarted,
    Reply,
    Report,
    Request,
    RunInfo,
    TargetReached,
    TrainingSample,
    VerificationDone,
    VerificationStarted,
    Verified,
    VerifierLost,
    VerifyOrder,
)
from common.types import JobConfig, JobSpec, Node, Placement
from services.event_logger.service import EventLogger
from services.job_agent.node_jobs import tail
from services.job_agent.service import usable_cores
from tests.fixtures import tiny_app

ROOT = Path(__file__).parents[2]
NODE = "node-1"
WAIT_S = 40.0
HEARTBEAT_S = 0.1
SILENCE_S = 1.0
MOVED_S = 4.0
STOP_S = 3.5
HOSTS = (f"127.83.{os.getpid() // 250 % 250}.{os.getpid() % 250 + n}" for n in itertools.count(1))
"""Loopback addresses of this test process alone."""
WAITS = b"waits for a scheduler at tcp://127."
E = TypeVar("E")


def endpoints() -> EndpointsConfig:
    """Free ports, all of them held until the last one is known."""
    host = next(HOSTS)
    names = EndpointsConfig.__struct_fields__[:6]
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in names]
        for probe in probes:
            probe.bind((host, 0))
        found = {n: f"tcp://{host}:{p.getsockname()[1]}" for n, p in zip(names, probes, strict=True)}
    return EndpointsConfig(**found)


class Scheduler:
    """As much of a scheduler as an agent sees: it takes anybody, repeats what it was told to order, and
    keeps what is reported."""

    def __init__(self, logs_dir: Path, **agent: Any) -> None:
        self.config = Config(
            run=RunConfig(logs_dir=str(logs_dir)),
            endpoints=endpoints(),
            scheduler=SchedulerConfig(heartbeat_s=HEARTBEAT_S, agent_timeout_s=SILENCE_S),
            agent=AgentConfig(**({"slots": 3, "slot_speed": 0.5, "stop_s": STOP_S} | agent)),
            trainer=TrainerConfig(sample_every_s=0.2, collective_timeout_s=MOVED_S),
            applications=ApplicationsConfig(modules=(tiny_app.MODULE,)),
        )
        self.run = RunInfo(run_id="run-1", policy="fixed", seed=0)
        self.reactor = Reactor(StopFlag())
        self.logger = EventLogger(self.config, self.reactor)
        self.orders_publisher = OrdersPublisher(self.reactor, self.config.endpoints.scheduler_orders)
        self.server: ReplyServer | None = None
        self.orders = Orders(run_id="run-1", version=0, jobs=())
        self.nodes: list[Node] = []
        self.incarnations: list[str] = []
        self.left: list[str] = []
        self.beats = 0
        self.seen_version = -1
        """Of the orders that the agent follows."""
        self.facts: list[Fact] = []
        self.generation = 0
        self.reactor.every(HEARTBEAT_S, lambda: self.orders_publisher.publish(self.orders))
        self.open()

    def open(self) -> None:
        self.server = ReplyServer(self.reactor, self.config.endpoints.scheduler_requests, self.handle)

    def handle(self, request: Request) -> Reply:
        match request:
            case RegisterAgent():
                self.nodes.append(request.node)
                self.incarnations.append(request.incarnation)
                return Registered(run=self.run, orders=self.orders)
            case Heartbeat() | Report() if request.incarnation not in self.incarnations[-1:]:
                return Refused(reason="register first")
            case Heartbeat():
                self.beats += 1
                self.seen_version = request.orders_version
                return Done() if request.orders_version == self.orders.version else self.orders
            case Report():
                self.facts.extend(request.facts)
                return Done()
            case LeaveAgent():
                self.left.append(request.incarnation)
                return Done()
            case _:
                return Refused(reason="not for this scheduler")

    # ------------------------------------------------------------------ what the test orders and sees

    def order(self, *jobs: JobOrder, verifications: tuple[VerifyOrder, ...] = ()) -> None:
        self.orders = Orders(
            run_id=self.run.run_id,
            version=self.orders.version + 1,
            jobs=jobs,
            verifications=verifications,
        )
        self.orders_publisher.publish(self.orders)

    def job(self, job_id: str, replicas: int, *, checkpoint: str = "", **changes: Any) -> JobOrder:
        """The next generation of a job in a new group on this node."""
        self.generation += 1
        return JobOrder(
            spec=spec(job_id, **changes),
            generation=self.generation,
            group=self.generation,
            allocation=(Placement(node=NODE, replicas=replicas),) if replicas else (),
            config=JobConfig(atomic_batch=24),
            store_host=self.nodes[-1].store_host if replicas else "",
            store_port=self.nodes[-1].store_port if replicas else 0,
            checkpoint=checkpoint,
            leaving=() if replicas else (Placement(node=NODE, replicas=1),),
        )

    def until(self, predicate: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        assert self.reactor.run_until(predicate, timeout_s), f"not in time; facts: {self.facts}"

    def wait_for(self, kind: type[E], job_id: str, generation: int | None = None) -> E:
        """The newest fact of this kind about a job."""

        def found() -> list[Any]:
            about = [f for f in self.facts if isinstance(f, kind) and getattr(f, "job_id", "") == job_id]
            return [f for f in about if generation is None or getattr(f, "generation", -1) >= generation]

        self.until(lambda: bool(found()))
        return found()[-1]

    def wait_until_running(self, order: JobOrder) -> None:
        self.wait_for(GenerationRunning, order.spec.id, order.generation)

    def events(self, kind: type[E] | None = None, job_id: str = "") -> list[Any]:
        log = self.config.run_dir(self.run.run_id) / EVENTS_FILE
        if not log.exists():
            return []
        found: list[Event] = [record.event for record in read_events(log)]
        return [
            e
            for e in found
            if (kind is None or isinstance(e, kind)) and (not job_id or getattr(e, "job_id", "") == job_id)
        ]

    def wait_for_events(self, kind: type[E], job_id: str, count: int = 1) -> list[E]:
        self.until(lambda: len(self.events(kind, job_id)) >= count)
        return self.events(kind, job_id)

    def pids(self, job_id: str, count: int) -> list[int]:
        """Of the replicas of a job that were started, oldest first."""
        return [event.pid for event in self.wait_for_events(ReplicaStarted, job_id, count)]

    def clear(self) -> None:
        """End all jobs and wait until nothing runs."""
        self.order()
        starts = (ReplicaStarted, VerificationStarted)
        self.until(
            lambda: sum(isinstance(e, starts) for e in self.events()) == len(self.events(ReplicaExited))
        )
        self.facts.clear()

    def close(self) -> None:
        if self.server:
            self.server.close()
        self.reactor.close()


def spec(job_id: str, **changes: Any) -> JobSpec:
    app = tiny_app.SPEC
    values: dict[str, Any] = {
        "id": job_id,
        "application": app.name,
        "seed": 7,
        "target": 0.0,
        "max_progress": 1e6,
        "replicas": 1,
        "batch_size": app.initial_batch_size,
        "min_batch_size": app.initial_batch_size,
        "max_batch_size": app.max_batch_size,
        "min_atomic_batch": app.min_atomic_batch,
        "max_atomic_batch": app.max_atomic_batch,
        "max_replicas": 4,
        "settings": {},
    }
    return JobSpec(**(values | changes))


class AgentProcess:
    """The agent, and everything that descends from it."""

    def __init__(self, config: Config, output: Path) -> None:
        environment = {**os.environ, **config_environment(config), "OMP_NUM_THREADS": "1"}
        self.output = output
        with output.open("wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "services.job_agent", "--node", NODE],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.process = psutil.Process(self.popen.pid)
        self.mark = f"COADAPT_RUN_LOGS_DIR={config.run.logs_dir}".encode()

    def family(self) -> list[psutil.Process]:
        """Every living process with this agent's environment, whoever its parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if self.mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(process)
        return found

    def end(self) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.popen.wait(WAIT_S)


def cpu_time_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.fixture(scope="module")
def module_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scheduler, AgentProcess]]:
    folder = tmp_path_factory.mktemp("agent")
    scheduler = Scheduler(folder / "logs")
    assert scheduler.server
    scheduler.server.close()
    agent = AgentProcess(scheduler.config, folder / "agent.log")
    try:
        # Nobody is there at first, for longer than two attempts take.
        scheduler.until(lambda: WAITS in agent.output.read_bytes())
        scheduler.reactor.run_until(lambda: False, 1.5)
        scheduler.open()
        scheduler.until(lambda: bool(scheduler.nodes))
        yield scheduler, agent
    finally:
        agent.end()
        scheduler.close()


@pytest.fixture
def scheduler(module_stack: tuple[Scheduler, AgentProcess]) -> Iterator[Scheduler]:
    """With an agent that has joined, and that is idle again afterwards."""
    yield module_stack[0]
    module_stack[0].clear()
    assert module_stack[1].popen.poll() is None


@pytest.fixture
def agent(module_stack: tuple[Scheduler, AgentProcess]) -> AgentProcess:
    return module_stack[1]


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[tuple[Scheduler, AgentProcess]]:
    """A scheduler and an agent of one test's own, just started."""
    scheduler = Scheduler(tmp_path / "logs")
    agent = AgentProcess(scheduler.config, tmp_path / "agent.log")
    try:
        yield scheduler, agent
    finally:
        agent.end()
        scheduler.close()


# --------------------------------------------------------------------------- idle


def test_the_agent_joins_small_quiet_and_without_torch(scheduler: Scheduler, agent: AgentProcess) -> None:
    node = scheduler.nodes[0]
    assert (node.name, node.slots, node.slot_speed, node.store_host) == (NODE, 3, 0.5, "127.0.0.1")
    assert node.store_port > 0
    maps = Path(f"/proc/{agent.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert agent.process.memory_info().rss < 120e6
    cpu_s, beats = cpu_time_s(agent.process), scheduler.beats
    scheduler.until(lambda: scheduler.beats >= beats + 30)
    # By heartbeats, not by the clock, which goes on while others have the cores: 1 % of a core at the usual
    # two heartbeats a second.
    assert (cpu_time_s(agent.process) - cpu_s) / 30 < 0.005


def test_an_agent_that_finds_no_scheduler_waits_for_it_with_one_line(
    scheduler: Scheduler, agent: AgentProcess
) -> None:
    assert agent.output.read_bytes().count(WAITS) == 1
    assert len(scheduler.nodes) == 1


def test_importing_the_agent_imports_no_torch() -> None:
    code = "import services.job_agent.service, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=WAIT_S)


# --------------------------------------------------------------------------- jobs


def test_a_job_is_trained_to_its_target_and_verified(scheduler: Scheduler) -> None:
    job = scheduler.job("done", 2, target=0.3)
    scheduler.order(job)
    reached = scheduler.wait_for(TargetReached, "done")
    assert reached.metric <= 0.3
    exits = scheduler.wait_for_events(ReplicaExited, "done", 2)
    assert [e.exit_code for e in exits] == [0, 0]
    claim = VerifyOrder(
        spec=job.spec,
        node=NODE,
        checkpoint=reached.checkpoint,
        metric=reached.metric,
        progress=reached.progress,
    )
    scheduler.order(verifications=(claim,))
    verdict = scheduler.wait_for(VerificationDone, "done")
    assert verdict.findings == ()
    assert verdict.metric == pytest.approx(reached.metric, abs=1e-6)
    scheduler.wait_for_events(ReplicaExited, "done", 3)
    assert [e.ok for e in scheduler.events(Verified, "done")] == [True]
    assert len(scheduler.events(VerificationStarted, "done")) == 1
    assert len(scheduler.events(ReplicaStarted, "done")) == 2
    assert not [f for f in scheduler.facts if isinstance(f, JobRaised | ReplicaLost)]


def test_a_job_grows_and_shrinks_with_the_same_processes(scheduler: Scheduler) -> None:
    sizes = [1, 3, 2, 1]
    for replicas in sizes:
        job = scheduler.job("elastic", replicas)
        scheduler.order(job)
        scheduler.wait_until_running(job)
    started = scheduler.wait_for_events(GenerationStarted, "elastic", len(sizes))
    assert [e.old_replicas for e in started] == [0, 1, 3, 2]
    assert [e.state_from for e in started] == ["scratch", "survivor", "survivor", "survivor"]
    assert len(scheduler.events(ReplicaStarted, "elastic")) == 3
    exits = scheduler.wait_for_events(ReplicaExited, "elastic", 2)
    assert [e.exit_code for e in exits] == [0, 0]


def test_a_preempted_job_saves_leaves_and_resumes(scheduler: Scheduler) -> None:
    job = scheduler.job("saved", 2)
    scheduler.order(job)
    scheduler.wait_until_running(job)
    scheduler.order(leave := scheduler.job("saved", 0))
    saved = scheduler.wait_for(JobSaved, "saved")
    assert saved.generation == leave.generation
    # All had exited before it was reported.
    assert len(scheduler.wait_for_events(ReplicaExited, "saved", 2)) == 2
    scheduler.order(again := scheduler.job("saved", 1, checkpoint=saved.checkpoint))
    scheduler.wait_until_running(again)
    started = scheduler.wait_for_events(GenerationStarted, "saved", 2)[-1]
    assert started.state_from == "checkpoint"
    # After its first step.
    assert saved.progress < started.progress < saved.progress + 2.0


def test_a_job_that_must_leave_before_it_runs_does_not_keep_the_scheduler_waiting(
    scheduler: Scheduler,
) -> None:
    scheduler.order(scheduler.job("early", 1))
    scheduler.pids("early", 1)
    scheduler.order(leave := scheduler.job("early", 0))
    scheduler.until(
        lambda: any(
            isinstance(f, JobSaved | ReplicaLost) and f.job_id == "early" and f.generation == leave.generation
            for f in scheduler.facts
        )
    )


def test_rank_0_that_has_moved_waits_for_the_node_that_may_be_saving(scheduler: Scheduler) -> None:
    # The other node does not exist, so that nobody saves.
    here = scheduler.job("moved", 1)
    there = msgspec.structs.replace(here, allocation=(Placement(node="node-2", replicas=1),))
    scheduler.order(there)
    scheduler.until(lambda: scheduler.seen_version == scheduler.orders.version)
    scheduler.order(msgspec.structs.replace(here, generation=here.generation + 1, group=here.group + 1))
    scheduler.generation += 1
    (pid,) = scheduler.pids("moved", 1)
    os.kill(pid, signal.SIGKILL)
    scheduler.wait_for_events(ReplicaExited, "moved")
    scheduler.order(leave := scheduler.job("moved", 0))
    start_s = time.monotonic()
    scheduler.wait_for(ReplicaLost, "moved", leave.generation)
    assert time.monotonic() - start_s > 0.5 * MOVED_S


def test_one_job_takes_the_slots_of_another_only_when_they_are_free(scheduler: Scheduler) -> None:
    job = scheduler.job("before", 3)
    scheduler.order(job)
    scheduler.wait_until_running(job)
    after = scheduler.job("after", 3)
    scheduler.order(scheduler.job("before", 0), after)
    scheduler.wait_until_running(after)
    living = most = 0
    for event in scheduler.events():
        living += isinstance(event, ReplicaStarted | VerificationStarted)
        living -= isinstance(event, ReplicaExited)
        most = max(most, living)
    assert most == 3


def test_a_killed_replica_is_reported_and_replaced_in_the_next_group(scheduler: Scheduler) -> None:
    job = scheduler.job("lost", 2)
    scheduler.order(job)
    scheduler.wait_until_running(job)
    os.kill(scheduler.pids("lost", 2)[1], signal.SIGKILL)
    scheduler.until(
        lambda: any(isinstance(f, ReplicaLost) and "signal SIGKILL" in f.reason for f in scheduler.facts)
    )
    scheduler.order(again := scheduler.job("lost", 2))
    scheduler.wait_until_running(again)
    assert len(scheduler.events(ReplicaStarted, "lost")) == 3
    assert scheduler.wait_for_events(GenerationStarted, "lost", 2)[-1].state_from == "survivor"


def test_a_job_that_raises_fails_with_the_end_of_its_output(scheduler: Scheduler) -> None:
    scheduler.order(scheduler.job("raises", 1, settings={"raise_at": 5.0}))
    raised = scheduler.wait_for(JobRaised, "raises")
    assert "raises in loss 5" in raised.reason
    assert raised.output_tail.splitlines()[-1].startswith("RuntimeError: raises in loss 5")
    scheduler.wait_for_events(ReplicaExited, "raises")
    assert len([f for f in scheduler.facts if isinstance(f, JobRaised)]) == 1


def test_the_end_of_long_output_is_its_last_lines_within_2_kb(tmp_path: Path) -> None:
    output = tmp_path / "output.log"
    output.write_text("".join(f"line {number}\n" for number in range(1000)) + "\x1b[31mred\n")
    assert tail(output).splitlines() == [*(f"line {number}" for number in range(981, 1000)), " [31mred"]
    output.write_bytes(b"\xff" * 10_000)
    assert len(tail(output)) == 2000
    assert tail(tmp_path / "missing") == ""


def test_a_job_that_exits_without_a_word_fails_even_with_code_0(scheduler: Scheduler) -> None:
    scheduler.order(scheduler.job("exits", 1, settings={"exit_at": 5.0}))
    raised = scheduler.wait_for(JobRaised, "exits")
    assert re.fullmatch(r"replica node-1-\S+ exited with code 0 before its work was done", raised.reason)


def test_a_verifier_that_dies_refutes_the_claim(scheduler: Scheduler) -> None:
    unknown = VerifyOrder(
        spec=spec("refuted", application="nobody-has-it"),
        node=NODE,
        checkpoint="none",
        metric=0.25,
        progress=1.0,
    )
    scheduler.order(verifications=(unknown,))
    verdict = scheduler.wait_for(VerificationDone, "refuted")
    assert verdict.findings == ("the verifier exited with code 1 before it had an answer",)
    (verified,) = scheduler.wait_for_events(Verified, "refuted")
    assert not verified.ok


def test_a_killed_verifier_is_lost_and_another_one_tries_when_that_is_ordered(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    os.mkfifo(checkpoint)  # which nobody writes: the verifier waits
    claim = VerifyOrder(
        spec=spec("unverified"), node=NODE, checkpoint=str(checkpoint), metric=0.25, progress=1.0
    )
    scheduler.order(verifications=(claim,))
    (first,) = scheduler.wait_for_events(VerificationStarted, "unverified")
    os.kill(first.pid, signal.SIGKILL)
    lost = scheduler.wait_for(VerifierLost, "unverified")
    assert lost.reason == f"verifier {first.replica} was ended by signal SIGKILL"
    checkpoint.unlink()
    beats = scheduler.beats
    scheduler.until(lambda: scheduler.beats >= beats + 5)
    assert len(scheduler.events(VerificationStarted, "unverified")) == 1
    scheduler.order(verifications=(claim,))
    verdict = scheduler.wait_for(VerificationDone, "unverified")
    assert str(checkpoint) in verdict.findings[0]
    assert len(scheduler.wait_for_events(Verified, "unverified")) == 1


def test_old_and_repeated_orders_change_nothing(scheduler: Scheduler) -> None:
    job = scheduler.job("steady", 1)
    scheduler.order(job)
    scheduler.wait_until_running(job)
    empty = msgspec.structs.replace(scheduler.orders, version=scheduler.orders.version - 1, jobs=())
    for _ in range(20):
        scheduler.orders_publisher.publish(empty)
        scheduler.orders_publisher.publish(scheduler.orders)
    samples = len(scheduler.events(TrainingSample, "steady"))
    scheduler.wait_for_events(TrainingSample, "steady", samples + 2)
    assert len(scheduler.events(ReplicaStarted, "steady")) == 1
    assert scheduler.events(ReplicaExited, "steady") == []


# --------------------------------------------------------------------------- the scheduler comes and goes


def test_replicas_train_on_while_no_scheduler_answers(scheduler: Scheduler, agent: AgentProcess) -> None:
    job = scheduler.job("alone", 1)
    scheduler.order(job)
    scheduler.wait_until_running(job)
    (pid,) = scheduler.pids("alone", 1)
    incarnations = list(scheduler.incarnations)
    assert scheduler.server
    scheduler.server.close()
    silent = b"no scheduler answers"
    scheduler.until(lambda: silent in agent.output.read_bytes())
    samples = len(scheduler.events(TrainingSample, "alone"))
    scheduler.wait_for_events(TrainingSample, "alone", samples + 3)
    scheduler.open()
    scheduler.until(lambda: b"answers\n" in agent.output.read_bytes().split(silent)[-1])
    assert psutil.pid_exists(pid)
    assert agent.output.read_bytes().count(silent) == 1
    assert scheduler.incarnations == incarnations


def test_an_agent_that_is_not_recognised_ends_its_replicas_and_registers_anew(scheduler: Scheduler) -> None:
    job = scheduler.job("orphan", 2)
    scheduler.order(job)
    scheduler.wait_until_running(job)
    pids = scheduler.pids("orphan", 2)
    former = scheduler.incarnations[-1]
    scheduler.order()
    scheduler.incarnations.append("nobody")
    scheduler.until(lambda: scheduler.incarnations[-1] not in ("nobody", former))
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    scheduler.order(again := scheduler.job("orphan", 1))
    scheduler.wait_until_running(again)


def test_when_the_store_dies_the_agent_comes_back_with_a_new_one(
    scheduler: Scheduler, agent: AgentProcess
) -> None:
    port, former = scheduler.nodes[-1].store_port, scheduler.incarnations[-1]
    store = next(
        process
        for process in agent.family()
        if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in process.net_connections())
    )
    store.kill()
    scheduler.until(lambda: scheduler.nodes[-1].store_port != port)
    # A scheduler that takes the former incarnation for alive would refuse the next one.
    assert scheduler.left[-1:] == [former]
    scheduler.order(job := scheduler.job("store", 2))
    scheduler.wait_until_running(job)


def test_another_run_gets_its_own_events(scheduler: Scheduler) -> None:
    job = scheduler.job("first-run", 1)
    scheduler.order(job)
    scheduler.wait_until_running(job)
    scheduler.clear()
    scheduler.run = RunInfo(run_id="run-2", policy="fixed", seed=0)
    registered = len(scheduler.nodes)
    scheduler.orders = Orders(run_id="run-2", version=0, jobs=())
    scheduler.until(lambda: len(scheduler.nodes) > registered)
    scheduler.order(second := scheduler.job("second-run", 1))
    scheduler.wait_until_running(second)
    scheduler.wait_for_events(ReplicaStarted, "second-run")
    assert scheduler.events(None, "first-run") == []


# --------------------------------------------------------------------------- the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_takes_everything_down_in_time_and_loses_no_event(
    own_stack: tuple[Scheduler, AgentProcess], number: signal.Signals
) -> None:
    scheduler, agent = own_stack
    scheduler.until(lambda: bool(scheduler.nodes))
    scheduler.order(job := scheduler.job("stopped", 3))
    scheduler.wait_until_running(job)
    assert len(agent.family()) == 7  # agent, resource tracker, forkserver, store, replicas
    port = scheduler.nodes[-1].store_port
    start_s = time.monotonic()
    os.killpg(agent.popen.pid, number)  # as honcho and a terminal do
    scheduler.until(lambda: agent.popen.poll() is not None, STOP_S + 1.0)
    assert time.monotonic() - start_s < STOP_S
    assert agent.family() == []
    assert agent.popen.returncode == (130 if number == signal.SIGINT else 0)
    assert scheduler.left == scheduler.incarnations
    assert len(scheduler.wait_for_events(ReplicaExited, "stopped", 3)) == 3
    assert not [f for f in scheduler.facts if isinstance(f, ReplicaLost | JobRaised)]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_replicas_that_a_signal_to_the_whole_group_ends_before_the_agent_hears_it_are_not_lost(
    own_stack: tuple[Scheduler, AgentProcess],
) -> None:
    scheduler, agent = own_stack
    scheduler.until(lambda: bool(scheduler.nodes))
    scheduler.order(job := scheduler.job("stopped", 3))
    scheduler.wait_until_running(job)
    replicas = [psutil.Process(pid) for pid in scheduler.pids("stopped", 3)]
    agent.process.suspend()
    agent.process.terminate()
    for replica in replicas:
        replica.terminate()
    assert psutil.wait_procs(replicas, timeout=WAIT_S)[1] == []
    agent.process.resume()
    scheduler.until(lambda: agent.popen.poll() is not None, STOP_S + 1.0)
    assert len(scheduler.wait_for_events(ReplicaExited, "stopped", 3)) == 3
    assert not [f for f in scheduler.facts if isinstance(f, ReplicaLost | JobRaised)]


def test_a_stop_while_torch_is_being_imported_leaves_nothing(
    own_stack: tuple[Scheduler, AgentProcess],
) -> None:
    scheduler, agent = own_stack
    scheduler.until(lambda: any("forkserver" in " ".join(p.cmdline()) for p in agent.process.children()))
    agent.process.terminate()
    scheduler.until(lambda: agent.popen.poll() is not None, STOP_S)
    assert agent.popen.returncode == 0
    assert agent.family() == []
    assert "did not start" not in agent.output.read_text()


def test_when_the_agent_is_killed_everything_else_ends_by_itself(
    own_stack: tuple[Scheduler, AgentProcess],
) -> None:
    scheduler, agent = own_stack
    scheduler.until(lambda: bool(scheduler.nodes))
    scheduler.order(
        busy := scheduler.job("busy", 2), scheduler.job("asleep", 1, settings={"sleep_ms": 60_000.0})
    )
    scheduler.wait_until_running(busy)
    scheduler.pids("asleep", 1)
    family = agent.family()
    assert len(family) == 7
    agent.process.kill()
    agent.popen.wait(WAIT_S)
    # The forkserver's interpreter takes seconds to take down what torch has imported.
    _gone, left = psutil.wait_procs(family, timeout=15.0)
    assert not left
    assert agent.family() == []


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\nb", "[red]", "x" * 300])
def test_a_bad_node_name_is_refused_in_one_line(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.job_agent", "--node", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--node" in done.stderr
    assert "letter" in done.stderr


# --------------------------------------------------------------------------- cores


def test_an_agent_warns_of_more_slots_than_its_cores_are_worth(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path / "logs", slots=4000)
    agent = AgentProcess(scheduler.config, tmp_path / "agent.log")
    try:
        warning = b"slots of this node promise more than its cores"
        scheduler.until(lambda: warning in agent.output.read_bytes())
    finally:
        agent.end()
        scheduler.close()


def test_a_cgroup_quota_bounds_the_usable_cores(tmp_path: Path) -> None:
    plain = usable_cores(tmp_path)
    assert plain == len(os.sched_getaffinity(0))
    group = tmp_path / "sys/fs/cgroup/outer/inner"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    (group / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == plain
    (group.parent / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 0.5
    old = tmp_path / "sys/fs/cgroup/cpu,cpuacct/box"
    old.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/box\n")
    (old / "cpu.cfs_quota_us").write_text("25000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 0.25
