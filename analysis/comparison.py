"""Policies against each other, run by run on the same jobs. Pure.

Two policies are compared over their *pairs*: runs of the same (set, seed), so of the same jobs arriving at
the same times. A measure that is above 0 is compared by the geometric mean of the ratios within the pairs:
every pair counts alike, however long its set lasts, and pollux/fixed is the inverse of fixed/pollux, neither
of which holds for a ratio of means. A measure that can be 0 (unfair fraction, rescales) has no such ratio:
the mean difference stands for it. Intervals are 95%, by bootstrap over the pairs (`analysis.bootstrap`).

Over all sets the pairs are drawn as one sample, not set by set. Sets stand for workloads like them, so what
differs between sets has to widen the interval; and drawing three seeds within each set, as a stratified
bootstrap would, takes a third off their variance.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from analysis.bootstrap import ENOUGH_PAIRS, LEVEL, interval
from analysis.metrics import RunSummary
from common.types import Struct

METHOD = (
    "Paired by (set, seed): ratios are geometric means over the pairs, differences are means; intervals are "
    f"{LEVEL:.0%}, by bootstrap over the pairs, expanded for small samples. One of n < {ENOUGH_PAIRS} pairs "
    "is their whole range, which covers no more than 1 - 2^(1 - n): 75% for three pairs."
)
SCOPE = (
    "Scope: small CPU jobs, a simplified goodput model and the policies named here. It says nothing certain "
    "about many-GPU training in production."
)
ORDER = ("fixed", "tiresias", "srtf", "optimus", "dynamic", "throughput", "pollux", "coadapt")
"""Baselines first: of two policies people are shown the later one against the earlier one."""

Winner = Literal["better", "worse", "cannot be told"]


@dataclass(frozen=True)
class Measure:
    """A figure of a run. `sign`: 1 where less is better, -1 where more is."""

    key: str
    title: str
    of: Callable[[RunSummary], float | None]
    sign: int = 1
    is_ratio: bool = True

    @property
    def name(self) -> str:
        return f"{self.key}_{'ratio' if self.is_ratio else 'difference'}"


MEASURES = (
    Measure("mean_jct", "mean JCT", lambda run: run.jct_s.mean),
    Measure("p90_jct", "p90 JCT", lambda run: run.jct_s.p90),
    Measure("makespan", "makespan", lambda run: run.makespan_s),
    Measure("goodput", "goodput", lambda run: run.goodput.cluster_mean, sign=-1),
    Measure("worst_rho", "worst rho", lambda run: run.fairness.worst_rho),
    Measure("mean_rho", "mean rho", lambda run: run.fairness.mean_rho),
    Measure("unfair_fraction", "unfair fraction", lambda run: run.fairness.unfair_fraction, is_ratio=False),
    Measure("jain", "Jain's index", lambda run: run.fairness.jain, sign=-1),
    Measure("rescales", "rescales", lambda run: run.rescales.count, is_ratio=False),
)


class Run(Struct, frozen=True):
    """A run that counts. `name` is that of its folder."""

    name: str
    set: str
    policy: str
    seed: int
    summary: RunSummary


class LeftOut(Struct, frozen=True):
    run: str
    why: str


@dataclass(frozen=True)
class Effect:
    """`value` over `pairs` pairs (None: of none), of which `better` are better; bounds are None of fewer than
    two."""

    value: float | None
    low: float | None
    high: float | None
    pairs: int
    better: int


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
    pairs: tuple[tuple[Run, Run], ...]
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
    runs: tuple[Run, ...]
    common: tuple[Run, ...]
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
    runs: Sequence[Run], left_out: Sequence[LeftOut] = (), baselines: Sequence[str] = ()
) -> Comparison:
    """Every policy against each baseline (none given: against every other). What has no partner, or other
    jobs than its partners, is added to what was left out."""
    alike, strangers = _of_same_jobs(runs)
    policies = tuple(sorted({run.policy for run in alike}, key=_rank))
    lacking = _lacking(alike, policies, {entry.run for entry in (*left_out, *strangers)})
    blocks = _blocks(alike)
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


def _rank(policy: str) -> tuple[int, str]:
    """Variants, as in `pollux-batch-only` and `pollux:power=0`, stand after what they vary."""
    of = [number for number, name in enumerate(ORDER) if policy.startswith(name)]
    return (max(of, default=len(ORDER)), policy)


def _key(run: Run) -> tuple[str, int]:
    return run.set, run.seed


def _blocks(runs: Iterable[Run]) -> list[dict[str, Run]]:
    """By (set, seed), the runs by policy."""
    ordered = sorted(runs, key=lambda run: (*_key(run), _rank(run.policy)))
    return [{run.policy: run for run in group} for _, group in groupby(ordered, key=_key)]


def _of_same_jobs(runs: Sequence[Run]) -> tuple[list[Run], list[LeftOut]]:
    """Without those whose jobs are not those of most runs of their (set, seed), and second runs of one."""
    kept: list[Run] = []
    out: list[LeftOut] = []
    ordered = sorted(runs, key=lambda run: (*_key(run), run.name))
    for _, group in groupby(ordered, key=_key):
        block = list(group)
        jobs = [
            frozenset((job.id, job.application, job.target) for job in run.summary.per_job) for run in block
        ]
        usual = max(jobs, key=jobs.count)
        seen: dict[str, str] = {}
        for run, its in zip(block, jobs, strict=True):
            if its != usual:
                other = block[jobs.index(usual)].name
                out.append(LeftOut(run=run.name, why=f"its jobs are not those of {other}"))
            elif run.policy in seen:
                why = f"set, policy and seed are those of {seen[run.policy]}"
                out.append(LeftOut(run=run.name, why=why))
            else:
                seen[run.policy] = run.name
                kept.append(run)
    return kept, out


def _lacking(runs: Sequence[Run], policies: Sequence[str], known: set[str]) -> Iterable[LeftOut]:
    for block in _blocks(runs):
        one = next(iter(block.values()))
        for policy in policies:
            name = _named(policy, one)
            if policy not in block and name not in known:
                partners = ", ".join(run.name for run in block.values())
                yield LeftOut(run=name, why=f"there is no such run; unpaired with it: {partners}")


def _named(policy: str, partner: Run) -> str:
    """The folder that a run of this policy has beside its partner's. Policies may carry parameters, which
    folders spell otherwise."""
    own, other = (
        re.sub(r"[^A-Za-z0-9_.-]+", "-", f"-{name}-{partner.seed}") for name in (policy, partner.policy)
    )
    return (partner.name.removesuffix(other) if partner.name.endswith(other) else partner.set) + own


def _contrast(policy: str, baseline: str, blocks: Sequence[dict[str, Run]]) -> Contrast:
    pairs = [(block[policy], block[baseline]) for block in blocks if policy in block and baseline in block]
    return Contrast(
        policy=policy,
        baseline=baseline,
        pairs=tuple(pairs),
        overall=_effects(pairs),
        by_set={name: _effects(list(group)) for name, group in groupby(pairs, key=lambda pair: pair[0].set)},
    )


def _effects(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Effect]:
    return {measure.name: effect(measure, pairs) for measure in MEASURES}


def effect(measure: Measure, pairs: Sequence[tuple[Run, Run]]) -> Effect:
    """Of the first runs of the pairs against the second; without pairs of which one lacks the measure."""
    known = [(measure.of(run.summary), measure.of(other.summary)) for run, other in pairs]
    changes = []
    for value, other in known:
        if value is None or other is None:
            continue
        if not measure.is_ratio:
            changes.append(value - other)
        elif value > 0 and other > 0:
            changes.append(math.log(value / other))
    if not changes:
        return Effect(value=None, low=None, high=None, pairs=0, better=0)
    back = math.exp if measure.is_ratio else float
    bounds = interval(changes)
    return Effect(
        value=back(np.mean(changes)),
        low=back(bounds.low) if bounds else None,
        high=back(bounds.high) if bounds else None,
        pairs=len(changes),
        better=sum(measure.sign * change < 0 for change in changes),
    )


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
    ]


def _sentence(contrast: Contrast, measure: Measure) -> str:
    found = contrast.overall[measure.name]
    told = winner(measure, found)
    title = measure.title[0].upper() + measure.title[1:]
    if measure.is_ratio:
        text = f"{title} of {contrast.policy} over that of {contrast.baseline}: {amount(measure, found)}"
    else:
        text = f"{title} of {contrast.policy} less that of {contrast.baseline}: {amount(measure, found)}"
    lacking = len(contrast.pairs) - found.pairs
    counted = f"{found.pairs} pair{'' if found.pairs == 1 else 's'}, {found.better} of them better"
    if 0 < found.pairs < ENOUGH_PAIRS:
        counted += ", too few for 95%"
    if lacking:
        counted += f"; {lacking} without the measure or with none of it to compare"
    return f"{text} ({counted}): {told}{_on_sets(contrast, measure, told)}."


def _on_sets(contrast: Contrast, measure: Measure, told: Winner) -> str:
    by_winner: dict[Winner, list[str]] = {}
    for name, effects in contrast.by_set.items():
        by_winner.setdefault(winner(measure, effects[measure.name]), []).append(name)
    if len(contrast.by_set) < 2:
        return ""
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


def amount(measure: Measure, effect: Effect) -> str:
    """As in `0.58 [0.52, 0.66]`."""
    if effect.value is None:
        return "-"
    form = ".2f" if measure.is_ratio else "+.2f" if measure.key == "unfair_fraction" else "+.1f"
    if effect.low is None:
        return f"{effect.value:{form}}"
    return f"{effect.value:{form}} [{effect.low:{form}}, {effect.high:{form}}]"


# --------------------------------------------------------------------------- as data


def as_json(comparison: Comparison) -> dict[str, object]:
    """The figures of comparison.json: by measure and pair, then by set, what policies come to, verdicts."""

    def table(effects: Callable[[Contrast], dict[str, Effect] | None]) -> dict[str, object]:
        return {
            measure.name: {
                contrast.name: _effect_json(measure, of_contrast[measure.name])
                for contrast in comparison.contrasts
                if (of_contrast := effects(contrast)) is not None
            }
            for measure in MEASURES
        }

    return {
        **table(lambda contrast: contrast.overall),
        "by_set": {
            name: table(lambda contrast, name=name: contrast.by_set.get(name))  # type: ignore[misc]
            for name in comparison.sets
        },
        "policies": {policy: policy_means(comparison, policy) for policy in comparison.policies},
        "verdicts": [verdict for contrast in comparison.contrasts for verdict in verdicts(contrast)],
        "left_out": comparison.left_out,
        "runs": [run.name for run in comparison.runs],
    }


def _effect_json(measure: Measure, effect: Effect) -> dict[str, object]:
    kind = "ratio" if measure.is_ratio else "difference"
    return {kind: effect.value, "low": effect.low, "high": effect.high, "pairs": effect.pairs}


def policy_means(comparison: Comparison, policy: str) -> dict[str, float | int | None]:
    """Means over the runs of those (set, seed) that every policy has; `worst_rho` is the worst of all."""
    runs = [run.summary for run in comparison.common if run.policy == policy]
    means: dict[str, float | int | None] = {"runs": len(runs)}
    for measure in MEASURES:
        values = [value for run in runs if (value := measure.of(run)) is not None]
        over = max if measure.key == "worst_rho" else np.mean
        means[measure.key] = float(over(values)) if values and len(values) == len(runs) else None
    return means
