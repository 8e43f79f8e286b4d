"""`coadapt bench pacing`: whether a slot gets the share of a core that its speed says.

Real replicas train at every speed, alone and in pairs, each with a small and a large batch; pairs with small
batches spend much of their time in communication. What a replica has used, all of its threads together, is
read from outside, from the system's CPU clock of its process, between the ends of two steps. Groups are
measured at the same time as long as there are cores for all of them.

A share above the speed is a fault of the pacing. One below it may be due to others that use the machine:
beside it stands how long the replica was ready to run and had to wait for a core. In a pair only the replica
with more to do can use its whole share, since the other one waits for it.
"""

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from itertools import count
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import msgspec
import psutil
import typer

from common.codec import decode
from common.config import TrainerConfig
from common.lifecycle import blocked_signals, signals_as_interrupt
from common.protocol import (
    JobRaised,
    ReplicaLost,
    ReplicaMessage,
    ReplicaOrder,
    ReplicaStart,
    TrainingSample,
)
from common.types import JobConfig
from services.bench.agent_cluster import WAIT_S, BenchError, endless
from services.bench.measure import Progress, report, table
from services.cli.options import number
from services.launcher.processes import ONE_THREAD
from workloads.applications import applications

APPLICATIONS = ("digits-cnn", "char-lm")
REPLICAS = (1, 2)
SPEEDS = (1.0, 0.8, 0.5, 0.3, 0.2, 0.1)
TOLERANCE = 0.05
"""Of share / speed."""
QUIET = 0.05
"""Of the wall time: who waited less for a core was not disturbed by others."""
HOST = "127.0.0.1"
PRELOADED = ["workloads.trainer.replica", "workloads.trainer.store"]


class PacingCase(NamedTuple):
    application: str
    replicas: int
    speed: float

    @property
    def cores(self) -> float:
        return self.replicas * self.speed

    def batches(self) -> tuple[int, int]:
        """Atomic batches, the smallest and the largest."""
        app = applications()[self.application]
        return app.initial_batch_size // self.replicas, app.max_atomic_batch


CASES = tuple(PacingCase(app, n, speed) for speed in SPEEDS for n in REPLICAS for app in APPLICATIONS)


class Use(NamedTuple):
    """Of the processes of a group up to one moment, by rank."""

    at_s: float
    cpu_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    """Ready to run, but without a core."""


