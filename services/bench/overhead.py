"""`coadapt bench overhead`: what the elastic trainer costs, in steps a second.

A real replica without pacing is compared with a bare torch loop, and two replicas on two nodes with plain
DistributedDataParallel (`workloads/trainer/standalone/baselines.py`), on the same task, optimizer and batch and with one
torch thread each. Neither evaluates. Both of a pair do the same number of steps, one right after the other;
while the loop is measured there are no replicas, and the loop waits while they are.
"""

import os
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from common.lifecycle import signals_as_interrupt
from common.protocol import EventRecord, TrainingSample
from common.types import JobConfig
from services.bench import unevaluated_digits as unevaluated
from services.bench.agent_cluster import AgentCluster, BenchError, endless
from services.bench.measure import Progress, in_turns, ratio_of_pairs, report, summary, table
from services.cli.options import number, whole
from services.launcher.processes import ONE_THREAD, python
from services.launcher.stack import ROOT
from workloads.applications import digits_cnn

APPLICATION = digits_cnn.SPEC.name
NODES, SLOTS = ("a", "b"), 1
BATCH = 128
CASES = {
    "one_replica": (1, BATCH),
    "one_replica_m0": (1, digits_cnn.SPEC.initial_batch_size),
    "ddp": (2, BATCH),
}
"""(replicas, total batch)."""
WARMUP_STEPS = 20
"""Of new replicas, and of the loop each time."""


def command(
    pairs: Annotated[
        int, typer.Option(parser=whole(1, 1000), metavar="N", help="Pairs that each figure comes from.")
    ] = 7,
    seconds: Annotated[
        float,
        typer.Option(
            parser=number(0.05, 3600.0, "0.05 to 3600 seconds"),
            metavar="S",
            help="How long a replica is measured for each.",
        ),
    ] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Steps a second of the trainer, beside a bare torch loop and plain DistributedDataParallel."""
    with signals_as_interrupt():
        result = measure(pairs, seconds)
    report(result, text(result), as_json=as_json)


def measure(pairs: int, window_s: float) -> dict[str, Any]:
    """Ratios are (steps a second of the trainer) / (of the loop): medians over the pairs, and spread."""
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


class Trainer:
    """A context: agents that wait for something to train."""

    def __init__(self) -> None:
        self._samples: list[TrainingSample] = []
        self._cluster = AgentCluster(NODES, SLOTS, self._hear, modules=(unevaluated.__name__,))

    def __enter__(self) -> "Trainer":
        self._cluster.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._cluster.__exit__(*error)

    def rate(self, replicas: int, batch: int, window_s: float) -> float:
        """Steps a second of new replicas, after WARMUP_STEPS, over at least `window_s`."""
        config = JobConfig(atomic_batch=batch // replicas)
        self._cluster.order(endless(unevaluated.SPEC, "measured"), replicas, config)
        self._wait(0.0, WARMUP_STEPS)
        self._wait(window_s, WARMUP_STEPS)
        rate = sum(s.steps for s in self._samples) / sum(s.window_s for s in self._samples)
        self._cluster.clear()
        return rate

    def _wait(self, window_s: float, steps: int) -> None:
        """Until new samples are about so many seconds and steps."""
        self._samples.clear()
        self._cluster.until(
            lambda: (
                sum(s.window_s for s in self._samples) >= window_s
                and sum(s.steps for s in self._samples) >= steps
            ),
            "the replicas said too little",
            window_s,
        )

    def _hear(self, record: EventRecord) -> None:
        if isinstance(record.event, TrainingSample):
            self._samples.append(record.event)


class BaselineProcess:
    """A context: the processes of the loop that the trainer is compared with."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "BaselineProcess":
        try:
            meeting = Path(self._stack.enter_context(TemporaryDirectory(prefix="coadapt-bench-"))) / "meeting"
            for rank in range(self._ranks):
                process = python(
                    *("-m", "workloads.trainer.standalone.baselines", APPLICATION),
                    *("--init-method", meeting.as_uri()),
                    environment=os.environ | ONE_THREAD | {"RANK": str(rank), "WORLD_SIZE": str(self._ranks)},
                    cwd=ROOT,
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
        """Steps a second over about `window_s`."""
        step_s = self._train(WARMUP_STEPS, batch) / WARMUP_STEPS
        steps = max(round(window_s / step_s), WARMUP_STEPS)
        return steps / self._train(steps, batch)

    def _train(self, steps: int, batch: int) -> float:
        """Seconds that the first rank took."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps} {batch}\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(answers):
            raise BenchError("a process of the loop has ended; its output is above")
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
