"""Policies against each other, run by run on the same jobs. Pure.

Two policies are compared over their *pairs*: runs of the same (set, seed), so of the same jobs arriving at
the same times. A measure that is above 0 is compared by the geometric mean of the ratios within the pairs:
every pair counts alike, however long its set lasts, and pollux/fixed is the inverse of fixed/pollux, neither
of which holds for a ratio of means. A measure that can be 0 (unfair fraction, rescales) has no such ratio:
the mean difference stands for it. Intervals are 95%, by bootstrap (`analysis.compare.intervals`).

Over all sets there are two. `low` and `high`, by which verdicts go, draw pairs as one sample pooled over the
sets: what is said of these sets. It takes the pairs for independent, and those of one set may be alike. So
`low_by_set` and `high_by_set` draw sets first and then seeds within them: what is said of other sets like
these, of which few were run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from analysis.compare.intervals import ENOUGH_PAIRS, LEVEL, interval, interval_by_group
from analysis.compare.pairing import ComparedRun, LeftOut, blocks_of, lacking_in, of_same_jobs, rank
from common.types import Struct

METHOD = (
    "Paired by (set, seed): ratios are geometric means over the pairs, differences are means; intervals are "
    f"{LEVEL:.0%}, by bootstrap, expanded for small samples. Those in brackets resample pairs, overall as "
    "one pool over all sets: they hold for these sets, which may differ from one another, see the figures of "
    "each. Those 'by sets' resample sets first, then seeds within them: of other sets like these, they are "
    f"the ones to go by. The interval of n < {ENOUGH_PAIRS} pairs is their whole range, which covers no more "
    "than 1 - 2^(1 - n): 75% for three pairs. Every interval stands for itself: of many, some miss by "
    "chance. An experiment repeats a run in which a job fails as it does one that was lost to noise: figures "
    "are of runs in which every job met its target. Goodput counts all progress, also that of jobs which "
    "need more of it to their targets than others do. Step time is what the steps of a run took over what "
    "the profiles say of as many in the same configurations: 1 where the machine was as fast as when it was "
    "calibrated. Where its ratio is not 1, two policies did not have the same machine, or did not fill it "
    "alike (profiles are of a full cluster), or the profiles do not hold for the configurations of both "
    "alike; no ratio is corrected for it but that of mean JCT / step time, which takes all of a completion "
    "time to go with the steps."
)
SCOPE = (
    "Scope: small CPU jobs, a simplified goodput model and the policies named here. It says nothing certain "
    "about many-GPU training in production."
)
Winner = Literal["better", "worse", "cannot be told"]


@dataclass(frozen=True)
class Measure:
    """A figure of a run. `sign`: 1 where less is better, -1 where more is."""

    key: str
    title: str
    of: Callable[[ComparedRun], float | None]
    sign: int = 1
    is_ratio: bool = True

    @property
    def name(self) -> str:
        return f"{self.key}_{'ratio' if self.is_ratio else 'difference'}"


def at_equal_steps(run: ComparedRun) -> float | None:
    """Mean JCT had steps taken what the profiles say, roughly: all of it is taken to go with the steps."""
    mean_s = run.summary.jct_s.mean
    return mean_s / run.step_time if mean_s is not None and run.step_time else None


STEP_TIME = Measure("step_time", "step time", lambda run: run.step_time)
"""Hardly a policy's merit: how fast the machine happened to be, and how far the profiles are off."""
MEASURES = (
    Measure("mean_jct", "mean JCT", lambda run: run.summary.jct_s.mean),
    Measure("p90_jct", "p90 JCT", lambda run: run.summary.jct_s.p90),
    Measure("makespan", "makespan", lambda run: run.summary.makespan_s),
    Measure("goodput", "goodput", lambda run: run.summary.goodput.cluster_mean, sign=-1),
    Measure("worst_rho", "worst rho", lambda run: run.summary.fairness.worst_rho),
    Measure("mean_rho", "mean rho", lambda run: run.summary.fairness.mean_rho),
    Measure(
        "unfair_fraction", "unfair fraction", lambda run: run.summary.fairness.unfair_fraction, is_ratio=False
    ),
    Measure("jain", "Jain's index", lambda run: run.summary.fairness.jain, sign=-1),
    Measure("rescales", "rescales", lambda run: run.summary.rescales.count, is_ratio=False),
    Measure("mean_jct_at_equal_steps", "mean JCT / step time", at_equal_steps),
    STEP_TIME,
)


