"""Real replicas, forked from a forkserver and driven over their pipes, without agent or scheduler."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from common.codec import decode
from common.config import TrainerConfig
from common.protocol import JobRaised, ReplicaMessage, ReplicaOrder, ReplicaStart, TrainingSample
from common.types import JobConfig, JobSpec
from tests.integration import tiny_app

M = TypeVar("M")
TIMEOUT_S = 40.0
PRELOADED = [
    "__main__",
    __name__,
    "workloads.trainer.replica",
    "workloads.trainer.store",
    "workloads.trainer.verify",
]

os.environ["OMP_NUM_THREADS"] = "1"
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOADED)


def tiny_spec(**changes: Any) -> JobSpec:
    app = tiny_app.SPEC
    values: dict[str, Any] = {
        "id": "job",
        "application": app.name,
        "seed": 7,
        "target": 0.0,
        "max_progress": 100_000.0,
        "replicas": 1,
        "batch_size": app.initial_batch_size,
        "min_batch_size": app.initial_batch_size,
        "max_batch_size": app.max_batch_size,
        "min_atomic_batch": app.min_atomic_batch,
        "max_atomic_batch": app.max_atomic_batch,
        "max_replicas": 8,
        "settings": {},
    }
    return JobSpec(**(values | changes))


def _replica(connection: Connection, start: ReplicaStart) -> None:
    from workloads.trainer.replica import run_replica

    run_replica(connection, start)


def _store(connection: Connection) -> None:
    from workloads.trainer.store import run_store

    run_store(connection, "127.0.0.1")


class Fleet:
    """The replicas of one job; `messages` are all that they have sent, in order of arrival."""

    def __init__(self, folder: Path, spec: JobSpec, store_port: int, config: TrainerConfig) -> None:
        self.folder, self.spec, self.store_port, self.config = folder, spec, store_port, config
        self.members: list[str] = []
        """Of the newest group, by rank."""
        self.messages: list[tuple[str, Any]] = []
        self.processes: dict[str, Any] = {}
        self.pipes: dict[str, Connection] = {}
        self.generation = 0
        self.group = 0
        self.checkpoint = ""

    def order(
        self, replicas: int, atomic_batch: int, accumulation: int = 0, survivors: int | None = None
    ) -> int:
        """The next generation, in a new group: the first of the present members that still live survive (at
        most `survivors`), newcomers fill up. Its number."""
        self.generation += 1
        self.group = self.generation
        living = [name for name in self.members if self.processes[name].exitcode is None]
        stay = living[: replicas if survivors is None else survivors]
        newcomers = [self._start() for _ in range(replicas - len(stay))]
        order = self._order_of(replicas, atomic_batch, accumulation)
        self.members = [*stay, *newcomers]
        for name in living:
            self._send(name, order, self.members.index(name) if name in stay else -1)
        for name in newcomers:
            self._send(name, order, self.members.index(name))
        return self.generation

    def change_batch(self, atomic_batch: int, accumulation: int = 0) -> int:
        """The next generation, in the same group."""
        self.generation += 1
        order = self._order_of(len(self.members), atomic_batch, accumulation)
        for rank, name in enumerate(self.members):
            self._send(name, order, rank)
        return self.generation

    def preempt(self) -> int:
        self.generation += 1
        self.group = self.generation
        for name in self.members:
            if self.processes[name].exitcode is None:
                self._send(name, self._order_of(0, 1, 0), -1)
        self.members = []
        return self.generation

    def wait_for(self, kind: type[M], when: Callable[[M], bool] = lambda message: True) -> M:
        """The first message of a kind, of those that have come and those that come in time."""
        end_s = time.monotonic() + TIMEOUT_S
        seen = 0
        while True:
            for _, message in self.messages[seen:]:
                if isinstance(message, kind) and when(message):
                    return message
                assert not isinstance(message, JobRaised), f"{message.reason}\n{message.output_tail}"
            seen = len(self.messages)
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                ends = {name: process.exitcode for name, process in self.processes.items()}
                raise TimeoutError(f"no {kind.__name__}; exit codes {ends}; last {self.messages[-5:]}")
            self._receive(left_s)

    def wait_for_step(self, step: int) -> TrainingSample:
        return self.wait_for(TrainingSample, lambda sample: sample.total_steps >= step)

    def wait_for_exit(self, name: str) -> int:
        process = self.processes[name]
        end_s = time.monotonic() + TIMEOUT_S
        while name in self.pipes and time.monotonic() < end_s:
            self._receive(1.0)
        process.join(max(end_s - time.monotonic(), 0.0))
        assert process.exitcode is not None, f"{name} has not ended"
        return int(process.exitcode)

    def of(self, kind: type[M]) -> list[M]:
        return [message for _, message in self.messages if isinstance(message, kind)]

    def losses(self) -> dict[int, float]:
        """By step, of samples that are about one step."""
        return {sample.total_steps: sample.loss for sample in self.of(TrainingSample) if sample.steps == 1}

    def _start(self) -> str:
        name = f"replica-{len(self.processes)}"
        ours, theirs = context.Pipe()
        start = ReplicaStart(
            spec=self.spec,
            replica=name,
            job_dir=str(self.folder),
            checkpoint=self.checkpoint,
            slot_speed=1.0,
            trainer=self.config,
            application_modules=(tiny_app.MODULE,),
        )
        process = context.Process(target=_replica, args=(theirs, start), daemon=True)
        process.start()
        theirs.close()
        self.processes[name], self.pipes[name] = process, ours
        return name

    def _order_of(self, replicas: int, atomic_batch: int, accumulation: int) -> ReplicaOrder:
        return ReplicaOrder(
            generation=self.generation,
            group=self.group,
            rank=-1,
            world_size=replicas,
            nodes=1,
            config=JobConfig(atomic_batch=atomic_batch, accumulation=accumulation),
            store_host="127.0.0.1",
            store_port=self.store_port,
        )

    def _send(self, name: str, order: ReplicaOrder, rank: int) -> None:
        try:
            self.pipes[name].send_bytes(msgspec.msgpack.encode(msgspec.structs.replace(order, rank=rank)))
        except OSError:
            assert self.processes[name].exitcode != 0

    def _receive(self, wait_s: float) -> None:
        names = {id(pipe): name for name, pipe in self.pipes.items()}
        for pipe in wait(list(self.pipes.values()), wait_s):
            name = names[id(pipe)]
            try:
                self.messages.append((name, decode(pipe.recv_bytes(), ReplicaMessage)))  # type: ignore[union-attr]
            except (EOFError, OSError):
                self.pipes.pop(name).close()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(TIMEOUT_S)
        for pipe in self.pipes.values():
            pipe.close()


EVERY_STEP = TrainerConfig(
    sample_every_s=1e-9,
    collective_timeout_s=8.0,
    order_timeout_s=30.0,
    checkpoint_every_s=10_000.0,
    warmup_steps=0,
)


class Store(NamedTuple):
    port: int
    pid: int


@contextmanager
def running_store() -> Iterator[Store]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_store, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S)
        yield Store(msgspec.msgpack.decode(ours.recv_bytes(), type=int), process.pid)
    finally:
        ours.close()
        process.join(TIMEOUT_S)
        process.kill()
