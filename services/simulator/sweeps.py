"""The sweeps of `coadapt sensitivity`: each varies one setting and keeps all others at their defaults.

Every sweep has one point with all defaults, against which its other points are read.
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
"""The policy of each world against which the others are compared."""
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
        "interference": "the world `calibrated` does not model it: its times were measured on busy nodes, "
        "so they include what jobs lose to their neighbours"
    },
}
"""Sweeps that a world cannot run, and why."""
LOAD = "load"
POWER = -1.0
"""The default exponent p of `pollux`."""


class SweepPoint(Struct, frozen=True):
    label: str
    changes: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields of a SimulationCase."""
    parameters: str = ""
    """For the sweep's `parametrised` policies, as in `pollux:power=0`."""
    default: bool = False


class Sweep(Struct, frozen=True):
    name: str
    title: str
    """The setting that varies, and its unit."""
    points: tuple[SweepPoint, ...]
    policies: tuple[str, ...] = ADAPTIVE
    """In addition to the baseline."""
    parametrised: tuple[str, ...] = ()
    """Those of the policies that take the parameters of a point."""

    @property
    def default(self) -> SweepPoint:
        return next(point for point in self.points if point.default)


class SweepRun(Struct, frozen=True):
    """One run of a sweep."""

    sweep: str
    point: str
    policy: str
    """Without the parameters of the point."""
    case: SimulationCase


def sweeps(world: str) -> dict[str, Sweep]:
    """The sweeps of a world, by name."""
    osdi21 = world == "osdi21"
    all_sweeps = (
        _varied(
            "round",
            "seconds between two rounds",
            "round_s",
            (30.0, 60.0, 120.0, 240.0) if osdi21 else (0.5, 1.0, 2.0, 4.0, 8.0),
            default=60.0 if osdi21 else 2.0,
        ),
        _restart(osdi21),
        _varied(
            "times",
            "largest relative error of the step times that the policy sees",
            "times_error",
            (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
            default=0.0,
        ),
        _varied(
            "noise",
            "noise scale that the policy sees / true noise scale",
            "noise_error",
            (0.5, 0.71, 1.0, 1.41, 2.0),
            default=1.0,
        ),
        _varied(LOAD, "factor on the rate of arrivals", "load", (0.5, 0.75, 1.0, 1.5, 2.0), default=1.0),
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
            title="pollux with one half of it switched off",
            points=(SweepPoint("as by default", default=True),),
            policies=ABLATIONS,
        ),
        _varied(
            "interference",
            "fraction of speed lost by jobs that span nodes and share one",
            "interference",
            (0.0, 0.1, 0.25, 0.5),
            default=0.0,
            policies=("dynamic", "throughput", "pollux", "pollux:avoid_interference=false", "coadapt"),
        ),
    )
    return {sweep.name: sweep for sweep in all_sweeps if sweep.name not in LEFT_OUT[world]}


def _restart(osdi21: bool) -> Sweep:
    sweep = _varied(
        "restart",
        "seconds that a resize costs"
        if osdi21
        else "seconds that a group needs to form, at every start and resize; policies know it",
        "restart_s",
        (0.0, 15.0, 30.0, 60.0) if osdi21 else (0.0, 1.0, 5.0, 15.0, 30.0, 60.0),
        default=30.0 if osdi21 else None,
    )
    measured = () if osdi21 else (SweepPoint("as measured", default=True),)
    return structs.replace(sweep, points=(*measured, *sweep.points))


def _varied(
    name: str,
    title: str,
    field: str,
    values: Sequence[float],
    default: float | None,
    policies: tuple[str, ...] = ADAPTIVE,
) -> Sweep:
    """A sweep over one field of the cases. `default` is the default value of the field, if it is a point."""
    points = (
        SweepPoint(f"{value:g}", default=True)
        if value == default
        else SweepPoint(f"{value:g}", {field: value})
        for value in values
    )
    return Sweep(name=name, title=title, points=tuple(points), policies=policies)


# --------------------------------------------------------------------------- the runs


def select_sweeps(world: str, names: Sequence[str]) -> list[Sweep]:
    """The named sweeps of a world, or all if no name is given. Raises UserError."""
    known = sweeps(world)
    for name in names:
        if name in LEFT_OUT[world]:
            raise UserError(f"--sweep {name}: {LEFT_OUT[world][name]}")
        if name not in known:
            raise UserError(f"--sweep {name!r}: allowed with --world {world}: {', '.join(known)}")
    return [sweep for name, sweep in known.items() if not names or name in names]


def plan_sweep_runs(
    wanted: Sequence[Sweep], base: Sequence[SimulationCase], bursts: Collection[str] = ()
) -> list[SweepRun]:
    """Every run of the sweeps. `base` has a case for each workload and seed, with all other settings at their
    defaults. `bursts` are the labels of workloads whose jobs all arrive at the same time: the load sweep
    skips them, because the rate of arrivals changes nothing there."""
    baseline = BASELINES[base[0].world]
    return [
        SweepRun(sweep.name, point.label, policy, _case(case, policy, sweep, point))
        for sweep in wanted
        for point in sweep.points
        for policy in (baseline, *sweep.policies)
        for case in base
        if sweep.name != LOAD or case.label not in bursts
    ]


def _case(case: SimulationCase, policy: str, sweep: Sweep, point: SweepPoint) -> SimulationCase:
    takes_parameters = point.parameters and policy in sweep.parametrised
    full_policy = f"{policy}:{point.parameters}" if takes_parameters else policy
    changed = structs.replace(case, policy=full_policy, **point.changes)
    if make_policy(policy).needs_profiles:
        return changed
    # The policy ignores measurements, so errors in them need no new simulation.
    return structs.replace(changed, times_error=case.times_error, noise_error=case.noise_error)


def distinct_cases(runs: Sequence[SweepRun]) -> list[SimulationCase]:
    """The cases to simulate. Sweeps share their default points."""
    return list(dict.fromkeys(member.case for member in runs))
