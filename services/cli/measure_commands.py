"""Commands that measure this machine and this installation: calibrate, bench."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from services.cli.command_group import CommandGroup
from services.cli.options import (
    MAX_SEED,
    JsonOption,
    number_option,
    one_of,
    path_option,
    repeated_option,
    whole,
    whole_option,
)

Item = TypeVar("Item")
RULES = ("adascale", "linear", "none")
MAX_MULTIPLE = 1024
AppsOption = Annotated[list[str] | None, repeated_option("--app", "Application. Default: all.")]

bench = typer.Typer(
    name="bench", cls=CommandGroup, help="Measure this installation. The machine should be otherwise idle."
)


def calibrate(
    apps: AppsOption = None,
    out: Annotated[
        Path | None,
        path_option(
            "--out",
            "Folder for the profiles. Default: workloads/profiles of the checkout; an installed coadapt "
            "needs --out.",
        ),
    ] = None,
    seeds: Annotated[
        int, whole_option("--seeds", low=1, high=1000, help="Trainings for each total batch size.")
    ] = 5,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure everything again, even what exists already.")
    ] = False,
    busy_before: Annotated[
        float,
        number_option(
            "--busy-before",
            0.0,
            1.0,
            "",
            "Refuse to measure when other processes use more than this fraction of the CPU.",
        ),
    ] = 0.1,
) -> None:
    """Measure the applications on this machine.

    Writes one profile for each application: step times, the progress to the target, and the costs of
    starting, resizing and ending a job. Every measurement is saved at once: after an interruption the
    same command continues. Use an idle machine; it is watched for two seconds before the first
    measurement.

    Exit codes: 0 success; 2 bad input; 3 the machine is busy; 130 interrupted."""
    from common.lifecycle import signals_as_interrupt
    from services.calibration.calibrate import run_calibration

    with signals_as_interrupt():
        run_calibration(apps or [], out, seeds, busy_before, fresh=fresh)


@bench.command()
def resize(
    rounds: Annotated[
        int,
        whole_option(
            "--rounds", low=1, high=1000, help="Number of times the job goes 1 -> 2 -> 4 -> 2 -> 1."
        ),
    ] = 20,
    app: Annotated[str, typer.Option(metavar="NAME", help="Application of the job.")] = "digits-cnn",
    as_json: JsonOption = False,
) -> None:
    """Measure how long a resize interrupts training.

    The pause between two training steps is compared with a restart by torchrun.

    Exit codes: 0 success; 1 a process of the benchmark failed; 2 bad input; 130 interrupted."""
    from services.bench.resize import measure, text
    from workloads.applications import applications

    known = applications()
    (name,) = _known_applications([app], list(known))
    _run_benchmark(lambda: measure(known[name], rounds), text, as_json)


@bench.command()
def overhead(
    pairs: Annotated[
        int, whole_option("--pairs", low=1, high=1000, help="Pairs of measurements behind each figure.")
    ] = 7,
    seconds: Annotated[
        float,
        number_option("--seconds", 0.05, 3600.0, "seconds", "Length of one measurement."),
    ] = 3.0,
    as_json: JsonOption = False,
) -> None:
    """Measure what the elastic trainer costs.

    Its steps a second are compared with those of a plain torch loop and of DistributedDataParallel.

    Exit codes: 0 success; 1 a process of the benchmark failed; 2 bad input; 130 interrupted."""
    from services.bench.overhead import measure, text

    _run_benchmark(lambda: measure(pairs, seconds), text, as_json)


@bench.command()
def pacing(
    seconds: Annotated[
        float,
        number_option("--seconds", 0.2, 600.0, "seconds", "Measuring time of each group of replicas."),
    ] = 4.0,
    as_json: JsonOption = False,
) -> None:
    """Measure the CPU share of paced replicas.

    It is compared with the speed of their slots.

    Exit codes: 0 success; 1 a process of the benchmark failed; 2 bad input; 130 interrupted."""
    from services.bench.pacing import CASES, measure, text

    _run_benchmark(lambda: measure(CASES, seconds), text, as_json)


@bench.command()
def scaling(
    apps: AppsOption = None,
    seeds: Annotated[
        int, whole_option("--seeds", low=1, high=1000, help="Number of seeds of each case, from 0.")
    ] = 3,
    multiples: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="Total batch sizes, in multiples of the initial batch size. Allowed: 1 to "
            f"{MAX_MULTIPLE}, separated by commas.",
        ),
    ] = "1,4,8,16",
    rules: Annotated[
        str,
        typer.Option(
            metavar="RULE,...",
            help=f"Rules that scale the learning rate. Allowed: {', '.join(RULES)}, separated by commas.",
        ),
    ] = ",".join(RULES),
    as_json: JsonOption = False,
) -> None:
    """Measure progress to the target by batch size.

    Each application is trained to its target at several batch sizes, with several rules that scale the
    learning rate.

    Exit codes: 0 success; 1 a process of the benchmark failed; 2 bad input; 130 interrupted."""
    from common.config import load_config
    from services.bench.scaling import measure, text
    from workloads.applications import applications

    modules = load_config(os.environ).applications.modules
    known = applications(modules)
    names = _known_applications(apps or list(known), list(known))
    chosen_rules = _items("--rules", rules, one_of(RULES))
    chosen_multiples = _items("--multiples", multiples, whole(1, MAX_MULTIPLE))
    _run_benchmark(
        lambda: measure(names, range(seeds), chosen_multiples, chosen_rules, modules), text, as_json
    )


@bench.command()
def decision(
    jobs: Annotated[int, whole_option("--jobs", low=1, high=100_000, help="Active jobs.")] = 31,
    nodes: Annotated[int, whole_option("--nodes", low=1, high=16_384, help="Nodes of the cluster.")] = 16,
    slots: Annotated[int, whole_option("--slots", low=1, high=64, help="Slots of each node.")] = 4,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Policy to measure.")] = "pollux",
    rounds: Annotated[int, whole_option("--rounds", low=1, high=10_000, help="Measured decisions.")] = 30,
    seed: Annotated[int, whole_option("--seed", low=0, high=MAX_SEED, help="Seed of the jobs.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast and how well a policy decides.

    Well means how near the value of a decision comes to its bound.

    Exit codes: 0 success; 2 bad input, or the policy gave no valid decision; 130 interrupted."""
    from services.bench.decision import run, text

    _run_benchmark(lambda: run(jobs, nodes, slots, rounds, policy, seed), text, as_json)


def _run_benchmark(
    measure: Callable[[], dict[str, Any]], text: Callable[[dict[str, Any]], str], as_json: bool
) -> None:
    """Measure, then print the result: `text` of it for people, or JSON."""
    from common.lifecycle import signals_as_interrupt
    from services.bench.measure import report

    with signals_as_interrupt():
        result = measure()
    report(result, text(result), as_json=as_json)


def _known_applications(names: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"--app {name!r}: allowed: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _items(option: str, text: str, parse: Callable[[str], Item]) -> list[Item]:
    """The comma-separated items of an option, without repetitions."""
    try:
        return list(dict.fromkeys(parse(part) for part in text.split(",")))
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{option} {text!r}: {error.message}") from error
