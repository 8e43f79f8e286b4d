"""What all benchmarks share: measurements in turns, medians and spread, the machine, progress, the report.

Benchmarks run on shared machines whose speed drifts. Two things are therefore compared by measuring them in
turns (`in_turns`) and by the median of the ratios of neighbours (`ratio_of_pairs`).
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from analysis.report.tables import Table, to_text
from common import __version__


def quantile(values: Sequence[float], fraction: float) -> float:
    """Interpolated linearly between the two nearest values. `fraction`: whole hundredths, 0.01 to 0.99."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(fraction * 100) - 1]


def summary(values: Sequence[float], unit: str = "") -> dict[str, float]:
    """Count, median, 99th percentile, smallest and largest of one or more values; `unit` is appended to each
    key except `n`."""
    return {
        "n": len(values),
        f"p50{unit}": statistics.median(values),
        f"p99{unit}": quantile(values, 0.99),
        f"least{unit}": min(values),
        f"most{unit}": max(values),
    }


def ratio_of_pairs(values: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Summary of value / reference over all pairs; the two of a pair were measured one after the other."""
    return summary([value / reference for value, reference in zip(values, references, strict=True)])


def in_turns(
    rounds: int, *measurements: Callable[[], float], done: Callable[[], None] = lambda: None
) -> list[list[float]]:
    """The values of each measurement, one per round. Every second round goes backwards, so that a machine
    that becomes slower favours none of them. `done` is called after each measurement."""
    values: list[list[float]] = [[] for _ in measurements]
    for number in range(rounds):
        turn = list(zip(measurements, values, strict=True))
        for measure, into in reversed(turn) if number % 2 else turn:
            into.append(measure())
            done()
    return values


def machine() -> dict[str, Any]:
    """The machine that the figures come from. `load` is the average of the last minute; it includes this
    benchmark."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "processor": processor(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "coadapt": __version__,
    }


def processor() -> str:
    """Name of the processor's model, or of its architecture if the system does not say the model."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Progress:
    """A line on stderr: how many parts of a benchmark are done, and the estimated seconds left."""

    def __init__(self, name: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._total, self._clock = name, total, clock
        self._start_s = clock()
        self._done = 0
        self._show("starts")

    def step(self, what: str = "") -> None:
        """One of `total` parts is done."""
        self._done += 1
        left_s = (self._clock() - self._start_s) / self._done * (self._total - self._done)
        self._show(f"{left_s:.0f} s left  {what}")

    def _show(self, text: str) -> None:
        line = f"{self._name}: {self._done}/{self._total}  {text}"
        if not sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)
            return
        end = "\n" if self._done == self._total else ""
        print(f"\r\033[K{line[:100]}", end=end, file=sys.stderr, flush=True)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first aligned left, the others right."""
    return to_text(Table("", heads, rows))


def report(result: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result of a benchmark and the machine: `text` for people, or `result` as one JSON object."""
    facts = machine()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(result | {"machine": facts})).decode())
    else:
        print(text)
        print(f"\n{facts['cores']} cores, load {facts['load']}, {facts['processor']}; {facts['system']}")
