"""The agent of a node: joins a run and connects orders, jobs and processes.

First it starts the fork server and the store, then it joins a run (`scheduler_connection.py`) and follows the
orders (`node_jobs.py`). If the scheduler no longer knows it, or the store or the fork server has died, it
ends all processes and joins again as a new incarnation. While the scheduler is only silent, the replicas keep
training.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from common.config import Config
from common.lifecycle import EXIT_FAILED, StopFlag, UserError, close_in_order, get_logger
from common.messaging.publish_subscribe import EventPublisher
from common.messaging.reactor import Reactor
from common.protocol import Event, Fact, Orders, Registered
from common.types import Node
from services.job_agent.node_jobs import NodeJobs
from services.job_agent.replicas import ChildProcesses, Exit
from services.job_agent.scheduler_connection import SchedulerConnection

FLUSH_S = 1.0
"""How long an agent tries to deliver the events of an ended run before it joins the next one."""

log = get_logger()


class StoreFailed(UserError):
    """The first store could not be started: torch does not work on this machine."""

    exit_code = EXIT_FAILED


class AgentService:
    """The agent's parts, and the callbacks that connect them. The reactor calls them one at a time."""

    def __init__(
        self, name: str, config: Config, reactor: Reactor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.reactor = reactor
        self.node = Node(
            name=name,
            slots=config.agent.slots or max(1, int(usable_cores())),
            slot_speed=config.agent.slot_speed,
            store_host=config.agent.host,
        )
        self.run_id = ""
        self.publisher: EventPublisher | None = None
        self.processes = ChildProcesses(
            reactor,
            host=config.agent.host,
            grace_s=config.agent.stop_s * 0.3,
            max_message_bytes=config.limits.message_bytes,
            on_message=lambda process, data: self.jobs.on_message(process, data),
            on_exit=self.on_exit,
            on_store=self.on_store,
            on_broken=self.on_broken,
        )
        self.jobs = NodeJobs(name, self.node.slots, config, self.processes, self.publish, self.report, clock)
        self.scheduler = SchedulerConnection(
            config, reactor, self.on_joined, self.follow, self.restart, clock=clock
        )
        reactor.every(config.scheduler.heartbeat_s, self.jobs.on_tick)
        self.processes.prepare()

    def on_store(self, port: int) -> None:
        self.node = msgspec.structs.replace(self.node, store_port=port)
        self.join_when_ready()

    def on_exit(self, process: str, exited: Exit) -> None:
        if self.reactor.stop.requested:
            # The signal may have gone to the whole process group, and this process may handle it last.
            self.jobs.end()
        self.jobs.on_exit(process, exited)
        self.join_when_ready()

    def on_broken(self) -> None:
        if self.node.store_port == 0:
            raise StoreFailed("the node's store ended before it was ready; see what it printed")
        self.node = msgspec.structs.replace(self.node, store_port=0)
        self.processes.prepare()
        self.scheduler.resign()
        self.restart("the fork server or the store has died")

    def restart(self, why: str) -> None:
        """End all processes. The agent joins again when they have exited and the store is ready."""
        log.warning("ending all replicas and registering again", reason=why)
        self.jobs.end()
        self.join_when_ready()

    def join_when_ready(self) -> None:
        ready = self.node.store_port and not self.processes.living
        if ready and not self.scheduler.incarnation and not self.reactor.stop.requested:
            self.scheduler.join(self.node)

    def on_joined(self, registered: Registered) -> None:
        run_id = registered.run.run_id
        if self.publisher is None or self.run_id != run_id:
            if self.publisher is not None:
                self.publisher.close(FLUSH_S)
            self.run_id = run_id
            self.publisher = EventPublisher(
                self.reactor,
                run_id=run_id,
                source=f"agent-{self.node.name}",
                incarnation=self.scheduler.incarnation,
                endpoints=self.config.endpoints,
                outbox_dir=self.config.run_dir(run_id) / "outbox",
                limits=self.config.limits,
            )
        log.info("joined", run=run_id, slots=self.node.slots, store_port=self.node.store_port)
        if not self.reactor.stop.requested:
            self.jobs.begin(registered.orders, self.scheduler.incarnation)

    def follow(self, orders: Orders) -> None:
        """Ignores orders while the agent stops: processes that it started now could not be ended in time."""
        if not self.reactor.stop.requested:
            self.jobs.follow(orders)

    def publish(self, event: Event) -> None:
        assert self.publisher is not None, "no process runs before the agent has joined a run"
        self.publisher.publish(event)

    def report(self, fact: Fact) -> None:
        self.scheduler.report(fact)

    def close(self) -> None:
        """End replicas, connection, events, store and fork server, in this order and within `stop_s`."""
        stop_s = self.config.agent.stop_s
        close_in_order(
            [
                ("jobs", lambda _left_s: self.jobs.end()),
                ("replicas", lambda left_s: self.processes.end_children(min(left_s, 0.4 * stop_s))),
                ("connection", lambda left_s: self.scheduler.leave(min(left_s, 0.15 * stop_s))),
                ("events", lambda left_s: self.publisher and self.publisher.close(0.8 * left_s)),
                ("store", lambda _left_s: self.processes.close()),
                ("sockets", lambda _left_s: self.scheduler.close()),
            ],
            stop_s,
        )


def usable_cores(root: Path = Path("/")) -> float:
    """Number of cores that this process may use: its affinity, limited by the CPU quotas of its control group
    and all groups above it (cgroup versions 1 and 2). `root` is the root of the file system."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return cores
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            folder = mount / path.lstrip("/")
            for above in (folder, *folder.parents):
                cores = min(cores, _quota(above))
                if above == mount:
                    break
    return cores


def _quota(folder: Path) -> float:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return float(quota) / float(period) if float(quota) > 0 else float("inf")
    except (OSError, ValueError):
        return float("inf")


def run(name: str, config: Config, stop: StopFlag) -> int:
    """Serve as the agent of node `name` until the flag is set. Returns the exit code."""
    slots, speed, cores = config.agent.slots, config.agent.slot_speed, usable_cores()
    if slots * speed > cores:
        log.warning(
            "the slots of this node add up to more than its usable cores; replicas will be slower than "
            "slot_speed; lower agent.slots or agent.slot_speed",
            slots=slots,
            slot_speed=speed,
            usable_cores=cores,
        )
    reactor = Reactor(stop)
    agent = AgentService(name, config, reactor)
    try:
        reactor.run()
    finally:
        agent.close()
        reactor.close()
    return stop.exit_code
