"""Compare policies over paired runs: the same jobs at the same times under two policies. Pure.

A pair is two runs of the same (set, seed). A measure that is always above 0 is compared by the geometric
mean of the ratios within the pairs: every pair counts the same, however long its set lasts, and pollux/fixed
is the inverse of fixed/pollux. A measure that can be 0 (unfair fraction, rescales) has no such ratio and is
compared by the mean difference. `analysis.compare.intervals` gives the bounds, with sets as strata.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from analysis.compare.intervals import Bounds, Outcome, bounds_of_mean, outcome
from analysis.compare.pairing import ComparedRun, LeftOut, missing_runs, rank, runs_of_same_jobs

BLOCK = ["set", "seed"]
"""Columns that the two runs of a pair share."""


@dataclass(frozen=True)
class Measure:
    """A figure of a run. `is_ratio`: two runs are compared by its ratio, otherwise by its difference."""

    key: str
    title: str
    of: Callable[[ComparedRun], float | None]
    less_is_better: bool = True
    is_ratio: bool = True

    @property
    def name(self) -> str:
        return f"{self.key}_{'ratio' if self.is_ratio else 'difference'}"

    @property
    def neutral(self) -> float:
        """The effect that means no difference."""
        return 1.0 if self.is_ratio else 0.0


def mean_jct_at_equal_steps(run: ComparedRun) -> float | None:
    """Mean JCT if steps took as long as the profiles say; assumes that all of the JCT scales with them."""
    mean_s = run.summary.jct_s.mean
    return mean_s / run.step_time if mean_s is not None and run.step_time else None


JCT = Measure("mean_jct", "mean JCT", lambda run: run.summary.jct_s.mean)
STEP_TIME = Measure("step_time", "step time", lambda run: run.step_time)
"""No merit of a policy: how fast the machine was on the day, and how far off the profiles are."""
MEASURES = (
    JCT,
    Measure("p90_jct", "p90 JCT", lambda run: run.summary.jct_s.p90),
    Measure("makespan", "makespan", lambda run: run.summary.makespan_s),
    Measure("goodput", "goodput", lambda run: run.summary.goodput.cluster_mean, less_is_better=False),
    Measure("worst_rho", "worst rho", lambda run: run.summary.fairness.worst_rho),
    Measure("mean_rho", "mean rho", lambda run: run.summary.fairness.mean_rho),
    Measure(
        "unfair_fraction", "unfair fraction", lambda run: run.summary.fairness.unfair_fraction, is_ratio=False
    ),
    Measure("jain", "Jain's index", lambda run: run.summary.fairness.jain, less_is_better=False),
    Measure("rescales", "rescales", lambda run: run.summary.rescales.count, is_ratio=False),
    Measure("mean_jct_at_equal_steps", "mean JCT / step time", mean_jct_at_equal_steps),
    STEP_TIME,
)
KEYS = [measure.key for measure in MEASURES]


@dataclass(frozen=True)
class Effect:
    """The mean `value` over `pairs` pairs; `better` of them are better. None without pairs, and no bounds
    for a single pair."""

    value: float | None
    bounds: Bounds | None
    pairs: int
    better: int

    def outcome(self, measure: Measure) -> Outcome:
        return outcome(self.bounds, neutral=measure.neutral, less_is_better=measure.less_is_better)


@dataclass(frozen=True)
class Contrast:
    """A policy against a baseline over `pairs` pairs; effects by `Measure.name`."""

    policy: str
    baseline: str
    pairs: int
    overall: dict[str, Effect]
    by_set: dict[str, dict[str, Effect]]

    @property
    def name(self) -> str:
        return f"{self.policy}/{self.baseline}"


@dataclass(frozen=True)
class Comparison:
    policies: tuple[str, ...]
    sets: tuple[str, ...]
    runs: tuple[ComparedRun, ...]
    common: tuple[ComparedRun, ...]
    """The runs of each (set, seed) that every policy has."""
    left_out: tuple[LeftOut, ...]
    contrasts: tuple[Contrast, ...]
    means: dict[str, dict[str, float | int | None]]
    """By policy and `Measure.key`, over `common`; worst_rho is the worst of all runs. Also `runs`, their
    number. None if a run lacks the measure."""
    changes: pl.DataFrame
    """One row per pair, order of the pair and measure: run, policy, run_baseline, policy_baseline, set, seed,
    measure, change. The change is a log ratio or a difference; null if one run lacks the measure."""

    def contrast(self, policy: str, baseline: str) -> Contrast | None:
        return next((c for c in self.contrasts if (c.policy, c.baseline) == (policy, baseline)), None)

    def shown(self) -> list[Contrast]:
        """Every two policies once: if both orders exist, the one that compares the later policy."""
        return [
            contrast
            for contrast in self.contrasts
            if rank(contrast.policy) > rank(contrast.baseline)
            or not self.contrast(contrast.baseline, contrast.policy)
        ]

    def pairs_of(self, contrast: Contrast) -> pl.DataFrame:
        """One row of `changes` per pair of the contrast: the change of its mean JCT."""
        own = _changes_of(self.changes, contrast.policy, contrast.baseline)
        return own.filter(pl.col("measure") == JCT.key)


def compare(
    runs: Sequence[ComparedRun], left_out: Sequence[LeftOut] = (), baselines: Sequence[str] = ()
) -> Comparison:
    """Compare every policy with each baseline (default: with every other policy). Runs without a partner and
    runs with other jobs than their partners join `left_out`."""
    usable, mismatched = runs_of_same_jobs(runs)
    policies = tuple(sorted({run.policy for run in usable}, key=rank))
    missing = missing_runs(usable, policies, {entry.run for entry in (*left_out, *mismatched)})
    frame = _frame(usable)
    common = frame.filter(pl.len().over(BLOCK) == len(policies))
    changes = _paired_changes(frame)
    runs_by_name = {run.name: run for run in usable}
    return Comparison(
        policies=policies,
        sets=tuple(sorted({run.set for run in usable})),
        runs=tuple(usable),
        common=tuple(runs_by_name[name] for name in common["run"]),
        left_out=(*left_out, *mismatched, *missing),
        contrasts=tuple(
            _contrast(changes, policy, baseline)
            for baseline in baselines or policies
            for policy in policies
            if policy != baseline
        ),
        means=_means(common, policies),
        changes=changes,
    )


def _frame(runs: Sequence[ComparedRun]) -> pl.DataFrame:
    """One row per run, sorted by set, seed and policy, and one column per measure; null if unknown or not
    finite."""
    ordered = sorted(runs, key=lambda run: (run.set, run.seed, rank(run.policy)))
    schema = {"run": pl.String, "policy": pl.String, "set": pl.String, "seed": pl.Int64}
    rows = [
        (run.name, run.policy, run.set, run.seed, *(measure.of(run) for measure in MEASURES))
        for run in ordered
    ]
    frame = pl.DataFrame(rows, schema={**schema, **dict.fromkeys(KEYS, pl.Float64)}, orient="row")
    return frame.with_columns(pl.when(pl.col(KEYS).is_finite()).then(pl.col(KEYS)))


def _paired_changes(frame: pl.DataFrame) -> pl.DataFrame:
    """See `Comparison.changes`."""
    figures = frame.unpivot(KEYS, index=["run", "policy", *BLOCK], variable_name="measure")
    pairs = figures.join(figures, on=[*BLOCK, "measure"], suffix="_baseline", maintain_order="left")
    is_ratio = pl.col("measure").is_in([measure.key for measure in MEASURES if measure.is_ratio])
    value, baseline = pl.col("value"), pl.col("value_baseline")
    log_ratio = pl.when((value > 0) & (baseline > 0)).then((value / baseline).log())
    return pairs.filter(pl.col("policy") != pl.col("policy_baseline")).select(
        pl.exclude("value", "value_baseline"),
        pl.when(is_ratio).then(log_ratio).otherwise(value - baseline).alias("change"),
    )


def _changes_of(changes: pl.DataFrame, policy: str, baseline: str) -> pl.DataFrame:
    return changes.filter(pl.col("policy") == policy, pl.col("policy_baseline") == baseline)


def _contrast(changes: pl.DataFrame, policy: str, baseline: str) -> Contrast:
    own = _changes_of(changes, policy, baseline)
    sets = own.partition_by("set", as_dict=True, maintain_order=True)
    return Contrast(
        policy=policy,
        baseline=baseline,
        pairs=own.filter(pl.col("measure") == JCT.key).height,
        overall=_effects(own),
        by_set={str(name): _effects(of_set) for (name,), of_set in sets.items()},
    )


def _effects(changes: pl.DataFrame) -> dict[str, Effect]:
    return {
        measure.name: _effect(measure, changes.filter(pl.col("measure") == measure.key))
        for measure in MEASURES
    }


def _effect(measure: Measure, changes: pl.DataFrame) -> Effect:
    """From the changes of one measure between two policies."""
    known = changes.drop_nulls("change")
    if known.is_empty():
        return Effect(value=None, bounds=None, pairs=0, better=0)
    values = known["change"].to_numpy()
    effect_of = math.exp if measure.is_ratio else float
    bounds = bounds_of_mean(known.group_by("set").agg("change")["change"].to_list())
    return Effect(
        value=effect_of(values.mean()),
        bounds=bounds and Bounds(effect_of(bounds.low), effect_of(bounds.high), bounds.kind),
        pairs=len(values),
        better=int(((values < 0) if measure.less_is_better else (values > 0)).sum()),
    )


def _means(common: pl.DataFrame, policies: Sequence[str]) -> dict[str, dict[str, float | int | None]]:
    """See `Comparison.means`."""
    figures = [
        pl.when(pl.col(key).null_count() == 0).then(
            pl.col(key).max() if key == "worst_rho" else pl.col(key).mean()
        )
        for key in KEYS
    ]
    by_policy = common.group_by("policy", maintain_order=True)
    found = by_policy.agg(pl.len().alias("runs"), *figures).rows_by_key("policy", named=True)
    none: dict[str, float | int | None] = {"runs": 0, **dict.fromkeys(KEYS)}
    return {policy: found[policy][0] if policy in found else none for policy in policies}
