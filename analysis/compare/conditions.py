"""The state of the machine during the runs of an experiment, by policy. Pure."""

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from analysis.compare.pairing import ComparedRun
from common.types import Struct


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The machine during one run, from its run.json, which holds more. None: not recorded."""

    wall_s: float | None = None
    """The whole run, with start and stop of the stack."""
    load_mean: float | None = None
    """Load average of the system."""
    foreign_cpu_fraction: float | None = None
    """Share of the machine's CPU that other processes used."""
    steal_fraction: float | None = None
    """Share of the machine's CPU that the hypervisor took."""
    peak_memory_bytes: float | None = None
    """All processes of the stack together."""


class Spread(Struct, frozen=True):
    least: float
    median: float
    most: float


def noise(
    runs: Sequence[ComparedRun], conditions: Mapping[str, Conditions]
) -> dict[str, dict[str, Spread | None]]:
    """The spread over runs, by policy and field of `Conditions`; None if no run recorded it. `conditions` is
    by run."""
    by_policy: dict[str, list[Conditions]] = {}
    for run in runs:
        by_policy.setdefault(run.policy, []).append(conditions.get(run.name, Conditions()))
    return {
        policy: {name: _spread([getattr(one, name) for one in some]) for name in Conditions.__struct_fields__}
        for policy, some in by_policy.items()
    }


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(min(known), statistics.median(known), max(known)) if known else None
