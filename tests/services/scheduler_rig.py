"""Drives schedulers with real sockets and files, on a clock that the test moves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from common.config import (
    Config,
    EndpointsConfig,
    RunConfig,
    SchedulerConfig,
)
from common.eventlog import EventLogWriter
from common.lifecycle import StopFlag
from common.protocol import (
    Event,
    EventRecord,
    Heartbeat,
    RegisterAgent,
    RoundDecided,
)
from common.transport import Reactor, RequestClient
from services.scheduler.commands import Emit
from services.scheduler.core import SchedulerCore
from services.scheduler.journal import read_journal
from services.scheduler.policies import make_policy
from services.scheduler.service import SchedulerService, make_core
from services.scheduler.state import State
from tests.services.scheduler_driver import make_node
from workloads.tasks import applications
from workloads.traces import JobFields, complete_spec

WAIT_S = 20.0


class Rig:
    """Schedulers of one run, one after the other, on a clock that the test moves. Nobody else is there
    unless the test makes them; without a logger all events stay in the run's outboxes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 100.0
        names = [name for name in EndpointsConfig.__struct_fields__ if name != "keys_dir"]
        self.config = Config(
            run=RunConfig(logs_dir=str(folder), run_id="run", seed=3),
            endpoints=EndpointsConfig(**{name: f"ipc://{folder}/{name}" for name in names}),
            scheduler=SchedulerConfig(policy="fixed", agent_timeout_s=5.0, heartbeat_s=0.5),
        )
        self.run_dir = folder / "run"
        self.reactor: Reactor | None = None

    def start(self, **sections: Any) -> SchedulerService:
        config = msgspec.structs.replace(self.config, **sections)
        self.reactor = Reactor(StopFlag())
        core = make_core(config, make_policy(config.scheduler.policy))
        self.service = SchedulerService(config, core, self.reactor, clock=lambda: self.now_s)
        return self.service

    def kill(self) -> None:
        """What the kernel does: locks are lifted, sockets closed, files stay."""
        self.service.publisher._delivery.close()
        self.service.journal.close()
        self.close()

    def close(self) -> None:
        if self.reactor:
            self.reactor.close()
            self.reactor = None

    def until(self, condition: Callable[[], object]) -> None:
        assert self.reactor
        assert self.reactor.run_until(condition, WAIT_S)

    def ask(self, request: Any) -> Any:
        """Over a real socket."""
        assert self.reactor
        client = RequestClient(self.config.endpoints.scheduler_requests, reactor=self.reactor)
        replies: list[Any] = []
        client.post(request, replies.append, lambda: replies.append("silence"))
        self.until(lambda: replies)
        client.close()
        return replies[0]

    def records(self) -> list[EventRecord]:
        """All that the scheduler has published, in order, as it stands in the outboxes."""
        found = []
        for path in self.run_dir.glob("outbox/scheduler-*.msgpack"):
            with path.open("rb") as file:
                found += [msgspec.convert(tree, EventRecord) for tree in msgpack.Unpacker(file)]
        return sorted(found, key=lambda record: (record.wall_s, record.seq))

    def events(self) -> list[Event]:
        return [record.event for record in self.records()]

    def move_to_log(self, count: int) -> None:
        """A logger has taken the first records, and their outboxes are cut accordingly."""
        log = EventLogWriter(self.run_dir)
        log.append(self.records()[:count])
        log.close()
        for path in self.run_dir.glob("outbox/scheduler-*.msgpack"):
            with path.open("rb") as file:
                kept = [msgspec.convert(tree, EventRecord) for tree in msgpack.Unpacker(file)][count:]
            path.write_bytes(b"".join(map(msgspec.msgpack.encode, kept)))


def replayed(core: SchedulerCore, run_dir: Path) -> list[bytes]:
    """The decisions that come of the inputs in the journal of a run."""
    state, found = State(run_id=run_dir.name), []
    for entry in read_journal(run_dir):
        state, commands = core.step(state, entry.input, entry.now_s)
        found += [
            decided(command.event)
            for command in commands
            if isinstance(command, Emit) and isinstance(command.event, RoundDecided)
        ]
    return found


def decided(event: RoundDecided) -> bytes:
    """All of a decision but how long it took, which the service measures."""
    return msgspec.msgpack.encode(msgspec.structs.replace(event, decision_s=0.0))


def spec(job_id: str, **fields: Any) -> Any:
    return complete_spec(JobFields(application="digits-cnn", **fields), applications(), job_id, 1)


def join(service: SchedulerService, name: str = "a", incarnation: str = "first", slots: int = 4) -> Any:
    return service.handle(RegisterAgent(node=make_node(name, slots=slots), incarnation=incarnation))


def beat(service: SchedulerService, name: str = "a", incarnation: str = "first") -> Any:
    version = service.state.orders_version
    return service.handle(Heartbeat(node=name, incarnation=incarnation, orders_version=version))
