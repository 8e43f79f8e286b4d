"""The one way to say how certain a mean over pairs is. Pure: the resampling is seeded.

The values of the pairs come in strata: one group of values per workload set. Differences between sets are
then no part of the uncertainty: the bounds speak of these sets, not of other sets like them.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 9999
SEED = 1
ENOUGH_PAIRS = 5
"""Fewer values give no interval: by chance alone, all n values lie on one side of the true median with
probability 2^(1 - n), which is 25% for three values and still 12.5% for four."""

Outcome = Literal["better", "worse", "inconclusive"]


class Bounds(NamedTuple):
    """`interval`: holds the mean with probability `LEVEL`. `range`: the smallest and the largest value."""

    low: float
    high: float
    kind: Literal["interval", "range"]


def bounds_of_mean(strata: Sequence[Sequence[float]]) -> Bounds | None:
    """Bounds for the mean of all values, which are finite: an interval, or their range when there are fewer
    than `ENOUGH_PAIRS`. None for fewer than two values.

    The interval is a stratified bootstrap: each resample draws from every stratum as many of its values as it
    has. Two corrections make small samples honest. Within a stratum of n values, deviations from its mean
    are scaled by sqrt(n / (n - 1)), so that the resampled variance is unbiased (Rao and Wu 1988, "Resampling
    inference with complex survey data"). The percentiles are those where Student's t ends its 95%, with one
    degree of freedom less per stratum (Hesterberg 2015, "What teachers should know about the bootstrap").
    With three values or more per stratum the interval holds the mean about as often as it says; with two it
    does so in about 85% of cases.
    """
    values = [value for stratum in strata for value in stratum]
    if len(values) < 2:
        return None
    if len(values) < ENOUGH_PAIRS:
        return Bounds(min(values), max(values), "range")
    chance = np.random.default_rng(SEED)
    groups = _with_spread(strata)
    sums = np.zeros(RESAMPLES)
    for group in groups:
        spread = (group - group.mean()) * math.sqrt(group.size / (group.size - 1))
        sums += chance.choice(group.mean() + spread, size=(RESAMPLES, group.size)).sum(axis=1)
    tail = stats.norm.sf(stats.t.ppf((1 + LEVEL) / 2, len(values) - len(groups)))
    low, high = np.quantile(sums / len(values), (tail, 1 - tail)).tolist()
    return Bounds(low, high, "interval")


def outcome(bounds: Bounds | None, *, neutral: float, less_is_better: bool) -> Outcome:
    """Better or worse only when the whole interval lies on one side of `neutral`. A range decides nothing."""
    if bounds is None or bounds.kind == "range" or bounds.low <= neutral <= bounds.high:
        return "inconclusive"
    return "better" if (bounds.high < neutral) == less_is_better else "worse"


def _with_spread(strata: Sequence[Sequence[float]]) -> list[np.ndarray]:
    """The strata in an order that depends on their values alone. A single value shows no spread, so single
    values share one stratum (collapsed strata, Cochran 1977, "Sampling Techniques", section 5A.12); if there
    is only one, it joins the smallest other stratum."""
    groups = sorted((sorted(stratum) for stratum in strata if len(stratum) > 1), key=lambda g: (len(g), g))
    singles = sorted(stratum[0] for stratum in strata if len(stratum) == 1)
    if len(singles) == 1:
        groups[0] = sorted([*groups[0], *singles])
    elif singles:
        groups.append(singles)
    return [np.array(group) for group in groups]