@dataclass(frozen=True)
class Effect:
    """`value` over `pairs` pairs (None: of none), of which `better` are better; bounds are None of fewer than
    two. Those by set are None but of all sets together, where there are two or more."""

    value: float | None
    low: float | None
    high: float | None
    pairs: int
    better: int
    low_by_set: float | None = None
    high_by_set: float | None = None


class Verdict(Struct, frozen=True):
    pair: str
    measure: str
    verdict: Winner
    sentence: str


@dataclass(frozen=True)
class Contrast:
    """A policy against a baseline; effects by the name of their measure."""

    policy: str
    baseline: str
    pairs: tuple[tuple[ComparedRun, ComparedRun], ...]
    overall: dict[str, Effect]
    by_set: dict[str, dict[str, Effect]]

    @property
    def name(self) -> str:
        return f"{self.policy}/{self.baseline}"


@dataclass(frozen=True)
class Comparison:
    """`common`: the runs of those (set, seed) that every policy has."""

    policies: tuple[str, ...]
    sets: tuple[str, ...]
    runs: tuple[ComparedRun, ...]
    common: tuple[ComparedRun, ...]
    left_out: tuple[LeftOut, ...]
    contrasts: tuple[Contrast, ...]

    def contrast(self, policy: str, baseline: str) -> Contrast | None:
        return next((c for c in self.contrasts if (c.policy, c.baseline) == (policy, baseline)), None)

    def shown(self) -> list[Contrast]:
        """Those for people: of two that mirror each other the one with the baseline below."""
        rank = {policy: number for number, policy in enumerate(self.policies)}
        return [
            contrast
            for contrast in self.contrasts
            if rank[contrast.policy] > rank[contrast.baseline]
            or not self.contrast(contrast.baseline, contrast.policy)
        ]


def compare(
    runs: Sequence[ComparedRun], left_out: Sequence[LeftOut] = (), baselines: Sequence[str] = ()
) -> Comparison:
    """Every policy against each baseline (none given: against every other). What has no partner, or other
    jobs than its partners, is added to what was left out."""
    alike, strangers = of_same_jobs(runs)
    policies = tuple(sorted({run.policy for run in alike}, key=rank))
    lacking = lacking_in(alike, policies, {entry.run for entry in (*left_out, *strangers)})
    blocks = blocks_of(alike)
    contrasts = [
        _contrast(policy, baseline, blocks)
        for baseline in baselines or policies
        for policy in policies
        if policy != baseline
    ]
    return Comparison(
        policies=policies,
        sets=tuple(sorted({run.set for run in alike})),
        runs=tuple(alike),
        common=tuple(run for block in blocks if len(block) == len(policies) for run in block.values()),
        left_out=(*left_out, *strangers, *lacking),
        contrasts=tuple(contrasts),
    )


def _contrast(policy: str, baseline: str, blocks: Sequence[dict[str, ComparedRun]]) -> Contrast:
    pairs = [(block[policy], block[baseline]) for block in blocks if policy in block and baseline in block]
    return Contrast(
        policy=policy,
        baseline=baseline,
        pairs=tuple(pairs),
        overall={measure.name: effect(measure, pairs, by_set=True) for measure in MEASURES},
        by_set={name: _effects(list(group)) for name, group in groupby(pairs, key=lambda pair: pair[0].set)},
    )


