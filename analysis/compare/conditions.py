"""The state of the machine during the runs of an experiment, by policy. Pure."""

import statistics
from collections.abc import Mapping, Sequence

from analysis.compare.experiment_files import RunRecord
from analysis.compare.pairing import ComparedRun
from common.types import Struct

FIGURES = ("wall_s", "load_mean", "foreign_cpu_fraction", "steal_fraction", "peak_memory_bytes")
"""Fields of `RunRecord`."""


class Spread(Struct, frozen=True):
    least: float
    median: float
    most: float


def noise(
    runs: Sequence[ComparedRun], records: Mapping[str, RunRecord]
) -> dict[str, dict[str, Spread | None]]:
    """The spread over runs, by policy and figure; None if no run recorded it. `records` is by run."""
    by_policy: dict[str, list[RunRecord | None]] = {}
    for run in runs:
        by_policy.setdefault(run.policy, []).append(records.get(run.name))
    return {
        policy: {name: _spread([getattr(record, name, None) for record in own]) for name in FIGURES}
        for policy, own in by_policy.items()
    }


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [float(value) for value in values if value is not None]
    return Spread(min(known), statistics.median(known), max(known)) if known else None
