"""`coadapt bench overhead`: what the elastic trainer costs, in steps per second.

A real replica without pacing is compared with a bare torch loop, and two replicas on two nodes with plain
DistributedDataParallel (`workloads/trainer/standalone/baselines.py`): same task, optimizer and batch, one
torch thread per process, no evaluation. The trainer and the loop of a pair are measured one right after the
other: there are no replicas while the loop is measured, and the loop waits while replicas train.
"""

import os
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.protocol import EventRecord, TrainingSample
from common.types import JobConfig
from services.bench import unevaluated_digits as unevaluated
from services.bench.agent_cluster import AgentCluster, BenchError, endless
from services.bench.measure import Progress, in_turns, ratio_of_pairs, summary, table
from services.launcher.processes import ONE_THREAD, running_python
from workloads.applications import digits_cnn

APPLICATION = digits_cnn.SPEC.name
NODES, SLOTS = ("a", "b"), 1
BATCH = 128
CASES = {
    "one_replica": (1, BATCH),
    "one_replica_m0": (1, digits_cnn.SPEC.initial_batch_size),
    "ddp": (2, BATCH),
}
"""(replicas, total batch size)."""
BASELINE = (
    "from workloads.trainer.standalone.baselines import train_baseline\n"
    "train_baseline({application!r}, init_method={init_method!r})"
)
WARMUP_STEPS = 20
"""Steps before each measurement, of new replicas and of the loop."""


def measure(pairs: int, window_s: float) -> dict[str, Any]:
    """Each ratio is the trainer's steps per second over the loop's: its median over all pairs, and spread."""
    cases: dict[str, dict[str, Any]] = {}
    progress = Progress("overhead", 2 * pairs * len(CASES))
    with Trainer() as trainer, ExitStack() as stack:
        ranks = {replicas for replicas, _ in CASES.values()}
        loops = {size: stack.enter_context(BaselineProcess(size)) for size in sorted(ranks)}
        for name, (replicas, batch) in CASES.items():
            rates, loop_rates = in_turns(
                pairs,
                partial(trainer.rate, replicas, batch, window_s),
                partial(loops[replicas].rate, batch, window_s),
                done=progress.step,
            )
            cases[name] = {
                "replicas": replicas,
                "total_batch": batch,
                "trainer_steps_per_s": summary(rates),
                "loop_steps_per_s": summary(loop_rates),
                "ratio": ratio_of_pairs(rates, loop_rates),
            }
    medians = {f"{name}_ratio": case["ratio"]["p50"] for name, case in cases.items()}
    return {"benchmark": "overhead", "application": APPLICATION, "pairs": pairs, **medians, "cases": cases}


class Trainer(AgentCluster):
    """Agents whose replicas train the digits without evaluation."""

    def __init__(self) -> None:
        super().__init__(NODES, SLOTS, self._observe, modules=(unevaluated.__name__,))
        self._samples: list[TrainingSample] = []

    def rate(self, replicas: int, batch: int, window_s: float) -> float:
        """Steps per second of new replicas, after WARMUP_STEPS, over at least `window_s`."""
        config = JobConfig(atomic_batch=batch // replicas)
        self.order(endless(unevaluated.SPEC, "measured"), replicas, config)
        self._wait(0.0, WARMUP_STEPS)
        self._wait(window_s, WARMUP_STEPS)
        rate = sum(s.steps for s in self._samples) / sum(s.window_s for s in self._samples)
        self.clear()
        return rate

    def _wait(self, window_s: float, steps: int) -> None:
        """Until new samples cover at least so many seconds and steps."""
        self._samples.clear()
        self.until(
            lambda: (
                sum(s.window_s for s in self._samples) >= window_s
                and sum(s.steps for s in self._samples) >= steps
            ),
            "the replicas reported too few steps",
            window_s,
        )

    def _observe(self, record: EventRecord) -> None:
        if isinstance(record.event, TrainingSample):
            self._samples.append(record.event)


class BaselineProcess:
    """A context: the processes of the training loop that the trainer is compared with."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "BaselineProcess":
        try:
            folder = self._stack.enter_context(TemporaryDirectory(prefix="coadapt-bench-"))
            for rank in range(self._ranks):
                meeting = Path(folder) / "rendezvous"
                process = running_python(
                    *("-c", BASELINE.format(application=APPLICATION, init_method=meeting.as_uri())),
                    environment=os.environ | ONE_THREAD | {"RANK": str(rank), "WORLD_SIZE": str(self._ranks)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
                self._processes.append(self._stack.enter_context(process))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def rate(self, batch: int, window_s: float) -> float:
        """Steps per second over about `window_s`."""
        step_s = self._train(WARMUP_STEPS, batch) / WARMUP_STEPS
        steps = max(round(window_s / step_s), WARMUP_STEPS)
        return steps / self._train(steps, batch)

    def _train(self, steps: int, batch: int) -> float:
        """Seconds that the first rank takes for these steps."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps} {batch}\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(answers):
            raise BenchError("a process of the training loop has ended; its output is above")
        return float(answers[0])


def text(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{case['replicas']} against {'a bare loop' if case['replicas'] == 1 else 'plain DDP'}",
            str(case["total_batch"]),
            f"{case['trainer_steps_per_s']['p50']:.1f}",
            f"{case['loop_steps_per_s']['p50']:.1f}",
            f"{case['ratio']['p50']:.3f}",
            f"{case['ratio']['least']:.3f} to {case['ratio']['most']:.3f}",
        ]
        for case in result["cases"].values()
    ]
    heads = ["replicas", "batch", "trainer steps/s", "loop steps/s", "ratio", "spread"]
    return f"{APPLICATION}, medians of {result['pairs']} pairs\n\n{table(heads, rows)}"