def _effects(pairs: Sequence[tuple[ComparedRun, ComparedRun]]) -> dict[str, Effect]:
    return {measure.name: effect(measure, pairs) for measure in MEASURES}


def effect(
    measure: Measure, pairs: Sequence[tuple[ComparedRun, ComparedRun]], by_set: bool = False
) -> Effect:
    """Of the first runs of the pairs against the second; without pairs of which one lacks the measure."""
    changes_by_set: dict[str, list[float]] = {}
    for run, other in pairs:
        change = _change(measure, measure.of(run), measure.of(other))
        if change is not None:
            changes_by_set.setdefault(run.set, []).append(change)
    changes = [change for of_set in changes_by_set.values() for change in of_set]
    if not changes:
        return Effect(value=None, low=None, high=None, pairs=0, better=0)
    back = math.exp if measure.is_ratio else float
    bounds = interval(changes)
    over_sets = interval_by_group(list(changes_by_set.values())) if by_set else None
    return Effect(
        value=back(np.mean(changes)),
        low=back(bounds.low) if bounds else None,
        high=back(bounds.high) if bounds else None,
        pairs=len(changes),
        better=sum(measure.sign * change < 0 for change in changes),
        low_by_set=back(over_sets.low) if over_sets else None,
        high_by_set=back(over_sets.high) if over_sets else None,
    )


def _change(measure: Measure, value: float | None, other: float | None) -> float | None:
    """As a logarithm, of what is compared by its ratio."""
    if value is None or other is None:
        return None
    if not measure.is_ratio:
        return value - other
    return math.log(value / other) if value > 0 and other > 0 else None


# --------------------------------------------------------------------------- in words


def winner(measure: Measure, effect: Effect) -> Winner:
    """By the interval: better or worse when all of it is. Of fewer than ENOUGH_PAIRS nothing is told: all of
    n pairs are on one side by chance alone with a probability of 2^(1 - n)."""
    if effect.low is None or effect.high is None or effect.pairs < ENOUGH_PAIRS:
        return "cannot be told"
    none = 1.0 if measure.is_ratio else 0.0
    below, above = effect.high < none, effect.low > none
    if not (below or above):
        return "cannot be told"
    return "better" if below == (measure.sign > 0) else "worse"


def verdicts(contrast: Contrast) -> list[Verdict]:
    """A sentence a measure: the effect, what it comes to, and on which sets not."""
    return [
        Verdict(
            pair=contrast.name,
            measure=measure.name,
            verdict=winner(measure, contrast.overall[measure.name]),
            sentence=_sentence(contrast, measure),
        )
        for measure in MEASURES
        if measure is not STEP_TIME
    ]


def _sentence(contrast: Contrast, measure: Measure) -> str:
    found = contrast.overall[measure.name]
    told = winner(measure, found)
    title = measure.title[0].upper() + measure.title[1:]
    than = "over" if measure.is_ratio else "less"
    text = f"{title} of {contrast.policy} {than} that of {contrast.baseline}: {amount(measure, found)}"
    if found.low_by_set is not None:
        text += f", by sets {range_by_set(measure, found)}"
    lacking = len(contrast.pairs) - found.pairs
    counted = f"{found.pairs} pair{'' if found.pairs == 1 else 's'}, {found.better} of them better"
    if 0 < found.pairs < ENOUGH_PAIRS:
        counted += ", too few for 95%"
    if lacking:
        counted += f"; {lacking} without the measure or with none of it to compare"
    return f"{text} ({counted}): {told}{_on_sets(contrast, measure, told)}{_on_others(measure, found, told)}."


