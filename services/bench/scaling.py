"""`coadapt bench scaling`: whether progress to the target depends on the batch size.

Goodput rests on one fact: counted in AdaScale steps, the way to the target is as long at every batch size
within an application's bounds. Every application is trained to its target at multiples of its initial batch
size M0, with the product's own rule (AdaScale; the square root of the scale for Adam-like optimizers), with
linear scaling and with none. Only the first is expected to keep progress within TOLERANCE of that at M0.
"""

import multiprocessing
import os
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from common.config import load_config
from common.lifecycle import signals_as_interrupt
from common.types import ApplicationSpec
from services.bench.agent_cluster import BenchError
from services.bench.measure import Progress, report, table
from services.cli.options import whole
from workloads.applications import applications

if TYPE_CHECKING:
    from workloads.trainer.standalone.train_alone import TrainingCase, TrainingOutcome

Result = TypeVar("Result")
RULES = ("adascale", "linear", "none")
AT_M0 = "M0"
"""In the place of a rule: all do the same there."""
TOLERANCE = 0.2
"""Of progress at M0, that medians at other batches may be off within the bounds of an application."""
MAX_PROCESSES = 2


def command(
    app: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Application; all if none.")] = None,
    seeds: Annotated[
        int, typer.Option(parser=whole(1, 1000), metavar="N", help="Seeds of each case: 0, 1, ...")
    ] = 3,
    multiples: Annotated[str, typer.Option(metavar="S,...", help="Total batches, over M0.")] = "1,4,8,16",
    rules: Annotated[str, typer.Option(metavar="RULE,...", help="Of scaling.")] = ",".join(RULES),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Progress and examples to the target at several batch sizes, by rules of scaling."""
    modules = load_config(os.environ).applications.modules
    known = applications(modules)
    names = _among("--app", app or list(known), known)
    chosen = _among("--rules", rules.split(","), RULES)
    scales = _multiples(multiples)
    with signals_as_interrupt():
        result = measure(names, range(seeds), scales, chosen, modules)
    report(result, text(result), as_json=as_json)


def measure(
    names: Sequence[str],
    seeds: Sequence[int],
    multiples: Sequence[int],
    rules: Sequence[str],
    modules: Sequence[str] = (),
    targets: dict[str, float] | None = None,
) -> dict[str, Any]:
    """One row for each application, rule and multiple; at M0, which is always measured, all rules are the
    same one. `targets`: other ones than the applications' own."""
    cases = plan(names, seeds, multiples, rules, modules, targets)
    progress = Progress("scaling", len(cases))
    outcomes = []
    for outcome in train_all(cases):
        outcomes.append(outcome)
        case = outcome.case
        progress.step(f"{case.application}, {case.multiple} M0, {_rule(case)}, seed {case.seed}")
    return summarize(outcomes, modules)


def plan(
    names: Sequence[str],
    seeds: Sequence[int],
    multiples: Sequence[int],
    rules: Sequence[str],
    modules: Sequence[str] = (),
    targets: dict[str, float] | None = None,
) -> "list[TrainingCase]":
    """A run may use up to max_progress x M0 examples: at M0 that is the application's declared budget."""
    from workloads.trainer.standalone.train_alone import TrainingCase  # needs torch

    known = applications(modules)
    return [
        TrainingCase(
            application=name,
            seed=seed,
            multiple=multiple,
            rule=rule,
            budget_examples=round(known[name].max_progress * known[name].initial_batch_size),
            target=(targets or {}).get(name),
            modules=tuple(modules),
        )
        for name, rule, multiple, seed in product(names, rules, sorted({1, *multiples}), seeds)
        if multiple > 1 or rule == rules[0]
    ]


def summarize(outcomes: "Sequence[TrainingOutcome]", modules: Sequence[str] = ()) -> dict[str, Any]:
    known = applications(modules)
    groups: dict[tuple[str, str, int], list[TrainingOutcome]] = {}
    for outcome in outcomes:
        case = outcome.case
        groups.setdefault((case.application, _rule(case), case.multiple), []).append(outcome)
    order = {name: place for place, name in enumerate([*known, AT_M0, *RULES])}
    rows = [
        _row(groups[name, AT_M0, 1], groups[name, rule, multiple], known[name])
        for name, rule, multiple in sorted(groups, key=lambda key: (order[key[0]], order[key[1]], key[2]))
    ]
    judged = [row["within_tolerance"] for row in rows if row["within_tolerance"] is not None]
    return {
        "benchmark": "scaling",
        "seeds": sorted({outcome.case.seed for outcome in outcomes}),
        "tolerance": TOLERANCE,
        "within_tolerance": all(judged) if judged else None,
        "rows": rows,
        "runs": [outcome._asdict() | {"case": outcome.case._asdict()} for outcome in outcomes],
    }


def train_all(cases: "Sequence[TrainingCase]") -> "Iterator[TrainingOutcome]":
    return in_processes(_train, cases)


def in_processes(body: Callable[[Any], Result], cases: Sequence[Any]) -> Iterator[Result]:
    """`body` of every case, in processes of their own, in the order in which they end."""
    context = multiprocessing.get_context("spawn")
    workers = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(cases) or 1)
    try:
        # A terminal's Ctrl-C is for this process, which ends the others.
        with ProcessPoolExecutor(workers, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
            try:
                for future in as_completed([pool.submit(body, case) for case in cases]):
                    yield future.result()
            except BaseException:
                for process in multiprocessing.active_children():
                    process.terminate()
                pool.shutdown(cancel_futures=True)
                raise
    except BrokenProcessPool:
        raise BenchError("a process that trained has died") from None


def _train(case: "TrainingCase") -> "TrainingOutcome":
    from workloads.trainer.standalone.train_alone import train

    return train(case)


def _rule(case: "TrainingCase") -> str:
    return AT_M0 if case.multiple == 1 else case.rule


def _row(
    reference: "Sequence[TrainingOutcome]",
    outcomes: "Sequence[TrainingOutcome]",
    application: ApplicationSpec,
) -> dict[str, Any]:
    """Medians are over all seeds; a run that fell short of the target counts as longer than any that met it,
    so that a median may be unknown (None)."""
    case = outcomes[0].case
    progress, examples = (_median(outcomes, field) for field in ("progress", "examples"))
    progress_m0, examples_m0 = (_median(reference, field) for field in ("progress", "examples"))
    batch, largest = case.multiple * application.initial_batch_size, application.max_batch_size
    ratio = progress / progress_m0 if progress and progress_m0 else None
    judged = _rule(case) == "adascale" and batch <= largest
    reached = [o.progress for o in outcomes if o.ended == "target"]
    return {
        "application": case.application,
        "rule": _rule(case),
        "multiple": case.multiple,
        "batch": batch,
        "in_bounds": batch <= largest,
        "runs": len(outcomes),
        "reached": len(reached),
        "diverged": sum(o.ended == "diverged" for o in outcomes),
        "budget_examples": case.budget_examples,
        "progress": progress,
        "progress_least": min(reached, default=None),
        "progress_most": max(reached, default=None),
        "progress_ratio": ratio,
        "examples": examples,
        "examples_ratio": examples / examples_m0 if examples and examples_m0 else None,
        "within_tolerance": (ratio is not None and abs(ratio - 1.0) <= TOLERANCE) if judged else None,
    }


def _median(outcomes: "Sequence[TrainingOutcome]", field: str) -> float | None:
    values = [getattr(o, field) if o.ended == "target" else float("inf") for o in outcomes]
    median = statistics.median_high(values)
    return None if median == float("inf") else float(median)


def text(result: dict[str, Any]) -> str:
    heads = ["application", "batch", "rule", "progress", "least-most", "/ M0's", "examples", "/ M0's", ""]
    rows = [
        [
            row["application"],
            str(row["batch"]) + ("" if row["in_bounds"] else "*"),
            row["rule"],
            _number(row["progress"], "{:.0f}"),
            f"{row['progress_least']:.0f}-{row['progress_most']:.0f}" if row["reached"] else "-",
            _number(row["progress_ratio"], "{:.2f}"),
            _number(row["examples"], "{:.0f}"),
            _number(row["examples_ratio"], "{:.2f}"),
            _remark(row),
        ]
        for row in result["rows"]
    ]
    lines = [
        f"Medians of {len(result['seeds'])} seeds; progress in steps at M0",
        "",
        table(heads, rows),
        "",
        "* beyond the application's largest batch",
    ]
    if result["within_tolerance"] is not None:
        verdict = "holds" if result["within_tolerance"] else "does NOT hold"
        lines.append(f"AdaScale keeps progress within {result['tolerance']:.0%} of M0's in bounds: {verdict}")
    return "\n".join(lines)


def _remark(row: dict[str, Any]) -> str:
    short = row["runs"] - row["reached"]
    if not short:
        return "off" if row["within_tolerance"] is False else ""
    why = f"{row['diverged']} diverged; " if row["diverged"] else ""
    return f"{why}{short} of {row['runs']} not reached in {row['budget_examples']} examples"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _among(option: str, given: Sequence[str], allowed: Any) -> list[str]:
    for name in given:
        if name not in allowed:
            raise typer.BadParameter(f"{option} {name!r}: allowed: {', '.join(allowed)}")
    return list(dict.fromkeys(given))


def _multiples(given: str) -> list[int]:
    try:
        values = [int(part) for part in given.split(",")]
    except ValueError:
        values = [0]
    if not all(1 <= value <= 1024 for value in values):
        raise typer.BadParameter(
            f"--multiples {given!r}: allowed: whole numbers from 1 to 1024, as in 1,4,16"
        )
    return values
