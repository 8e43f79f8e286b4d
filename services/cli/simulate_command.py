"""`coadapt simulate`: its options, and how its results are shown."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import number, path_of, whole

if TYPE_CHECKING:
    from services.simulator.results import Result

MAX_NODES = 10_000
MAX_JOBS = 1_000_000
MAX_SLOTS = 4096
MAX_SEED = 2**31 - 1
MIN_ROUND_S, MAX_SECONDS = 0.01, 1e6
MAX_INTERFERENCE = 0.99


def simulate(
    policies: Annotated[
        list[str],
        typer.Option("--policy", metavar="NAME", help='Policy, or "all"; several: give the option again.'),
    ],
    workloads: Annotated[
        list[Path] | None,
        typer.Option(
            "--workload",
            parser=path_of,
            metavar="FILE",
            help="Workload (CSV or TOML), a folder of them, or the name of a set; several: give it again.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            parser=whole(1, MAX_JOBS),
            metavar="N",
            help="In the synthetic world, instead of a workload: N jobs made up from the seed.",
        ),
    ] = None,
    world: Annotated[str, typer.Option(metavar="NAME", help="osdi21, calibrated or synthetic.")] = "osdi21",
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
            help="For calibrated: what `coadapt calibrate` wrote; without it, the profiles that come along.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, MAX_NODES), metavar="N", help="Nodes of the cluster (16; calibrated: 2)."
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(parser=whole(1, MAX_SLOTS), metavar="M", help="Slots of each node (4)."),
    ] = None,
    round_s: Annotated[
        float | None,
        typer.Option(
            "--round-s",
            parser=number(MIN_ROUND_S, MAX_SECONDS, f"{MIN_ROUND_S} to {MAX_SECONDS:.0f} seconds"),
            metavar="S",
            help="Between two rounds (60; calibrated: 2).",
        ),
    ] = None,
    interference: Annotated[
        float,
        typer.Option(
            parser=number(0.0, MAX_INTERFERENCE, f"0 to {MAX_INTERFERENCE:g}"),
            metavar="F",
            help="Speed that jobs lose which span nodes and share one.",
        ),
    ] = 0.0,
    seeds: Annotated[
        list[int] | None,
        typer.Option(
            "--seed", parser=whole(0, MAX_SEED), metavar="N", help="Seed; several: give the option again."
        ),
    ] = None,
    restart_s: Annotated[
        float | None,
        typer.Option(
            "--restart-s",
            parser=number(0.0, MAX_SECONDS, f"0 to {MAX_SECONDS:.0f} seconds"),
            metavar="S",
            help="What a resize costs a job; without it, what the world says.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_of,
            metavar="DIR",
            help="Keep the event log of every run in a folder of its own in DIR.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--jobs-parallel", "-j", parser=whole(1, 1024), metavar="N", help="At most so many at once."
        ),
    ] = None,
    fairness: Annotated[
        bool,
        typer.Option("--fairness", help="Also simulate each job alone on its share of the cluster: rho."),
    ] = False,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory", help="Jobs start from what jobs of their application have shown (not in synthetic)."
        ),
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print one table that compares the policies.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> int:
    """Replay workloads on a virtual clock, with the scheduler's own core and policies.

    Every workload is run with every policy and every seed; runs go to several processes.

    Exit 1 when a job failed, no job of a run could run, a policy gave no valid decision, or a run was given
    up because its jobs would never end. A run that is interrupted leaves no folder."""
    from services.simulator.parallel import one_thread_each, simulated

    one_thread_each()
    from msgspec.structs import replace

    from common.lifecycle import signals_as_interrupt
    from services.simulator.cases import (
        CLUSTERS,
        WORLDS,
        SimulationCase,
        check,
        claimed,
        every_policy,
        labels,
    )

    if world not in WORLDS:
        raise typer.BadParameter(f"--world {world!r}: allowed: {', '.join(WORLDS)}")
    if bool(workloads) == (jobs is not None):
        raise typer.BadParameter("either --workload or --jobs is needed, and not both")
    if jobs is not None and world != "synthetic":
        raise typer.BadParameter(f"--jobs {jobs}: only with --world synthetic")
    if interference and world != "osdi21":
        raise typer.BadParameter(f"--interference {interference:g}: only with --world osdi21")
    if as_json and as_markdown:
        raise typer.BadParameter("--json or --markdown, not both")
    if traces is not None and world != "osdi21":
        raise typer.BadParameter(f"--traces {traces}: only with --world osdi21")
    if profiles is not None and world != "calibrated":
        raise typer.BadParameter(f"--profiles {profiles}: only with --world calibrated")
    if memory and world == "synthetic":
        raise typer.BadParameter("--memory: only with --world osdi21 or calibrated")
    usual = CLUSTERS[world]
    named = labels(workloads) if workloads else {None: f"synthetic-{jobs}"}
    cases = [
        SimulationCase(
            label=label,
            workload=path,
            policy=policy,
            world=world,
            traces=traces,
            nodes=nodes or usual.nodes,
            slots=slots or usual.slots,
            round_s=round_s or usual.round_s,
            interference=interference,
            seed=seed,
            restart_s=restart_s,
            out=out,
            jobs=jobs or 0,
            fairness=fairness,
            memory=memory,
            profiles=profiles,
        )
        for path, label in named.items()
        for policy in every_policy(policies)
        for seed in dict.fromkeys(seeds or [0])
    ]
    check(cases)
    with signals_as_interrupt(), claimed(out, [case.run_id for case in cases]):
        results = list(simulated(cases, processes))
    if len(results) == 1:  # then the figures are those of the whole command
        results = [replace(results[0], wall_s=time.time() - _started_s(), cpu_s=time.process_time())]
    if as_json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.encode(results[0] if len(results) == 1 else results) + b"\n")
    elif as_markdown:
        from services.simulator.policy_table import comparison

        print(comparison(results))
        _show_ends(results)
    else:
        _show(results)
        _show_ends(results)
    return int(any(result.failed or result.undecided or result.stalled or result.idle for result in results))


def _started_s() -> float:
    import psutil

    started_s: float = psutil.Process().create_time()
    return started_s


def _show(results: "Sequence[Result]") -> None:
    from analysis.report.tables import stdout_console, to_console
    from services.simulator.policy_table import run_table

    to_console(stdout_console(), run_table(results))


def _show_ends(results: "Sequence[Result]") -> None:
    """What did not go well."""
    for result in results:
        for what, jobs in (("refused", result.refused), ("failed", result.failed)):
            for job_id, reason in jobs.items():
                print(f"{result.run_id}: {job_id} {what}: {reason}")
        for problem in (result.undecided, result.stalled, result.idle):
            if problem:
                print(f"{result.run_id}: {problem}")
