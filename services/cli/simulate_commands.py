"""Commands that use the simulator: simulate, sensitivity, fidelity."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.errors import out_errors, prepare_out
from services.cli.options import (
    MAX_SEED,
    JobsParallelOption,
    JsonOption,
    MarkdownOption,
    ProfilesOption,
    TracesOption,
    choice_option,
    number_option,
    path_argument,
    path_option,
    repeated_option,
    whole_option,
)

if TYPE_CHECKING:
    from services.simulator.results import Result

WORLDS = ("osdi21", "calibrated", "synthetic")
SENSITIVITY_WORLDS = ("calibrated", "osdi21")
REQUESTS = ("tuned", "realistic")
MAX_SECONDS = 1_000_000


def simulate(
    policies: Annotated[
        list[str],
        repeated_option("--policy", 'Policy, or "all" for all of ours.'),
    ],
    workloads: Annotated[
        list[Path] | None,
        path_option(
            "--workload",
            "Workload file (CSV or TOML), folder of workload files, or name of a set that comes with "
            "coadapt. Can be repeated.",
            metavar="FILE",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        whole_option(
            "--jobs",
            low=1,
            high=1_000_000,
            help="Number of jobs to generate from the seed, instead of a workload; only in the world "
            "synthetic.",
        ),
    ] = None,
    world: Annotated[
        str,
        choice_option(
            "--world",
            WORLDS,
            "Where job behaviour comes from: the traces of the Pollux artifact (osdi21), measured profiles "
            "(calibrated) or formulas (synthetic).",
        ),
    ] = "osdi21",
    traces: TracesOption = None,
    profiles: ProfilesOption = None,
    nodes: Annotated[
        int | None,
        whole_option(
            "--nodes", low=1, high=10_000, help="Number of nodes. Default: 16; in the world calibrated 2."
        ),
    ] = None,
    slots: Annotated[
        int | None, whole_option("--slots", low=1, high=4096, help="Slots of each node. Default: 4.")
    ] = None,
    round_s: Annotated[
        float | None,
        number_option(
            "--round-s",
            0.01,
            MAX_SECONDS,
            "seconds",
            "Time between two scheduling rounds. Default: 60; in the world calibrated 2.",
        ),
    ] = None,
    interference: Annotated[
        float,
        number_option(
            "--interference",
            0.0,
            0.99,
            "",
            "Fraction of its speed that a job on several nodes loses while it shares one of them with "
            "another such job; only in the world osdi21.",
        ),
    ] = 0.0,
    seeds: Annotated[
        list[int] | None,
        whole_option("--seed", low=0, high=MAX_SEED, help="Seed. Can be repeated. Default: 0."),
    ] = None,
    restart_s: Annotated[
        float | None,
        number_option(
            "--restart-s",
            0.0,
            MAX_SECONDS,
            "seconds",
            "Time that a resize costs a job. Default: as the world has it.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        path_option("--out", "Folder for event logs, one folder for each run. Default: no log is written."),
    ] = None,
    processes: JobsParallelOption = None,
    fairness: Annotated[
        bool,
        typer.Option(
            "--fairness",
            help="Also simulate each job alone on its share of the cluster, and print finish-time fairness "
            "(rho).",
        ),
    ] = False,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Start jobs from the profiles of earlier jobs of the same application; not in the world "
            "synthetic.",
        ),
    ] = False,
    as_markdown: MarkdownOption = False,
    as_json: JsonOption = False,
) -> int:
    """Simulate workloads on a virtual clock.

    The scheduler core and the policies are those that schedule real jobs. Every workload is simulated
    with every policy and every seed, in several processes. Give either --workload or --jobs. The output
    is one row for each run; with --markdown one row for each policy; with --json the result object of the
    run, or a list of them. An interrupted run leaves no folder in --out.

    Exit codes: 0 success; 1 a job failed, no job could run, a policy gave no valid decision, or a run was
    given up because its jobs would never end; 2 bad input; 130 interrupted."""
    from services.simulator.parallel import limit_to_one_thread, simulate_all

    limit_to_one_thread()
    from msgspec.structs import replace

    from common.lifecycle import signals_as_interrupt
    from services.simulator.cases import CLUSTERS, SimulationCase, every_policy, labels
    from services.simulator.output_folders import claimed
    from services.simulator.run_case import check_cases

    if bool(workloads) == (jobs is not None):
        raise typer.BadParameter("give either --workload or --jobs, not both")
    if as_json and as_markdown:
        raise typer.BadParameter("give either --json or --markdown, not both")
    _check_world(
        world,
        ("--jobs", jobs, ("synthetic",)),
        ("--interference", interference, ("osdi21",)),
        ("--traces", traces, ("osdi21",)),
        ("--profiles", profiles, ("calibrated",)),
        ("--memory", memory, ("osdi21", "calibrated")),
    )
    cluster = CLUSTERS[world]
    named = labels(workloads) if workloads else {None: f"synthetic-{jobs}"}
    cases = [
        SimulationCase(
            label=label,
            workload=path,
            policy=policy,
            world=world,
            traces=traces,
            nodes=nodes or cluster.nodes,
            slots=slots or cluster.slots,
            round_s=round_s or cluster.round_s,
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
    check_cases(cases)
    with signals_as_interrupt(), claimed(out, [case.run_id for case in cases]):
        results = list(simulate_all(cases, processes))
    if len(results) == 1:  # then wall and CPU time are those of the whole command
        results = [replace(results[0], wall_s=time.time() - _started_s(), cpu_s=time.process_time())]
    if as_json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.encode(results[0] if len(results) == 1 else results) + b"\n")
    else:
        _print_results(results, as_markdown)
    return int(any(result.failed or result.undecided or result.stalled or result.idle for result in results))


def sensitivity(
    world: Annotated[str, choice_option("--world", SENSITIVITY_WORLDS, "World to simulate.")],
    traces: TracesOption = None,
    profiles: ProfilesOption = None,
    sweeps: Annotated[
        list[str] | None,
        repeated_option(
            "--sweep",
            "Run only this sweep. Allowed: round, restart, times, noise, load, power, ablation, and in the "
            "world osdi21 interference.",
        ),
    ] = None,
    workloads: Annotated[
        list[str] | None,
        repeated_option(
            "--workload",
            "Workload file, or in the world calibrated the name of a recipe. Default: all recipes, or in the "
            "world osdi21 two of the published workloads.",
            metavar="FILE",
        ),
    ] = None,
    requests: Annotated[
        str, choice_option("--requests", REQUESTS, "Resources that the jobs of recipes request.")
    ] = "tuned",
    seeds: Annotated[
        int | None,
        whole_option(
            "--seeds",
            low=1,
            high=1000,
            help="Number of seeds of each workload, from 1. Default: 2; in the world osdi21 1.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        path_option(
            "--out", "Folder for sensitivity-WORLD.json, sensitivity-WORLD.md and one figure for each sweep."
        ),
    ] = None,
    as_json: JsonOption = False,
    processes: JobsParallelOption = None,
) -> int:
    """Vary one setting at a time and compare policies.

    Compared are mean completion times. Ratios are taken for each workload and seed: to a baseline policy,
    and to the same policy at the default setting. The output is Markdown unless --json is given.

    Exit codes: 0 success; 1 in some runs not all jobs completed, these are listed; 2 bad input; 130
    interrupted."""
    from services.simulator.parallel import limit_to_one_thread

    limit_to_one_thread()
    from analysis.compare.sensitivity_study import encoded
    from analysis.report.sensitivity_report import figures, markdown
    from common.lifecycle import signals_as_interrupt
    from services.simulator.sweep_runs import run_study

    _check_world(world, ("--traces", traces, ("osdi21",)), ("--profiles", profiles, ("calibrated",)))
    if out is not None:
        prepare_out(out)
    with signals_as_interrupt():
        study, is_complete = run_study(
            world,
            names=sweeps or (),
            workloads=workloads or (),
            requests=requests,
            seeds=seeds,
            traces=traces,
            profiles=profiles,
            processes=processes,
        )
    if out is not None:
        with out_errors(out):
            (out / f"sensitivity-{world}.json").write_text(encoded(study), encoding="utf-8")
            (out / f"sensitivity-{world}.md").write_text(markdown(study), encoding="utf-8")
            figures(study, out)
    print(encoded(study) if as_json else markdown(study), end="")
    return int(not is_complete)


def fidelity(
    experiment: Annotated[Path, path_argument("Folder of real runs, as `coadapt experiment` writes it.")],
    profiles: ProfilesOption = None,
    out: Annotated[
        Path | None,
        path_option("--out", "Folder for fidelity.json, fidelity.md and fidelity.svg. Default: DIR."),
    ] = None,
    own_steps: Annotated[
        bool,
        typer.Option(
            "--own-steps",
            help="Scale the step times of the profiles, by application, to those of each run. This removes "
            "the effect of the machine's speed on that day. The files are then named fidelity-own-steps.",
        ),
    ] = False,
    as_json: JsonOption = False,
    processes: JobsParallelOption = None,
) -> int:
    """Compare real runs with their simulation.

    Each run's own workload, policy, seed, rounds and nodes are simulated with measured profiles into the
    folder DIR-simulated, which replaces the results of an earlier call. The policy that wins a set is the
    one with the smallest geometric mean over the seeds that all policies have, on both sides. The output
    is Markdown unless --json is given.

    Exit codes: 0 success; 1 a run was left out, a simulated job failed, or a simulated run was given up;
    2 bad input; 130 interrupted."""
    from services.simulator.parallel import limit_to_one_thread

    limit_to_one_thread()
    from common.lifecycle import signals_as_interrupt
    from services.simulator.replication import replicate

    if out is not None:
        prepare_out(out)
    with signals_as_interrupt():
        replication = replicate(experiment, profiles, own_steps=own_steps, processes=processes)
    with out_errors(out or experiment):
        replication.write(out or experiment)
    print(replication.as_json() if as_json else replication.as_markdown(), end="")
    print(*replication.problems, sep="\n", end="\n" if replication.problems else "", file=sys.stderr)
    return int(bool(replication.problems or replication.comparison.left_out))


def _check_world(world: str, *options: tuple[str, object, tuple[str, ...]]) -> None:
    """Refuse options that are given and have no meaning in this world; each comes with its value and the
    worlds in which it is allowed."""
    for option, value, worlds in options:
        if value and world not in worlds:
            shown = option if value is True else f"{option} {value}"
            raise typer.BadParameter(f"{shown}: allowed only with --world {' or '.join(worlds)}")


def _started_s() -> float:
    """When this process started, in seconds of wall time."""
    import psutil

    started_s: float = psutil.Process().create_time()
    return started_s


def _print_results(results: "Sequence[Result]", as_markdown: bool) -> None:
    from services.simulator.policy_table import comparison

    if as_markdown:
        print(comparison(results))
    else:
        from analysis.report.tables import stdout_console, to_console
        from services.simulator.policy_table import run_table

        to_console(stdout_console(), run_table(results))
    for result in results:
        for problem in result.problems:
            print(f"{result.run_id}: {problem}")
