"""The agent of a node: it takes part in a run and keeps `node_jobs.py` supplied with orders and processes.

Its life: start forkserver and store; join the run (`scheduler_connection.py`); then obey orders. When the membership is
lost, or store or forkserver have died, everything that runs is ended, and the agent joins again as a new
incarnation. While the scheduler is merely silent, the replicas train on.
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
from services.job_agent.replicas import Exit, Processes
from services.job_agent.scheduler_connection import Membership

FLUSH_S = 1.0
"""For the events of a run that has ended, before the next one is joined."""

log = get_logger()


class StoreFailed(UserError):
    """The first store could not be started: torch does not work here."""

    exit_code = EXIT_FAILED


class AgentService:
    """Callbacks come from the reactor, one at a time."""

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
        self.processes = Processes(
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
        self.membership = Membership(
            config, reactor, self.on_joined, self.follow, self.begin_again, clock=clock
        )
        reactor.every(config.scheduler.heartbeat_s, self.jobs.on_tick)
        self.processes.prepare()

    def on_store(self, port: int) -> None:
        self.node = msgspec.structs.replace(self.node, store_port=port)
        self.join_when_ready()

    def on_exit(self, process: str, exited: Exit) -> None:
        if self.reactor.stop.requested:
            # The signal may have gone to the whole group, of which this process hears it as the last one.
            self.jobs.end()
        self.jobs.on_exit(process, exited)
        self.join_when_ready()

    def on_broken(self) -> None:
        if self.node.store_port == 0:
            raise StoreFailed("the node's store ended before it was ready; what it printed says why")
        self.node = msgspec.structs.replace(self.node, store_port=0)
        self.processes.prepare()
        self.membership.resign()
        self.begin_again("forkserver or store has died")

    def begin_again(self, why: str) -> None:
        """End everything; the agent joins again when all has exited and the store is ready."""
        log.warning("ends its replicas and registers again", reason=why)
        self.jobs.end()
        self.join_when_ready()

    def join_when_ready(self) -> None:
        ready = self.node.store_port and not self.processes.living
        if ready and not self.membership.incarnation and not self.reactor.stop.requested:
            self.membership.join(self.node)

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
                incarnation=self.membership.incarnation,
                endpoints=self.config.endpoints,
                outbox_dir=self.config.run_dir(run_id) / "outbox",
                limits=self.config.limits,
            )
        log.info("takes part", run=run_id, slots=self.node.slots, store_port=self.node.store_port)
        if not self.reactor.stop.requested:
            self.jobs.begin(registered.orders, self.membership.incarnation)

    def follow(self, orders: Orders) -> None:
        """Orders go on coming while the agent stops, and other agents' leaving gives new ones: what they
        would start could no longer be ended in time."""
        if not self.reactor.stop.requested:
            self.jobs.follow(orders)

    def publish(self, event: Event) -> None:
        assert self.publisher is not None, "a process has said something before the agent joined a run"
        self.publisher.publish(event)

    def report(self, fact: Fact) -> None:
        self.membership.report(fact)

    def close(self) -> None:
        """All down within `stop_s`: replicas, membership, events, then store and forkserver."""
        stop_s = self.config.agent.stop_s
        close_in_order(
            [
                ("jobs", lambda _left_s: self.jobs.end()),
                ("replicas", lambda left_s: self.processes.end_children(min(left_s, 0.4 * stop_s))),
                ("membership", lambda left_s: self.membership.leave(min(left_s, 0.15 * stop_s))),
                ("events", lambda left_s: self.publisher and self.publisher.close(0.8 * left_s)),
                ("store", lambda _left_s: self.processes.close()),
                ("sockets", lambda _left_s: self.membership.close()),
            ],
            stop_s,
        )


def usable_cores(root: Path = Path("/")) -> float:
    """Cores that this process may use: its affinity, bounded by the cpu quota of its control group and of
    every group above (version 2 and 1)."""
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
    """Serve as the agent of node `name` until the flag is set; the exit code."""
    slots, speed, cores = config.agent.slots, config.agent.slot_speed, usable_cores()
    if slots * speed > cores:
        log.warning(
            "slots of this node promise more than its cores; paced replicas will be slower than they say",
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
