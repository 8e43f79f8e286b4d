"""Real job-agents with real replicas for a benchmark. The benchmark is their scheduler: it orders what it
measures, and receives every event."""

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import msgspec

from common.config import RunConfig, TrainerConfig, load_config
from common.lifecycle import EXIT_FAILED, StopFlag, UserError, delayed_signals
from common.messaging.publish_subscribe import EventSubscriber, OrdersPublisher
from common.messaging.reactor import Reactor
from common.messaging.request_reply import ReplyServer
from common.protocol import (
    Done,
    Event,
    EventRecord,
    Fact,
    Heartbeat,
    JobOrder,
    JobRaised,
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
)
from common.types import ApplicationSpec, JobConfig, JobSpec, Node, Placement
from services.launcher.processes import ONE_THREAD, start_python, stop_started
from services.launcher.stack import free_endpoints, stack_environment

RUN_ID = "bench"
WAIT_S = 60.0
"""Time limit for each order to the agents."""
UNREACHABLE = {"max": 1e9, "min": -1e9}
"""Targets that no job reaches, by the mode of its metric."""


class BenchError(UserError):
    """The benchmark cannot continue; the text says what did not happen."""

    exit_code = EXIT_FAILED


class AgentCluster:
    """A context: inside it one agent with `slots` slots is up for each of `nodes`.

    `speed` is the fraction of a core of each slot; at 1.0 replicas are not paced. `listen` gets each event of
    the agents. `modules` name applications in addition to those of the configuration. All other settings are
    as configured.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        slots: int,
        listen: Callable[[EventRecord], None],
        *,
        speed: float = 1.0,
        modules: Sequence[str] = (),
        trainer: TrainerConfig | None = None,
    ) -> None:
        self._names, self._slots, self._speed, self._listen = nodes, slots, speed, listen
        self._modules, self._trainer = tuple(modules), trainer
        self._nodes: dict[str, Node] = {}
        self._incarnations: dict[str, str] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._living = 0
        self._broken = ""
        self._generation = 0
        self._orders = Orders(run_id=RUN_ID, version=0, jobs=())
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ------------------------------------------------------------------ for the benchmark

    def order(self, spec: JobSpec, replicas: int, config: JobConfig) -> int:
        """Run only this job, in a new group that is spread evenly over the first nodes. Returns the number of
        its generation."""
        used = min(replicas, len(self._names))
        order = self.group(spec, [replicas // used] * used, config)
        self.publish(order)
        return order.generation

    def group(self, spec: JobSpec, placement: Sequence[int], config: JobConfig) -> JobOrder:
        """An order for a new group; `placement` is the number of replicas on each node, which may be 0."""
        self._generation += 1
        used = [(name, count) for name, count in zip(self._names, placement, strict=False) if count]
        first = self._nodes[used[0][0]]
        return JobOrder(
            spec=spec,
            generation=self._generation,
            group=self._generation,
            allocation=tuple(Placement(node=name, replicas=count) for name, count in used),
            config=config,
            store_host=first.store_host,
            store_port=first.store_port,
        )

    def rebatched(self, order: JobOrder, config: JobConfig) -> JobOrder:
        """An order for the same group with another batch."""
        self._generation += 1
        return msgspec.structs.replace(order, generation=self._generation, config=config)

    def publish(self, *jobs: JobOrder) -> None:
        """Run only these jobs."""
        self._orders = Orders(run_id=RUN_ID, version=self._orders.version + 1, jobs=jobs)
        self._publisher.publish(self._orders)

    def clear(self) -> None:
        """End all replicas, and wait until they have exited."""
        self.publish()
        self.until(lambda: self._living == 0, "the replicas did not exit")

    def until(self, predicate: Callable[[], bool], problem: str, more_s: float = 0.0) -> None:
        """Wait until `predicate` is true. Raises BenchError, with `problem` and the last lines of the
        agents, if it is not after WAIT_S + `more_s`."""
        wait_s = WAIT_S + more_s
        in_time = self._reactor.run_until(lambda: self._is_broken() or predicate(), wait_s)
        if self._broken or not in_time:
            raise BenchError(f"{self._broken or f'{problem} in {wait_s:g} s'}{self._tail()}")

    # ------------------------------------------------------------------ in place of the scheduler

    def _start(self) -> None:
        folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="coadapt-bench-")))
        config = load_config(os.environ)
        replace = msgspec.structs.replace
        config = replace(
            config,
            run=RunConfig(logs_dir=str(folder / "logs"), run_id=RUN_ID),
            endpoints=free_endpoints(replace(config.endpoints, keys_dir="")),
            agent=replace(config.agent, slots=self._slots, slot_speed=self._speed, host="127.0.0.1"),
            trainer=self._trainer or config.trainer,
            applications=replace(config.applications, modules=config.applications.modules + self._modules),
        )
        endpoints = config.endpoints
        with delayed_signals():  # an interrupt between two of these lines would leave a socket open for ever
            self._reactor = Reactor(StopFlag())
            self._stack.callback(self._reactor.close)
            self._publisher = OrdersPublisher(self._reactor, endpoints.scheduler_orders)
            ReplyServer(self._reactor, endpoints.scheduler_requests, self._answer)
            EventSubscriber(self._reactor, endpoints.collector_events, (), self._receive)
        self._reactor.every(config.scheduler.heartbeat_s, lambda: self._publisher.publish(self._orders))
        self._output = folder / "agents.log"
        output = self._stack.enter_context(self._output.open("ab"))
        environment = stack_environment(config, os.environ) | ONE_THREAD

        self._stack.callback(lambda: stop_started(self._processes, self._ask_agents_to_stop))
        agents = [("services.job_agent", "--node", name) for name in self._names]
        for command in [("services.event_logger",), *agents]:
            with delayed_signals():
                self._processes.append(
                    start_python("-m", *command, environment=environment, stdout=output, stderr=output)
                )
        self.until(lambda: len(self._nodes) == len(self._names), "the agents did not register")

    def _ask_agents_to_stop(self, timeout_s: float) -> None:
        """The event-logger stops after them, since it acknowledges their last events. Agents whose requests
        are answered while they stop do not wait for a timeout."""
        agents = self._processes[1:]
        for agent in agents:
            agent.terminate()
        watch = self._reactor.every(0.05, lambda: None)
        self._reactor.run_until(lambda: all(agent.poll() is not None for agent in agents), timeout_s)
        watch.cancel()

    def _is_broken(self) -> bool:
        if not all(process.poll() is None for process in self._processes):
            self._broken = "an agent or the event-logger ended by itself"
        return self._broken != ""

    def _answer(self, request: Request) -> Reply:
        match request:
            case RegisterAgent():
                self._nodes[request.node.name] = request.node
                self._incarnations[request.node.name] = request.incarnation
                return Registered(run=RunInfo(run_id=RUN_ID, policy=RUN_ID, seed=0), orders=self._orders)
            case Heartbeat() | Report() if request.incarnation != self._incarnations.get(request.node):
                return Refused(reason="register first")
            case Heartbeat():
                return Done() if request.orders_version == self._orders.version else self._orders
            case Report():
                for fact in request.facts:
                    self._note(fact)
                return Done()
            case LeaveAgent():
                return Done()
            case _:
                return Refused(reason="a benchmark does not answer this request")

    def _note(self, fact: Fact) -> None:
        if isinstance(fact, ReplicaLost | JobRaised):
            self._broken = f"{fact.job_id}: {fact.reason}"

    def _receive(self, record: EventRecord) -> None:
        event: Event = record.event
        self._living += isinstance(event, ReplicaStarted)
        self._living -= isinstance(event, ReplicaExited)
        self._listen(record)

    def _tail(self) -> str:
        lines = self._output.read_text(errors="replace").splitlines()[-10:]
        return "".join(f"\n    {line}" for line in lines)


def endless(application: ApplicationSpec, job_id: str) -> JobSpec:
    """A job that never reaches its target, and so trains until it is ended."""
    return JobSpec(
        id=job_id,
        application=application.name,
        seed=0,
        target=UNREACHABLE[application.metric_mode],
        max_progress=1e12,
        replicas=1,
        batch_size=application.initial_batch_size,
        min_batch_size=application.initial_batch_size,
        max_batch_size=application.max_batch_size,
        min_atomic_batch=application.min_atomic_batch,
        max_atomic_batch=application.max_atomic_batch,
        max_replicas=4,
    )
