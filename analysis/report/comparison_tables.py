"""The tables of a comparison."""

from collections.abc import Iterator

from analysis.compare.comparison import JCT, MEASURES, STEP_TIME, Comparison
from analysis.compare.conditions import Spread, noise
from analysis.compare.experiment_runs import Experiment
from analysis.compare.intervals import ENOUGH_PAIRS, LEVEL
from analysis.compare.verdicts import amount
from analysis.report.tables import Table, decimal, format_or_dash

MEANS = {
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
"""By key of `Comparison.means`: title and format."""
CONDITIONS = {
    "wall_s": ("seconds per run", 1.0, ".0f"),
    "load_mean": ("load", 1.0, ".2f"),
    "foreign_cpu_fraction": ("CPU of others", 1.0, ".2%"),
    "steal_fraction": ("steal", 1.0, ".3%"),
    "peak_memory_bytes": ("peak memory GB", 1e-9, ".2f"),
}
"""By figure of `analysis.compare.conditions`: title, factor and format."""
BOUNDS = f"[{LEVEL:.0%} interval], (range of fewer than {ENOUGH_PAIRS} pairs)"
OTHERS = [measure for measure in MEASURES if measure is not JCT]


def comparison_tables(experiment: Experiment, comparison: Comparison) -> Iterator[Table]:
    yield _means_table(comparison)
    yield _jct_table(comparison)
    yield _other_measures_table(comparison)
    if experiment.records:
        yield _conditions_table(experiment, comparison)
    if experiment.alone:
        yield _isolated_table(experiment)


def _means_table(comparison: Comparison) -> Table:
    blocks = len({(run.set, run.seed) for run in comparison.common})
    return Table(
        f"Means over the {blocks} (set, seed) that every policy has; the worst rho is the worst of all runs",
        ["policy", *(title for title, _ in MEANS.values())],
        [
            [policy, *(format_or_dash(means[key], spec) for key, (_, spec) in MEANS.items())]
            for policy, means in comparison.means.items()
        ],
    )


def _jct_table(comparison: Comparison) -> Table:
    sets = comparison.sets if len(comparison.sets) > 1 else ()
    return Table(
        f"Mean JCT ratio {BOUNDS}{', overall and on each set' if sets else ''}",
        ["policy/baseline", "pairs", "overall", *sets],
        [
            [
                contrast.name,
                str(contrast.pairs),
                amount(JCT, contrast.overall[JCT.name]),
                *(
                    amount(JCT, contrast.by_set[name][JCT.name]) if name in contrast.by_set else "-"
                    for name in sets
                ),
            ]
            for contrast in comparison.shown()
        ],
    )


def _other_measures_table(comparison: Comparison) -> Table:
    differences = " and ".join(measure.title for measure in OTHERS if not measure.is_ratio)
    more = " and ".join(measure.title for measure in OTHERS if not measure.less_is_better)
    return Table(
        f"Other measures, overall {BOUNDS}: ratios, but differences of {differences}. More is better for "
        f"{more}; {STEP_TIME.title} is no merit of a policy",
        ["policy/baseline", *(measure.title for measure in OTHERS)],
        [
            [contrast.name, *(amount(measure, contrast.overall[measure.name]) for measure in OTHERS)]
            for contrast in comparison.shown()
        ],
    )


def _conditions_table(experiment: Experiment, comparison: Comparison) -> Table:
    def cell(spread: Spread | None, factor: float, spec: str) -> str:
        if spread is None:
            return "-"
        least, median, most = (
            format(value * factor, spec) for value in (spread.least, spread.median, spread.most)
        )
        return f"{median} ({least} to {most})"

    spreads = noise(comparison.runs, experiment.records)
    return Table(
        "The machine during these runs: median over runs (range)",
        ["policy", *(title for title, _, _ in CONDITIONS.values())],
        [
            [
                policy,
                *(cell(spreads[policy][key], factor, spec) for key, (_, factor, spec) in CONDITIONS.items()),
            ]
            for policy in comparison.policies
        ],
    )


def _isolated_table(experiment: Experiment) -> Table:
    return Table(
        "Isolated times: modelled compared with real runs of one job alone",
        ["run", "application", "slots", "real s", "modelled s", "error", "step time"],
        [
            [
                run.run,
                run.application,
                decimal(run.slots),
                decimal(run.real_s),
                decimal(run.modelled_s),
                f"{run.relative_error:+.1%}",
                decimal(run.step_time, 2),
            ]
            for run in experiment.alone
        ],
    )