def _on_sets(contrast: Contrast, measure: Measure, told: Winner) -> str:
    by_winner: dict[Winner, list[str]] = {}
    for name, effects in contrast.by_set.items():
        by_winner.setdefault(winner(measure, effects[measure.name]), []).append(name)
    if len(contrast.by_set) < 2:
        return ""
    if all(effects[measure.name].pairs < ENOUGH_PAIRS for effects in contrast.by_set.values()):
        return "; too few pairs on each set alone to tell"
    if list(by_winner) == [told]:
        return ", as on every set alone"
    parts = []
    order: tuple[Winner, ...] = ("better", "worse", "cannot be told")
    for kind in sorted(by_winner, key=lambda kind: (kind != told, order.index(kind))):
        names = [
            name if kind == told else f"{name} ({amount(measure, contrast.by_set[name][measure.name])})"
            for name in by_winner[kind]
        ]
        parts.append(f"{'so' if kind == told else kind} on {', '.join(names)}")
    return "; " + "; ".join(parts)


def _on_others(measure: Measure, found: Effect, told: Winner) -> str:
    if found.low_by_set is None or found.high_by_set is None or told == "cannot be told":
        return ""
    contained = found.low_by_set <= (1.0 if measure.is_ratio else 0.0) <= found.high_by_set
    return "; cannot be told of other sets like these" if contained else ""


def amount(measure: Measure, effect: Effect) -> str:
    """As in `0.58 [0.52, 0.66]`."""
    if effect.value is None:
        return "-"
    form = _form(measure)
    value = f"{effect.value:{form}}"
    return value if effect.low is None else f"{value} [{effect.low:{form}}, {effect.high:{form}}]"


def range_by_set(measure: Measure, effect: Effect) -> str:
    """As in `[0.49, 0.70]`; a dash where there are no two sets."""
    form = _form(measure)
    return "-" if effect.low_by_set is None else f"[{effect.low_by_set:{form}}, {effect.high_by_set:{form}}]"


def _form(measure: Measure) -> str:
    return ".2f" if measure.is_ratio else "+.2f" if measure.key == "unfair_fraction" else "+.1f"


# --------------------------------------------------------------------------- as data


def as_json(comparison: Comparison) -> dict[str, object]:
    """The figures of comparison.json: by measure and pair, then by set, what policies come to, verdicts."""

    def table(
        effects: Callable[[Contrast], dict[str, Effect] | None],
        written: Callable[[Measure, Effect], dict[str, object]] = _effect_json,
    ) -> dict[str, object]:
        return {
            measure.name: {
                contrast.name: written(measure, of_contrast[measure.name])
                for contrast in comparison.contrasts
                if (of_contrast := effects(contrast)) is not None
            }
            for measure in MEASURES
        }

    return {
        **table(lambda contrast: contrast.overall, _overall_json),
        "by_set": {
            name: table(lambda contrast, name=name: contrast.by_set.get(name))  # type: ignore[misc]
            for name in comparison.sets
        },
        "policies": {policy: policy_means(comparison, policy) for policy in comparison.policies},
        "verdicts": [verdict for contrast in comparison.contrasts for verdict in verdicts(contrast)],
        "left_out": comparison.left_out,
        "runs": [run.name for run in comparison.runs],
        "step_times": {run.name: run.step_time for run in comparison.runs},
    }


def _effect_json(measure: Measure, effect: Effect) -> dict[str, object]:
    kind = "ratio" if measure.is_ratio else "difference"
    return {kind: effect.value, "low": effect.low, "high": effect.high, "pairs": effect.pairs}


def _overall_json(measure: Measure, effect: Effect) -> dict[str, object]:
    by_set = {"low_by_set": effect.low_by_set, "high_by_set": effect.high_by_set}
    return {**_effect_json(measure, effect), **by_set}


def policy_means(comparison: Comparison, policy: str) -> dict[str, float | int | None]:
    """Means over the runs of those (set, seed) that every policy has; `worst_rho` is the worst of all."""
    runs = [run for run in comparison.common if run.policy == policy]
    means: dict[str, float | int | None] = {"runs": len(runs)}
    for measure in MEASURES:
        values = [value for run in runs if (value := measure.of(run)) is not None]
        over = max if measure.key == "worst_rho" else np.mean
        means[measure.key] = float(over(values)) if values and len(values) == len(runs) else None
    return means
