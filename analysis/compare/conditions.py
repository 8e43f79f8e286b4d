"""What the machine did during the runs of an experiment, policy by policy. Pure."""

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from analysis.compare.pairing import ComparedRun
from common.types import Struct


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run, as its run.json says: None where it does not. That holds more.

    wall_s: the whole run, the stack's start and stop included
    load_mean: load average of the system
    foreign_cpu_fraction: of the machine's CPU, what other processes used
    steal_fraction: of the machine's CPU, what the hypervisor took
    peak_memory_bytes: of all processes of the stack together
    """

    wall_s: float | None = None
    load_mean: float | None = None
    foreign_cpu_fraction: float | None = None
    steal_fraction: float | None = None
    peak_memory_bytes: float | None = None


class Spread(Struct, frozen=True):
    least: float
    median: float
    most: float


def noise(
    runs: Sequence[ComparedRun], conditions: Mapping[str, Conditions]
) -> dict[str, dict[str, Spread | None]]:
    """By policy and field, over its runs; None where none of them has it. `conditions` are by run."""
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
