"""A real agent with real replicas. The test acts as the scheduler and runs the code of the real logger."""

import contextlib
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
from services.launcher.stack import free_endpoints
from tests.fixtures import tiny_app
from tests.fixtures.replica_fleet import tiny_spec

ROOT = Path(__file__).parents[2]
NODE = "node-1"
WAIT_S = 40.0
HEARTBEAT_S = 0.1
SILENCE_S = 1.0
MOVED_S = 4.0
STOP_S = 3.5
TRACKER_S = 1.0
WAITING = b"waiting for a scheduler at tcp://127."
E = TypeVar("E")


class SchedulerStandIn:
    """What an agent sees of a scheduler: it accepts every agent, repeats the orders that the test sets, and
    keeps what is reported."""

    def __init__(self, logs_dir: Path, **agent: Any) -> None:
        self.config = Config(
            run=RunConfig(logs_dir=str(logs_dir)),
            endpoints=free_endpoints(EndpointsConfig()),
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
        """Version of the orders that the agent follows."""
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

    # ------------------------------------------------------------------ orders and observations

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
        """Process ids of all replicas of a job that were started, oldest first."""
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
    return tiny_spec(id=job_id, **{"max_progress": 1e6, "max_replicas": 4, **changes})


class AgentProcess:
    """The agent and all processes that descend from it."""

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
        """All living processes with this agent's environment, whatever their parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if self.mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(process)
        return found

    def wait_for_exit(self) -> None:
        """Wait until the agent has exited. Multiprocessing's resource tracker exits by itself right after
        it."""
        family = self.family()
        self.popen.wait(WAIT_S)
        psutil.wait_procs(family, timeout=TRACKER_S)
        assert self.family() == []

    def end(self) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.popen.wait(WAIT_S)


def cpu_time_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.fixture(scope="module")
def module_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SchedulerStandIn, AgentProcess]]:
    folder = tmp_path_factory.mktemp("agent")
    scheduler = SchedulerStandIn(folder / "logs")
    assert scheduler.server
    scheduler.server.close()
    agent = AgentProcess(scheduler.config, folder / "agent.log")
    try:
        # At first there is no scheduler, for longer than two attempts take.
        scheduler.until(lambda: WAITING in agent.output.read_bytes())
        scheduler.reactor.run_until(lambda: False, 1.5)
        scheduler.open()
        scheduler.until(lambda: bool(scheduler.nodes))
        yield scheduler, agent
    finally:
        agent.end()
        scheduler.close()


@pytest.fixture
def scheduler(module_stack: tuple[SchedulerStandIn, AgentProcess]) -> Iterator[SchedulerStandIn]:
    """A scheduler whose agent has joined and is idle again after the test."""
    yield module_stack[0]
    module_stack[0].clear()
    assert module_stack[1].popen.poll() is None


@pytest.fixture
def agent(module_stack: tuple[SchedulerStandIn, AgentProcess]) -> AgentProcess:
    return module_stack[1]


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[tuple[SchedulerStandIn, AgentProcess]]:
    """A scheduler and an agent that were just started for one test."""
    scheduler = SchedulerStandIn(tmp_path / "logs")
    agent = AgentProcess(scheduler.config, tmp_path / "agent.log")
    try:
        yield scheduler, agent
    finally:
        agent.end()
        scheduler.close()


# --------------------------------------------------------------------------- idle


def test_an_idle_agent_needs_little_memory_and_time_and_no_torch(
    scheduler: SchedulerStandIn, agent: AgentProcess
) -> None:
    node = scheduler.nodes[0]
    assert (node.name, node.slots, node.slot_speed, node.store_host) == (NODE, 3, 0.5, "127.0.0.1")
    assert node.store_port > 0
    maps = Path(f"/proc/{agent.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert agent.process.memory_info().rss < 120e6
    cpu_s, beats = cpu_time_s(agent.process), scheduler.beats
    scheduler.until(lambda: scheduler.beats >= beats + 30)
    # Measured per heartbeat, not per second, because other processes may use the cores. This is 1 % of a core
    # at the usual two heartbeats per second.
    assert (cpu_time_s(agent.process) - cpu_s) / 30 < 0.005


def test_an_agent_without_a_scheduler_waits_and_logs_one_line(
    scheduler: SchedulerStandIn, agent: AgentProcess
) -> None:
    assert agent.output.read_bytes().count(WAITING) == 1
    assert len(scheduler.nodes) == 1


def test_importing_the_agent_imports_no_torch() -> None:
    code = "import services.job_agent.service, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=WAIT_S)


# --------------------------------------------------------------------------- jobs


def test_a_job_is_trained_to_its_target_and_verified(scheduler: SchedulerStandIn) -> None:
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


def test_a_job_grows_and_shrinks_with_the_same_processes(scheduler: SchedulerStandIn) -> None:
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


def test_a_preempted_job_saves_and_resumes_from_its_checkpoint(scheduler: SchedulerStandIn) -> None:
    job = scheduler.job("saved", 2)
    scheduler.order(job)
    scheduler.wait_until_running(job)
    scheduler.order(leave := scheduler.job("saved", 0))
    saved = scheduler.wait_for(JobSaved, "saved")
    assert saved.generation == leave.generation
    # It is reported only after all replicas have exited.
    assert len(scheduler.wait_for_events(ReplicaExited, "saved", 2)) == 2
    scheduler.order(again := scheduler.job("saved", 1, checkpoint=saved.checkpoint))
    scheduler.wait_until_running(again)
    started = scheduler.wait_for_events(GenerationStarted, "saved", 2)[-1]
    assert started.state_from == "checkpoint"
    # This is the progress after the first step.
    assert saved.progress < started.progress < saved.progress + 2.0


def test_a_job_that_is_preempted_before_it_runs_is_reported(
    scheduler: SchedulerStandIn,
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


def test_a_node_that_rank_0_moved_to_gives_the_previous_node_time_to_save(
    scheduler: SchedulerStandIn,
) -> None:
    # The other node does not exist, so no node saves.
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


def test_a_job_gets_the_slots_of_another_only_when_they_are_free(scheduler: SchedulerStandIn) -> None:
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


def test_a_killed_replica_is_reported_and_replaced_in_the_next_group(scheduler: SchedulerStandIn) -> None:
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


def test_a_job_that_raises_fails_with_the_end_of_its_output(scheduler: SchedulerStandIn) -> None:
    scheduler.order(scheduler.job("raises", 1, settings={"raise_at": 5.0}))
    raised = scheduler.wait_for(JobRaised, "raises")
    assert "raises in loss 5" in raised.reason
    assert raised.output_tail.splitlines()[-1].startswith("RuntimeError: raises in loss 5")
    scheduler.wait_for_events(ReplicaExited, "raises")
    assert len([f for f in scheduler.facts if isinstance(f, JobRaised)]) == 1


def test_a_job_that_exits_before_its_work_is_done_fails_even_with_code_0(scheduler: SchedulerStandIn) -> None:
    scheduler.order(scheduler.job("exits", 1, settings={"exit_at": 5.0}))
    raised = scheduler.wait_for(JobRaised, "exits")
    assert re.fullmatch(r"replica node-1-\S+ exited with code 0 before its work was done", raised.reason)


def test_a_verifier_that_dies_refutes_the_claim(scheduler: SchedulerStandIn) -> None:
    unknown = VerifyOrder(
        spec=spec("refuted", application="no-such-application"),
        node=NODE,
        checkpoint="none",
        metric=0.25,
        progress=1.0,
    )
    scheduler.order(verifications=(unknown,))
    verdict = scheduler.wait_for(VerificationDone, "refuted")
    assert verdict.findings == ("the verifier exited with code 1 before it had a verdict",)
    (verified,) = scheduler.wait_for_events(Verified, "refuted")
    assert not verified.ok


def test_a_killed_verifier_is_lost_and_another_one_starts_when_ordered(
    scheduler: SchedulerStandIn, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    os.mkfifo(checkpoint)  # no process writes to it, so the verifier waits
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


def test_old_and_repeated_orders_change_nothing(scheduler: SchedulerStandIn) -> None:
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


# --------------------------------------------------------------------------- without a scheduler


def test_replicas_keep_training_while_no_scheduler_answers(
    scheduler: SchedulerStandIn, agent: AgentProcess
) -> None:
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


def test_an_agent_that_the_scheduler_does_not_know_ends_its_replicas_and_registers_again(
    scheduler: SchedulerStandIn,
) -> None:
    job = scheduler.job("orphan", 2)
    scheduler.order(job)
    scheduler.wait_until_running(job)
    pids = scheduler.pids("orphan", 2)
    former = scheduler.incarnations[-1]
    scheduler.order()
    scheduler.incarnations.append("another")
    scheduler.until(lambda: scheduler.incarnations[-1] not in ("another", former))
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    scheduler.order(again := scheduler.job("orphan", 1))
    scheduler.wait_until_running(again)


def test_an_agent_whose_store_dies_registers_again_with_a_new_store(
    scheduler: SchedulerStandIn, agent: AgentProcess
) -> None:
    port, former = scheduler.nodes[-1].store_port, scheduler.incarnations[-1]
    store = next(
        process
        for process in agent.family()
        if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in process.net_connections())
    )
    store.kill()
    scheduler.until(lambda: scheduler.nodes[-1].store_port != port)
    # Otherwise a scheduler that believes the former incarnation to be alive would refuse the next one.
    assert scheduler.left[-1:] == [former]
    scheduler.order(job := scheduler.job("store", 2))
    scheduler.wait_until_running(job)


def test_events_go_to_the_run_that_the_agent_takes_part_in(scheduler: SchedulerStandIn) -> None:
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
def test_a_stop_ends_all_processes_in_time_and_loses_no_event(
    own_stack: tuple[SchedulerStandIn, AgentProcess], number: signal.Signals
) -> None:
    scheduler, agent = own_stack
    scheduler.until(lambda: bool(scheduler.nodes))
    scheduler.order(job := scheduler.job("stopped", 3))
    scheduler.wait_until_running(job)
    assert len(agent.family()) == 7  # agent, resource tracker, fork server, store, three replicas
    port = scheduler.nodes[-1].store_port
    start_s = time.monotonic()
    os.killpg(agent.popen.pid, number)  # like honcho and a terminal
    scheduler.until(lambda: agent.popen.poll() is not None, STOP_S + 1.0)
    assert time.monotonic() - start_s < STOP_S
    agent.wait_for_exit()
    assert agent.popen.returncode == (130 if number == signal.SIGINT else 0)
    assert scheduler.left == scheduler.incarnations
    assert len(scheduler.wait_for_events(ReplicaExited, "stopped", 3)) == 3
    assert not [f for f in scheduler.facts if isinstance(f, ReplicaLost | JobRaised)]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_replicas_ended_by_a_group_signal_before_the_agent_handles_it_are_not_reported_as_lost(
    own_stack: tuple[SchedulerStandIn, AgentProcess],
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


def test_a_stop_while_torch_is_being_imported_leaves_no_process(
    own_stack: tuple[SchedulerStandIn, AgentProcess],
) -> None:
    scheduler, agent = own_stack
    scheduler.until(lambda: any("forkserver" in " ".join(p.cmdline()) for p in agent.process.children()))
    agent.process.terminate()
    scheduler.until(lambda: agent.popen.poll() is not None, STOP_S)
    agent.wait_for_exit()
    assert agent.popen.returncode == 0
    assert "did not start" not in agent.output.read_text()


def test_all_other_processes_end_by_themselves_when_the_agent_is_killed(
    own_stack: tuple[SchedulerStandIn, AgentProcess],
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
    # The interpreter of the fork server takes seconds to unload torch.
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


def test_an_agent_warns_if_its_slots_add_up_to_more_than_its_cores(tmp_path: Path) -> None:
    scheduler = SchedulerStandIn(tmp_path / "logs", slots=4000)
    agent = AgentProcess(scheduler.config, tmp_path / "agent.log")
    try:
        warning = b"the slots of this node add up to more than its usable cores"
        scheduler.until(lambda: warning in agent.output.read_bytes())
    finally:
        agent.end()
        scheduler.close()
