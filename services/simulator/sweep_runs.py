"""Run the sweeps of a world and tabulate mean completion times: what `coadapt sensitivity` does."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from analysis.compare.sensitivity_study import Axis, Study, SweepOutcome, study
from common import __version__
from common.config import load_config
from common.lifecycle import UserError
from services.simulator.cases import CLUSTERS, SimulationCase, labels, traces_in
from services.simulator.parallel import simulate_all
from services.simulator.results import Result
from services.simulator.run_case import check_cases, is_burst
from services.simulator.sweeps import (
    BASELINES,
    LEFT_OUT,
    LOAD,
    Sweep,
    SweepRun,
    distinct_cases,
    plan_sweep_runs,
    select_sweeps,
)
from workloads.applications import applications
from workloads.files.generate import RECIPES, generate, to_toml
from workloads.files.measured_profile import PROFILES, read_profiles

PUBLISHED = ("workload-1.csv", "workload-2.csv")
"""The workloads of osdi21 by default, in the folder `workloads` next to the traces."""
SEEDS = {"calibrated": 2, "osdi21": 1}
"""Seeds of each workload by default."""
LINE_EVERY_S = 10.0
MAX_WHY_CHARS = 200


def run_study(
    world: str,
    *,
    names: Sequence[str] = (),
    workloads: Sequence[str] = (),
    requests: str = "tuned",
    seeds: int | None = None,
    traces: Path | None = None,
    profiles: Path | None = None,
    processes: int | None = None,
) -> tuple[Study, bool]:
    """The tables of the sweeps in `names`, or of all sweeps, and whether every run has a figure (in every run
    all jobs completed). `workloads` are files or names of recipes, whose jobs make these `requests`; empty
    means those of the world by default. Raises UserError."""
    sweeps, baseline = select_sweeps(world, names), BASELINES[world]
    with tempfile.TemporaryDirectory() as folder:
        if world == "osdi21":
            base = published_cases(traces, workloads, seeds or SEEDS[world])
        else:
            base = recipe_cases(profiles, workloads, requests, seeds or SEEDS[world], Path(folder))
        check_cases(base)
        bursts = {case.label for case in base if is_burst(case)}
        runs = plan_sweep_runs(sweeps, base, bursts)
        if not runs:
            raise UserError(f"--sweep {LOAD}: in every workload all jobs arrive at once, whatever the load")
        cases = distinct_cases(runs)
        results = dict(zip(cases, simulate_all(cases, processes, LINE_EVERY_S), strict=True))
    outcomes = [_outcome(member, results[member.case]) for member in runs]
    left_out = {} if names else dict(LEFT_OUT[world])
    if any(sweep.name == LOAD for sweep in sweeps):
        left_out |= {f"{LOAD}, {label}": "its jobs all come at once" for label in sorted(bursts)}
    axes = [_axis(sweep, baseline) for sweep in sweeps]
    found = study(world, __version__, baseline, axes, outcomes, left_out)
    return found, all(outcome.mean_jct_s is not None for outcome in outcomes)


def published_cases(traces: Path | None, workloads: Sequence[str], seeds: int) -> list[SimulationCase]:
    """One case for each of the published workloads and each seed, everything else as by default."""
    default = [traces_in(traces).parent / "workloads" / name for name in PUBLISHED]
    named = labels([Path(name) for name in workloads] or default)
    return [
        _case("osdi21", label=label, workload=path, seed=seed, traces=traces)
        for path, label in named.items()
        if path is not None
        for seed in range(1, seeds + 1)
    ]


def recipe_cases(
    profiles: Path | None, workloads: Sequence[str], requests: str, seeds: int, folder: Path
) -> list[SimulationCase]:
    """One case for each workload and seed. The jobs of a recipe differ from seed to seed, and are written to
    `folder`; those of a file are the same for all seeds."""
    size = CLUSTERS["calibrated"]
    measured = read_profiles(profiles or PROFILES, applications(load_config(os.environ).applications.modules))
    cases = []
    for name in dict.fromkeys(workloads or RECIPES):
        for seed in range(1, seeds + 1):
            label, path = Path(name).stem, Path(name)
            if name in RECIPES:
                label, path = f"{name}-{requests}", folder / f"{name}-{requests}-{seed}.toml"
                made = generate(RECIPES[name], requests, seed, measured, size.nodes, size.slots)
                path.write_text(to_toml(made), encoding="utf-8")
            cases.append(_case("calibrated", label=label, workload=path, seed=seed, profiles=profiles))
    return cases


def _case(world: str, **fields: Any) -> SimulationCase:
    """A case on the default cluster of the world, under its baseline policy."""
    cluster = structs.asdict(CLUSTERS[world])
    return SimulationCase(world=world, policy=BASELINES[world], **cluster, **fields)


def _axis(sweep: Sweep, baseline: str) -> Axis:
    return Axis(
        name=sweep.name,
        title=sweep.title,
        points=tuple(point.label for point in sweep.points),
        default=sweep.default.label,
        policies=(baseline, *sweep.policies),
    )


def _outcome(member: SweepRun, result: Result) -> SweepOutcome:
    found = result.problems
    return SweepOutcome(
        sweep=member.sweep,
        point=member.point,
        policy=member.policy,
        workload=result.label,
        seed=result.seed,
        mean_jct_s=None if found else result.mean_jct_s,
        why="; ".join(found)[:MAX_WHY_CHARS],
    )
