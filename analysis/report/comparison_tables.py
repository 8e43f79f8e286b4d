"""A comparison for people: the same tables and sentences on a terminal and in Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.compare.comparison import (
    MEASURES,
    METHOD,
    SCOPE,
    Comparison,
    Contrast,
    amount,
    policy_means,
    range_by_set,
    verdicts,
)
from analysis.compare.conditions import Spread, noise
from analysis.compare.experiment_runs import Experiment, IsolatedRun
from analysis.compare.pairing import LeftOut

JCT, *OTHERS = MEASURES
COLUMNS = {
    "runs": ("runs", "d"),
    "mean_jct": ("mean JCT s", ".1f"),
    "p90_jct": ("p90 JCT s", ".1f"),
    "makespan": ("makespan s", ".1f"),
    "goodput": ("goodput /s", ".0f"),
    "worst_rho": ("worst rho", ".2f"),
    "mean_rho": ("mean rho", ".2f"),
    "unfair_fraction": ("unfair", ".1%"),
    "jain": ("Jain", ".3f"),
    "rescales": ("rescales", ".1f"),
    "mean_jct_at_equal_steps": ("mean JCT / step time", ".1f"),
    "step_time": ("step time", ".2f"),
}


NOISE_COLUMNS = {
    "wall_s": ("seconds a run", 1.0, ".0f"),
    "load_mean": ("load", 1.0, ".2f"),
    "foreign_cpu_fraction": ("CPU of others", 1.0, ".2%"),
    "steal_fraction": ("steal", 1.0, ".3%"),
    "peak_memory_bytes": ("peak memory GB", 1e-9, ".2f"),
}


@dataclass(frozen=True)
class ComparisonReport:
    """What is shown. `rho_from` says where the isolated times come from; `is_calibrated`: from profiles."""

    experiment: Experiment
    comparison: Comparison
    rho_from: str
    is_calibrated: bool

    @property
    def noise(self) -> dict[str, dict[str, Spread | None]]:
        return noise(self.comparison.runs, self.experiment.conditions)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return (*self.comparison.left_out, *self.experiment.lost)


Rows = tuple[str, list[str], list[list[str]]]
"""Heading, columns, cells."""


def tables(report: ComparisonReport) -> Iterator[Rows]:
    comparison = report.comparison
    shown = comparison.shown()
    blocks = len({(run.set, run.seed) for run in comparison.common})
    yield (
        f"Means over the {blocks} (set, seed) that every policy has; the worst rho is that of all",
        ["policy", *(name for name, _ in COLUMNS.values())],
        [[policy, *_means(comparison, policy)] for policy in comparison.policies],
    )
    sets = comparison.sets if len(comparison.sets) > 1 else ()
    yield (
        "Mean JCT ratio [95%]: of all pairs as one pool; by sets, sets resampled first; and of each set alone"
        if sets
        else "Mean JCT ratio [95%]",
        ["policy/baseline", "pairs", "overall", *(["by sets"] if sets else []), *sets],
        [[contrast.name, str(len(contrast.pairs)), *_by_set(contrast, sets)] for contrast in shown],
    )
    yield (
        "Other measures, overall [95%, pairs pooled]: ratios, of unfair fraction and rescales differences; "
        "of goodput and Jain's index more is better, and step time is hardly a merit of the policy",
        ["policy/baseline", *(measure.title for measure in OTHERS)],
        [
            [contrast.name, *(amount(measure, contrast.overall[measure.name]) for measure in OTHERS)]
            for contrast in shown
        ],
    )
    if report.experiment.conditions:
        of_policies = report.noise
        yield (
            "The machine during these runs: the median over runs [the least, the most]",
            ["policy", *(title for title, _, _ in NOISE_COLUMNS.values())],
            [[policy, *_noise(of_policies[policy])] for policy in comparison.policies],
        )
    if report.experiment.alone:
        yield (
            "Isolated times: modelled against real runs of one job alone",
            ["run", "application", "slots", "real s", "modelled s", "error", "step time"],
            [_alone_row(alone) for alone in report.experiment.alone],
        )


def _noise(of_policy: Mapping[str, Spread | None]) -> Iterator[str]:
    for name, (_, factor, form) in NOISE_COLUMNS.items():
        if spread := of_policy[name]:
            least, median, most = (
                format(value * factor, form) for value in (spread.least, spread.median, spread.most)
            )
            yield f"{median} [{least}, {most}]"
        else:
            yield "-"


def _means(comparison: Comparison, policy: str) -> Iterator[str]:
    means = policy_means(comparison, policy)
    for key, (_, form) in COLUMNS.items():
        value = means[key]
        yield "-" if value is None else format(value, form)


def _by_set(contrast: Contrast, sets: Sequence[str]) -> Iterator[str]:
    yield amount(JCT, contrast.overall[JCT.name])
    if sets:
        yield range_by_set(JCT, contrast.overall[JCT.name])
    for name in sets:
        yield amount(JCT, contrast.by_set[name][JCT.name]) if name in contrast.by_set else "-"


def _alone_row(alone: IsolatedRun) -> list[str]:
    return [
        alone.run,
        alone.application,
        f"{alone.slots:.1f}",
        f"{alone.real_s:.1f}",
        f"{alone.modelled_s:.1f}",
        f"{alone.relative_error:+.1%}",
        "-" if alone.step_time is None else f"{alone.step_time:.2f}",
    ]


def sentences(contrast: Contrast) -> Iterator[str]:
    """The verdict on the mean JCT, and one sentence on all other measures."""
    first, *others = verdicts(contrast)
    yield first.sentence
    titles = {measure.name: measure.title for measure in MEASURES}
    by_kind: dict[str, list[str]] = {"better": [], "worse": [], "cannot be told": [], "not measured": []}
    for verdict in others:
        kind = verdict.verdict if contrast.overall[verdict.measure].pairs else "not measured"
        by_kind[kind].append(titles[verdict.measure])
    parts = [f"{kind}: {', '.join(named)}" for kind, named in by_kind.items() if named]
    yield f"{contrast.name}, other measures: {'; '.join(parts)}."


def notes(report: ComparisonReport) -> Iterator[str]:
    """Everything that a reader has to know about the figures."""
    yield METHOD
    if memory := report.experiment.memory:
        yield (
            f"With a memory: {', '.join(memory)}. Jobs start from what former jobs of their application, in "
            "the same run, have shown."
        )
    yield (
        "rho: completion time over that of the same job alone on its share, which is slots / mean number of "
        "jobs active in its life; a policy that lets jobs overlap more has smaller shares. "
        f"Times alone: {report.rho_from}."
    )
    if report.experiment.alone:
        errors = [abs(alone.relative_error) for alone in report.experiment.alone]
        yield (
            f"Isolated times were checked against {len(errors)} real runs of one job alone: mean error "
            f"{sum(errors) / len(errors):.1%}, largest {max(errors):.1%}."
        )
    else:
        lacking = (
            "real run of one job alone that could be used" if report.is_calibrated else "calibrated model"
        )
        yield f"Isolated times were not checked: there is no {lacking}."
    yield SCOPE


def left_out(report: ComparisonReport) -> Iterator[str]:
    for entry in report.left_out:
        yield f"{entry.run}: {entry.why}"


def heading(report: ComparisonReport) -> str:
    comparison = report.comparison
    parts = [f"{_count(len(comparison.runs), 'run')} of {len(comparison.policies)} policies"]
    parts.append(f"{_count(len(comparison.sets), 'set')} ({', '.join(comparison.sets)})")
    parts += [report.experiment.date] if report.experiment.date else []
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --------------------------------------------------------------------------- Markdown, terminal


def to_markdown(report: ComparisonReport) -> str:
    lines = [f"{heading(report)}.", ""]
    for title, columns, rows in tables(report):
        lines += [f"**{title}**", "", _row(columns), _row(["---", *["---:"] * (len(columns) - 1)])]
        lines += [*(_row(row) for row in rows), ""]
    lines += [f"- {line}" for contrast in report.comparison.shown() for line in sentences(contrast)]
    lines += ["", f"Left out: {'' if report.left_out else 'nothing.'}"]
    lines += [f"- {line}" for line in left_out(report)]
    lines += ["", *notes(report)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def show(console: Console, report: ComparisonReport) -> None:
    """Names in it are texts of logs, and never read as markup."""
    console.print(Text(f"{report.experiment.place}: {heading(report)}", style="bold"))
    for title, columns, rows in tables(report):
        console.print()
        console.print(Text(title, style="bold"))
        table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, padding=(0, 1))
        for number, column in enumerate(columns):
            side: Literal["left", "right"] = "right" if number else "left"
            table.add_column(column, justify=side, overflow="fold", no_wrap=not number)
        for row in rows:
            # Where lines are short an interval stands below its figure.
            cells = [cell.replace(" [", "\n[") if console.is_terminal else cell for cell in row]
            table.add_row(*(Text(cell) for cell in cells))
        console.print(table)
    console.print()
    for contrast in report.comparison.shown():
        first, others = sentences(contrast)
        console.print(Text(f"- {first}"))
        console.print(Text(f"  {others}", style="dim"))
    console.print()
    console.print(Text("Left out:" if report.left_out else "Left out: nothing.", style="bold"))
    for line in left_out(report):
        console.print(Text(f"  - {line}", style="yellow"))
    console.print()
    for line in notes(report):
        console.print(Text(line, style="dim"))
