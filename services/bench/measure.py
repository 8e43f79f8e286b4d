"""What all benchmarks share: measuring in turns, medians and spread, the machine, progress, the report.

The machines that this runs on are shared and their speed drifts. What is compared is therefore measured in
turns (`in_turns`), and reported as the median of the ratios of neighbours (`ratio_of_pairs`).
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from analysis.report.tables import Table, to_text
from common import __version__


def quantile(values: Sequence[float], fraction: float) -> float:
    """With linear interpolation between the two nearest values; `fraction` in hundredths, 0.01 to 0.99."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(fraction * 100) - 1]


def summary(values: Sequence[float], unit: str = "") -> dict[str, float]:
    """Count, median, 99th percentile, least and most of at least one value; the names end in `unit`."""
    return {
        "n": len(values),
        f"p50{unit}": statistics.median(values),
        f"p99{unit}": quantile(values, 0.99),
        f"least{unit}": min(values),
        f"most{unit}": max(values),
    }


def ratio_of_pairs(values: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Summary of value / reference of each pair, which were measured one right after the other."""
    return summary([value / reference for value, reference in zip(values, references, strict=True)])


def in_turns(
    rounds: int, *measurements: Callable[[], float], done: Callable[[], None] = lambda: None
) -> list[list[float]]:
    """Values of each measurement, one a round. Every second round goes backwards, so that a machine that
    becomes slower favours nobody. `done` is called after each measurement."""
    values: list[list[float]] = [[] for _ in measurements]
    for number in range(rounds):
        turn = list(zip(measurements, values, strict=True))
        for measure, into in reversed(turn) if number % 2 else turn:
            into.append(measure())
            done()
    return values


def machine() -> dict[str, Any]:
    """Facts without which the figures mean little; `load` is of the last minute, this benchmark included."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "processor": _processor(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "coadapt": __version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


class Progress:
    """A line on stderr: how far a benchmark is, and the seconds left if it goes on like this."""

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
    """Columns of text, the first to the left and the others to the right."""
    return to_text(Table("", heads, rows))


def report(result: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print a benchmark's result: `text` for people, or `result` and the machine as one JSON object."""
    facts = machine()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(result | {"machine": facts})).decode())
    else:
        print(text)
        print(f"\n{facts['cores']} cores, load {facts['load']}, {facts['processor']}; {facts['system']}")