def command(
    seconds: Annotated[
        float,
        typer.Option(
            parser=number(0.2, 600.0, "0.2 to 600 seconds"),
            metavar="S",
            help="How long each group is measured.",
        ),
    ] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Share of a core that paced replicas use, over the speed of their slots."""
    with signals_as_interrupt():
        result = measure(CASES, seconds)
    report(result, text(result), as_json=as_json)


def measure(cases: Iterable[PacingCase], window_s: float) -> dict[str, Any]:
    """`least` and `most` are share / speed over all groups, of the replica of each that has used most;
    `quiet_least` is over those alone that hardly had to wait for a core, None where there was none."""
    rounds = in_parallel(cases, len(os.sched_getaffinity(0)))
    progress = Progress("pacing", len(rounds))
    figures: list[dict[str, Any]] = []
    with Workshop() as workshop:
        for together in rounds:
            figures.extend(workshop.measure(together, window_s))
            progress.step()
    ratios = [figure["ratio"] for figure in figures]
    quiet = [figure["ratio"] for figure in figures if max(figure["waited"]) < QUIET]
    return {
        "benchmark": "pacing",
        "window_s": window_s,
        "least": min(ratios),
        "most": max(ratios),
        "within_5_percent": sum(abs(ratio - 1.0) <= TOLERANCE for ratio in ratios),
        "quiet": len(quiet),
        "quiet_least": min(quiet, default=None),
        "groups": figures,
    }


def in_parallel(cases: Iterable[PacingCase], cores: int) -> list[list[PacingCase]]:
    """Cases that fit on the cores together; one that never does goes alone."""
    rounds: list[list[PacingCase]] = []
    for case in sorted(cases, key=lambda case: -case.cores):
        for together in rounds:
            if sum(other.cores for other in together) + case.cores <= cores + 1e-9:
                together.append(case)
                break
        else:
            rounds.append([case])
    return rounds


class Workshop:
    """A context: a store, and a forkserver that has torch imported."""

    def __enter__(self) -> "Workshop":
        self._stack = ExitStack()
        others = psutil.Process().children()
        try:
            self._start()
        except BaseException:
            # The forkserver would not hear of it before torch is imported.
            for child in psutil.Process().children():
                if child not in others:
                    child.kill()
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        os.environ.update(ONE_THREAD)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        with blocked_signals(signal.SIGINT):
            forkserver.ensure_running()
        self._folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="coadapt-bench-")))
        self._jobs = count(1)
        self._pipe = self._stack.enter_context(closing(self.start(_store)[0]))
        self._port = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=int)

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, body: Any, *arguments: Any) -> tuple[Connection, Any]:
        """Our end of the new process's pipe, and the process. It ends when the pipe does."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=body, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def measure(self, cases: Iterable[PacingCase], window_s: float) -> list[dict[str, Any]]:
        """Groups of all these cases at the same time, first with their small batches."""
        figures: list[dict[str, Any]] = []
        with ExitStack() as stack:
            groups = [stack.enter_context(closing(self._group(case))) for case in cases]
            for large in (0, 1):
                for group in groups:
                    group.train(group.case.batches()[large])
                self._until_measured(groups, window_s)
                figures.extend(group.figure() for group in groups)
        return figures

    def _group(self, case: PacingCase) -> "PacedGroup":
        folder = self._folder / f"{next(self._jobs)}"
        folder.mkdir()
        app = applications()[case.application]
        start = ReplicaStart(
            spec=msgspec.structs.replace(endless(app, folder.name), replicas=case.replicas),
            replica=folder.name,
            job_dir=str(folder),
            checkpoint="",
            slot_speed=case.speed,
            trainer=TrainerConfig(sample_every_s=0.1, collective_timeout_s=WAIT_S, warmup_steps=0),
        )
        return PacedGroup(case, [self.start(_replica, start) for _ in range(case.replicas)], self._port)

    def _until_measured(self, groups: list["PacedGroup"], window_s: float) -> None:
        owners = {id(pipe): group for group in groups for pipe in group.pipes}
        pipes = [pipe for group in groups for pipe in group.pipes]
        end_s = time.monotonic() + WAIT_S + window_s
        while not all(group.measured_s() >= window_s for group in groups):
            if time.monotonic() > end_s:
                raise BenchError(f"the replicas said too little in {WAIT_S + window_s:g} s")
            for pipe in wait(pipes, WAIT_S):
                assert isinstance(pipe, Connection)
                owners[id(pipe)].hear(pipe.recv_bytes(), window_s)


class PacedGroup:
    """The replicas of one case, in one process group."""

    def __init__(self, case: PacingCase, replicas: list[tuple[Connection, Any]], store_port: int) -> None:
        self.case = case
        self.pipes = [pipe for pipe, _ in replicas]
        self._processes = [process for _, process in replicas]
        self._store_port = store_port
        self._generation = 0
        self._uses: list[Use] = []
        """At the ends of steps: the first after the warm-up, and the last."""

    def train(self, atomic_batch: int) -> None:
        self._generation += 1
        self._atomic_batch = atomic_batch
        self._uses.clear()
        order = ReplicaOrder(
            generation=self._generation,
            group=1,
            rank=0,
            world_size=self.case.replicas,
            nodes=1,
            config=JobConfig(atomic_batch=atomic_batch),
            store_host=HOST,
            store_port=self._store_port,
        )
        for rank, pipe in enumerate(self.pipes):
            pipe.send_bytes(msgspec.msgpack.encode(msgspec.structs.replace(order, rank=rank)))

    def hear(self, data: bytes, window_s: float) -> None:
        message: ReplicaMessage = decode(data, ReplicaMessage)
        match message:
            case TrainingSample() if message.generation == self._generation and self.measured_s() < window_s:
                self._uses[1:] = [self._use()]
            case JobRaised() | ReplicaLost():
                raise BenchError(f"{self.case.application}: {message.reason}")

    def measured_s(self) -> float:
        return self._uses[-1].at_s - self._uses[0].at_s if self._uses else 0.0

    def figure(self) -> dict[str, Any]:
        """`shares` of a core and `waited` of the wall time, by rank; `ratio` is the largest share / speed."""
        first, last = self._uses
        wall_s = self.measured_s()
        shares = [(after - before) / wall_s for before, after in zip(first.cpu_s, last.cpu_s, strict=True)]
        waited = [
            (after - before) / wall_s for before, after in zip(first.waited_s, last.waited_s, strict=True)
        ]
        return self.case._asdict() | {
            "atomic_batch": self._atomic_batch,
            "wall_s": wall_s,
            "shares": shares,
            "waited": waited,
            "ratio": max(shares) / self.case.speed,
        }

    def _use(self) -> Use:
        pids = [process.pid for process in self._processes]
        cpu_s = tuple(time.clock_gettime(_cpu_clock(pid)) for pid in pids)
        return Use(time.monotonic(), cpu_s, tuple(map(_waited_s, pids)))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()


def _cpu_clock(pid: int) -> int:
    clock = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise BenchError(f"the CPU clock of a replica cannot be read: {os.strerror(error)}")
    return clock.value


def _waited_s(pid: int) -> float:
    """Of all threads of a process; 0 where the system does not tell."""
    waited_ns = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            waited_ns += int(task.read_text().split()[1])
        except OSError:  # the thread has ended
            continue
    return waited_ns / 1e9


def _replica(connection: Connection, start: ReplicaStart) -> None:
    from workloads.trainer.replica import run_replica

    run_replica(connection, start)


def _store(connection: Connection) -> None:
    from workloads.trainer.store import run_store

    run_store(connection, HOST)


def text(result: dict[str, Any]) -> str:
    rows = [
        [
            figure["application"],
            f"{figure['replicas']}",
            f"{figure['speed']:g}",
            f"{figure['atomic_batch']}",
            *(
                " ".join(f"{value:.3f}" for value in values)
                for values in (figure["shares"], [figure["ratio"]], figure["waited"])
            ),
        ]
        for figure in sorted(result["groups"], key=lambda f: (f["application"], f["replicas"], f["speed"]))
    ]
    heads = ["application", "replicas", "speed", "batch", "share", "share/speed", "waited for a core"]
    quiet = result["quiet_least"]
    return (
        f"{table(heads, rows)}\n\nshare / speed of {len(rows)} groups: {result['least']:.3f} to "
        f"{result['most']:.3f}; {result['within_5_percent']} within {TOLERANCE:.0%}\n"
        f"{result['quiet']} of them waited less than {QUIET:.0%} of the time for a core"
        + ("" if quiet is None else f"; the least of these: {quiet:.3f}")
    )
