"""What `coadapt sensitivity` varies: sweeps over one thing at a time, each from the world as it is.

Every sweep has one point at which everything is as by default, so that its other points are read against it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from common.lifecycle import UserError
from common.types import Struct
from services.scheduler.policies.registry import make_policy
from services.simulator.cases import SimulationCase

BASELINES = {"calibrated": "fixed", "osdi21": "tiresias"}
"""The policy of each world that all others are compared with."""
ADAPTIVE = ("dynamic", "throughput", "pollux", "coadapt")
ABLATIONS = (
    "pollux",
    "pollux:adapt_replicas=false",
    "pollux:adapt_batch=false",
    "throughput",
    "dynamic",
)
LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "osdi21": {},
    "calibrated": {
        "interference": "the world `calibrated` has no such notion: what jobs lose beside each other is in "
        "the times that were measured with all slots busy"
    },
}
"""Sweeps that a world has no notion of, and why."""
LOAD = "load"
POWER = -1.0
"""p of `pollux` by default."""


class SweepPoint(Struct, frozen=True):
    """`changes` are fields of a Case; `parameters` go to the policies that the sweep names for them."""

    label: str
    changes: dict[str, Any] = msgspec.field(default_factory=dict)
    parameters: str = ""
    default: bool = False


class Sweep(Struct, frozen=True):
    name: str
    title: str
    """What is varied, and its unit."""
    points: tuple[SweepPoint, ...]
    policies: tuple[str, ...] = ADAPTIVE
    """Beside the baseline."""
    parametrised: tuple[str, ...] = ()
    """Of the policies, those that take the points' parameters."""

    @property
    def default(self) -> SweepPoint:
        return next(point for point in self.points if point.default)


class Member(Struct, frozen=True):
    """One run of a sweep: which point, policy and workload it stands for."""

    sweep: str
    point: str
    policy: str
    """As the sweep names it, without the point's parameters."""
    case: SimulationCase


def sweeps(world: str) -> dict[str, Sweep]:
    """All that this world can be asked, by name."""
    artifact = world == "osdi21"
    found = (
        _varied(
            "round",
            "seconds between two rounds",
            "round_s",
            (30.0, 60.0, 120.0, 240.0) if artifact else (0.5, 1.0, 2.0, 4.0, 8.0),
            default=60.0 if artifact else 2.0,
        ),
        _restart(artifact),
        _varied(
            "times",
            "largest error of the step times that the policy is told",
            "times_error",
            (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
            default=0.0,
        ),
        _varied(
            "noise",
            "noise scale that the policy is told, over the true one",
            "noise_error",
            (0.5, 0.71, 1.0, 1.41, 2.0),
            default=1.0,
        ),
        _varied(LOAD, "arrivals so many times as fast", "load", (0.5, 0.75, 1.0, 1.5, 2.0), default=1.0),
        Sweep(
            name="power",
            title="exponent p of pollux's objective",
            points=tuple(
                SweepPoint(f"{p:g}", parameters="" if p == POWER else f"power={p:g}", default=p == POWER)
                for p in (-4.0, -2.0, POWER, -0.5, 0.0, 0.5, 1.0)
            ),
            policies=("pollux",),
            parametrised=("pollux",),
        ),
        Sweep(
            name="ablation",
            title="pollux without one half of it",
            points=(SweepPoint("as by default", default=True),),
            policies=ABLATIONS,
        ),
        _varied(
            "interference",
            "speed that jobs lose which span nodes and share one",
            "interference",
            (0.0, 0.1, 0.25, 0.5),
            default=0.0,
            policies=("dynamic", "throughput", "pollux", "pollux:avoid_interference=false", "coadapt"),
        ),
    )
    return {sweep.name: sweep for sweep in found if sweep.name not in LEFT_OUT[world]}


def _restart(artifact: bool) -> Sweep:
    sweep = _varied(
        "restart",
        "seconds that a resize costs"
        if artifact
        else "seconds that a group takes to meet, at every start and resize; policies are told",
        "restart_s",
        (0.0, 15.0, 30.0, 60.0) if artifact else (0.0, 1.0, 5.0, 15.0, 30.0, 60.0),
        default=30.0 if artifact else None,
    )
    measured = () if artifact else (SweepPoint("as measured", default=True),)
    return structs.replace(sweep, points=(*measured, *sweep.points))


def _varied(
    name: str,
    title: str,
    field: str,
    values: Sequence[float],
    default: float | None,
    policies: tuple[str, ...] = ADAPTIVE,
) -> Sweep:
    """Of one field of the cases. `default`: which value is the field's own, if any of them is."""
    points = (
        SweepPoint(f"{value:g}", default=True)
        if value == default
        else SweepPoint(f"{value:g}", {field: value})
        for value in values
    )
    return Sweep(name=name, title=title, points=tuple(points), policies=policies)


# --------------------------------------------------------------------------- the runs


def chosen(world: str, names: Sequence[str]) -> list[Sweep]:
    """Sweeps by name; none: all. Raises UserError."""
    known = sweeps(world)
    for name in names:
        if name in LEFT_OUT[world]:
            raise UserError(f"--sweep {name}: {LEFT_OUT[world][name]}")
        if name not in known:
            raise UserError(f"--sweep {name!r}: allowed with --world {world}: {', '.join(known)}")
    return [sweep for name, sweep in known.items() if not names or name in names]


def members(
    wanted: Sequence[Sweep], base: Sequence[SimulationCase], bursts: Collection[str] = ()
) -> list[Member]:
    """Every run of the sweeps; `base` has a case for each workload and seed, all else as by default. `bursts`
    are the labels of workloads whose jobs all come at once: how dense arrivals are is nothing to them."""
    baseline = BASELINES[base[0].world]
    return [
        Member(sweep.name, point.label, policy, _case(case, policy, sweep, point))
        for sweep in wanted
        for point in sweep.points
        for policy in (baseline, *sweep.policies)
        for case in base
        if sweep.name != LOAD or case.label not in bursts
    ]


def _case(case: SimulationCase, policy: str, sweep: Sweep, point: SweepPoint) -> SimulationCase:
    takes = point.parameters and policy in sweep.parametrised
    changed = structs.replace(
        case, policy=f"{policy}:{point.parameters}" if takes else policy, **point.changes
    )
    if make_policy(policy).needs_profiles:
        return changed
    # What it is told of its jobs does not matter to it: no need to simulate it again.
    return structs.replace(changed, times_error=case.times_error, noise_error=case.noise_error)


def distinct(runs: Sequence[Member]) -> list[SimulationCase]:
    """The cases to simulate: sweeps have their default points in common."""
    return list(dict.fromkeys(member.case for member in runs))
