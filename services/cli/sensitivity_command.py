"""`coadapt sensitivity`: what the policies' completion times do when one thing is varied."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import path_of, whole

if TYPE_CHECKING:
    from analysis.compare.sensitivity_study import SweepOutcome
    from services.simulator.cases import SimulationCase
    from services.simulator.results import Result
    from services.simulator.sweeps import Member

WORKLOADS = ("workload-1.csv", "workload-2.csv")
"""Of osdi21, by default, in `workloads` beside the traces."""
SEEDS = {"calibrated": 2, "osdi21": 1}
LINE_EVERY_S = 10.0
MAX_WHY_CHARS = 200


def sensitivity(
    world: Annotated[str, typer.Option(metavar="NAME", help="calibrated or osdi21.")],
    traces: Annotated[
        Path | None,
        typer.Option(
            parser=path_of, metavar="DIR", help="For osdi21: the artifact's folder, which holds traces/."
        ),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(
            parser=path_of,
            metavar="DIR",
            help="For calibrated: measured profiles, instead of those that come with coadapt.",
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="NAME", help="Only this one; several: give the option again."),
    ] = None,
    workloads: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            metavar="FILE",
            help="Workload file, or in calibrated the name of a set; several: give the option again. "
            "Without: all sets, or two of the published workloads.",
        ),
    ] = None,
    requests: Annotated[
        str, typer.Option(metavar="KIND", help="What the jobs of sets ask for: tuned or realistic.")
    ] = "tuned",
    seeds: Annotated[
        int | None,
        typer.Option(parser=whole(1, 1000), metavar="N", help="So many seeds of each workload, from 1."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_of,
            metavar="DIR",
            help="Write sensitivity-WORLD.json, sensitivity-WORLD.md and a figure a sweep.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not Markdown.")] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            "--jobs-parallel", "-j", parser=whole(1, 1024), metavar="N", help="At most so many at once."
        ),
    ] = None,
) -> int:
    """Vary one thing at a time, and compare the policies' mean completion times.

    The sweeps: round, restart, times, noise, load, power, ablation, and in osdi21 interference. Every ratio
    is taken workload by workload and seed by seed: to a baseline policy, and to the same policy by default.

    Exit 1 when a run has no figure, since not every one of its jobs completed: it is named."""
    from services.simulator.parallel import one_thread_each

    one_thread_each()
    from analysis.compare.sensitivity_study import Axis, encoded, study
    from analysis.report.sensitivity_report import figures, markdown
    from common import __version__
    from common.lifecycle import UserError, signals_as_interrupt
    from services.simulator.cases import is_burst
    from services.simulator.parallel import simulated
    from services.simulator.sweeps import BASELINES, LEFT_OUT, LOAD, chosen, distinct, members

    if world not in BASELINES:
        raise typer.BadParameter(f"--world {world!r}: allowed: {', '.join(BASELINES)}")
    if traces is not None and world != "osdi21":
        raise typer.BadParameter(f"--traces {traces}: only with --world osdi21")
    if profiles is not None and world != "calibrated":
        raise typer.BadParameter(f"--profiles {profiles}: only with --world calibrated")
    if out is not None:
        writable(out)
    wanted, baseline = chosen(world, names or ()), BASELINES[world]
    with tempfile.TemporaryDirectory() as made, signals_as_interrupt():
        if world == "osdi21":
            base = _published(traces, workloads, seeds or SEEDS[world])
        else:
            base = _sets(profiles, workloads, requests, seeds or SEEDS[world], Path(made))
        bursts = {case.label for case in base if is_burst(case)}
        runs = members(wanted, base, bursts)
        if not runs:
            raise UserError(f"--sweep {LOAD}: the jobs of every workload come at once, at any load")
        cases = distinct(runs)
        results = dict(zip(cases, simulated(cases, processes, LINE_EVERY_S), strict=True))
    axes = [
        Axis(
            sweep.name,
            sweep.title,
            tuple(point.label for point in sweep.points),
            sweep.default.label,
            (baseline, *sweep.policies),
        )
        for sweep in wanted
    ]
    outcomes = [_outcome(member, results[member.case]) for member in runs]
    left_out = {} if names else dict(LEFT_OUT[world])
    if any(sweep.name == LOAD for sweep in wanted):
        left_out |= {f"{LOAD}, {label}": "its jobs all come at once" for label in sorted(bursts)}
    found = study(world, __version__, baseline, axes, outcomes, left_out)
    if out is not None:
        try:
            (out / f"sensitivity-{world}.json").write_text(encoded(found), encoding="utf-8")
            (out / f"sensitivity-{world}.md").write_text(markdown(found), encoding="utf-8")
            figures(found, out)
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error
    print(encoded(found) if as_json else markdown(found), end="")
    return int(any(outcome.mean_jct_s is None for outcome in outcomes))


def writable(out: Path) -> None:
    """Make the folder of results, before anything is simulated for it. Raises UserError."""
    from common.lifecycle import UserError

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error


def _published(traces: Path | None, workloads: list[str] | None, seeds: int) -> "list[SimulationCase]":
    from services.simulator.cases import check, labels, traces_in

    place = traces_in(traces)
    files = [Path(name) for name in workloads or ()] or [
        place.parent / "workloads" / name for name in WORKLOADS
    ]
    base = [
        _case("osdi21", label, path, seed, traces=traces)
        for path, label in labels(files).items()
        if path is not None
        for seed in range(1, seeds + 1)
    ]
    check(base)
    return base


def _sets(
    profiles: Path | None, workloads: list[str] | None, requests: str, seeds: int, folder: Path
) -> "list[SimulationCase]":
    """A set is made anew for each seed; the jobs of a file are the same for all."""
    from common.config import load_config
    from services.simulator.cases import CLUSTERS, check
    from workloads.applications import applications
    from workloads.files.generate import RECIPES, REQUESTS, generate, to_toml
    from workloads.files.measured_profile import PROFILES, read_profiles

    if requests not in REQUESTS:
        raise typer.BadParameter(f"--requests {requests!r}: allowed: {', '.join(REQUESTS)}")
    usual = CLUSTERS["calibrated"]
    measured = read_profiles(profiles or PROFILES, applications(load_config(os.environ).applications.modules))
    base = []
    for name in dict.fromkeys(workloads or RECIPES):
        for seed in range(1, seeds + 1):
            label, path = Path(name).stem, Path(name)
            if name in RECIPES:
                label, path = f"{name}-{requests}", folder / f"{name}-{requests}-{seed}.toml"
                text = to_toml(generate(RECIPES[name], requests, seed, measured, usual.nodes, usual.slots))
                path.write_text(text, encoding="utf-8")
            base.append(_case("calibrated", label, path, seed, profiles=profiles))
    check(base)
    return base


def _case(
    world: str,
    label: str,
    workload: Path,
    seed: int,
    *,
    traces: Path | None = None,
    profiles: Path | None = None,
) -> "SimulationCase":
    from services.simulator.cases import CLUSTERS, SimulationCase
    from services.simulator.sweeps import BASELINES

    usual = CLUSTERS[world]
    return SimulationCase(
        label=label,
        workload=workload,
        policy=BASELINES[world],
        world=world,
        traces=traces,
        profiles=profiles,
        nodes=usual.nodes,
        slots=usual.slots,
        round_s=usual.round_s,
        interference=0.0,
        seed=seed,
        restart_s=None,
        out=None,
    )


def _outcome(member: "Member", result: "Result") -> "SweepOutcome":
    from analysis.compare.sensitivity_study import SweepOutcome

    problems = [
        f"{job_id}: {why}" for why_by in (result.failed, result.refused) for job_id, why in why_by.items()
    ]
    problems += [problem for problem in (result.undecided, result.stalled, result.idle) if problem]
    return SweepOutcome(
        sweep=member.sweep,
        point=member.point,
        policy=member.policy,
        workload=result.label,
        seed=result.seed,
        mean_jct_s=None if problems else result.mean_jct_s,
        why="; ".join(problems)[:MAX_WHY_CHARS],
    )
