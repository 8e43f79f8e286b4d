"""`coadapt bench resize`: how long training pauses when a job is resized in place.

A job goes through 1 -> 2 -> 4 -> 2 -> 1 replicas in each round, on the real agents of two nodes and without
pacing. A pause lasts from the end of the last step of the old group to the end of the first step of the new
one, by the clock of the replica that broadcasts the state. In the same run `torchrun --standalone` starts the
same job with four processes, from scratch: measured from its start to the end of their first step. The
elastic job does not run meanwhile.
"""

import os
import statistics
import subprocess
import sys
import time
from tempfile import TemporaryDirectory
from typing import Any

from common.protocol import EventRecord, GenerationStarted, TrainingSample
from common.types import ApplicationSpec, batch_config
from services.bench.agent_cluster import AgentCluster, BenchError, endless
from services.bench.measure import Progress, summary, table
from services.launcher.processes import ONE_THREAD, running_python

SIZES = (2, 4, 2, 1)
"""Replicas in the order of a round, which begins with one."""
NODES, SLOTS = ("a", "b"), 2
COMPARED_CHANGE = (2, 4)
"""The change that is compared with a restart by torchrun."""
BASELINE = (
    "from workloads.trainer.standalone.baselines import train_baseline\n"
    "train_baseline({application!r}, one_step={batch})"
)
TORCHRUN_PROCESSES = 4
TORCHRUN_STARTS = 5
TORCHRUN_S = 300.0
"""Time limit of one start by torchrun, long enough for a busy machine."""


def measure(application: ApplicationSpec, rounds: int) -> dict[str, Any]:
    """`p50_s` and `p99_s` are over all changes; `ratio` is the median restart by torchrun over the median
    pause of 2 -> 4. An order is "followed" when the first step of its generation has been made."""
    starts = min(rounds, TORCHRUN_STARTS)
    due = {number * rounds // starts for number in range(starts)}
    progress = Progress("resize", rounds * len(SIZES) + starts)
    pauses_s: dict[tuple[int, int], list[float]] = {}
    followed_s: dict[tuple[int, int], list[float]] = {}
    restarts_s: list[float] = []
    with ResizedJob(application) as job:
        for number in range(rounds):
            if number in due:
                job.end()
                restarts_s.append(torchrun_s(application))
                progress.step("torchrun")
                job.begin()
            for size in SIZES:
                change = (job.replicas, size)
                pause_s, after_s = job.resize(size)
                pauses_s.setdefault(change, []).append(pause_s)
                followed_s.setdefault(change, []).append(after_s)
                progress.step(f"{change[0]} -> {size}")
    every = summary([pause_s for values in pauses_s.values() for pause_s in values], "_s")
    restarts = summary(restarts_s, "_s")
    return {
        "benchmark": "resize",
        "application": application.name,
        "total_batch": application.max_batch_size,
        "rounds": rounds,
        "p50_s": every["p50_s"],
        "p99_s": every["p99_s"],
        "torchrun_restart_s": restarts["p50_s"],
        "ratio": restarts["p50_s"] / statistics.median(pauses_s[COMPARED_CHANGE]),
        "pauses": every,
        "torchrun": restarts,
        "transitions": {
            f"{old}->{new}": {
                **summary(values, "_s"),
                "followed_p50_s": statistics.median(followed_s[old, new]),
            }
            for (old, new), values in pauses_s.items()
        },
    }


class ResizedJob(AgentCluster):
    """Two nodes; between `begin` and `end` a job trains on them."""

    def __init__(self, application: ApplicationSpec) -> None:
        super().__init__(NODES, SLOTS, self._observe)
        self._application = application
        self._spec = endless(application, "resized")
        self._begun = 0
        self._started: dict[int, GenerationStarted] = {}
        self._sampled: set[int] = set()
        self.replicas = 0

    def begin(self) -> None:
        """Start a new job from scratch with one replica."""
        self._begun += 1
        self._spec = endless(self._application, f"resized-{self._begun}")
        self.resize(1)

    def resize(self, replicas: int) -> tuple[float, float]:
        """Returns (seconds without a step, seconds until the order was followed), after the job has reported
        steps with so many replicas."""
        config = batch_config(self._spec.max_batch_size, replicas, self._spec)
        ordered_s = time.monotonic()
        generation = self.order(self._spec, replicas, config)
        self.until(lambda: generation in self._started, f"{replicas} replicas made no step")
        followed_s = time.monotonic() - ordered_s
        self.until(lambda: generation in self._sampled, f"{replicas} replicas reported nothing")
        self.replicas = replicas
        started = self._started[generation]
        return started.seconds_lost + started.first_step_s, followed_s

    def end(self) -> None:
        self.clear()
        self.replicas = 0

    def _observe(self, record: EventRecord) -> None:
        if isinstance(record.event, GenerationStarted):
            self._started[record.event.generation] = record.event
        elif isinstance(record.event, TrainingSample):
            self._sampled.add(record.event.generation)


def torchrun_s(application: ApplicationSpec) -> float:
    """Seconds from the start of `torchrun` to the end of the job's first step on all its processes."""
    start_s = time.monotonic()
    with (
        TemporaryDirectory(prefix="coadapt-bench-") as folder,  # torchrun itself removes nothing
        running_python(
            *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={TORCHRUN_PROCESSES}"),
            *("--no-python", sys.executable, "-c"),
            BASELINE.format(application=application.name, batch=application.max_batch_size),
            environment=os.environ | ONE_THREAD | {"TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process,
    ):
        try:
            output, errors = process.communicate(timeout=TORCHRUN_S)
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"no step of torchrun's processes in {TORCHRUN_S:g} s") from error
    if process.returncode != 0:
        raise BenchError(f"torchrun failed with exit code {process.returncode}:\n{errors[-1000:]}")
    return float(output.split()[-1]) - start_s


def text(result: dict[str, Any]) -> str:
    def row(name: str, of: dict[str, float], *more: str) -> list[str]:
        return [name, str(of["n"]), *(f"{1000 * of[key]:.0f}" for key in ("p50_s", "p99_s", "most_s")), *more]

    rows = [row(name, of, f"{1000 * of['followed_p50_s']:.0f}") for name, of in result["transitions"].items()]
    heads = ["replicas", "times", "p50 ms", "p99 ms", "max ms", "order to step ms"]
    return (
        f"{result['application']}, total batch {result['total_batch']}: "
        "milliseconds without a training step\n\n"
        f"{table(heads, rows)}\n\n"
        f"all changes: p50 {1000 * result['p50_s']:.0f} ms, p99 {1000 * result['p99_s']:.0f} ms\n"
        f"torchrun restart, {TORCHRUN_PROCESSES} processes, {result['torchrun']['n']} times: "
        f"p50 {result['torchrun_restart_s']:.2f} s, {result['ratio']:.0f} times the pause of 2->4"
    )
