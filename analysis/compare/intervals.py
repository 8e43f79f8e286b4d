"""Bootstrap intervals of a mean. Pure: the chance in them is seeded."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 9999
SEED = 1
ENOUGH_PAIRS = 6
"""Of fewer values no interval reaches 95%: even the whole range of n values holds the median that they come
from with a probability of 1 - 2^(1 - n) only (75% of three, 94% of five)."""


class Interval(NamedTuple):
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval | None:
    """A 95% interval for the mean that `values` (finite, in any order) are drawn from; None of fewer than 2.
    Of fewer than ENOUGH_PAIRS their whole range.

    Percentiles of resampled means, expanded for small samples as in Hesterberg (2015), "What Teachers Should
    Know About the Bootstrap": the plain 2.5% and 97.5% are too narrow for n values by a factor of about
    sqrt((n - 1) / n) z / t, so that the percentiles Phi(-+ sqrt(n / (n - 1)) t) are taken instead, t being
    Student's for n - 1 degrees of freedom.
    """
    count = len(values)
    if count < 2:
        return None
    if count < ENOUGH_PAIRS:
        return Interval(float(min(values)), float(max(values)))
    tail = _tail(count)
    found = stats.bootstrap(
        (np.sort(values),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=1 - 2 * tail,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))


def interval_by_group(groups: Sequence[Sequence[float]]) -> Interval | None:
    """A 95% interval for the mean of all values, when the groups too are drawn from many like them: in every
    resample groups are drawn with replacement, and from each of these as many of its values as it has, with
    replacement as well. None of fewer than two groups.

    Percentiles are expanded as above, for as many values as there are groups. Of few groups that comes near
    to the range of the resampled means: no more can be had from them.
    """
    count = len(groups)
    if count < 2:
        return None
    chance = np.random.default_rng(SEED)
    drawn = chance.integers(count, size=(RESAMPLES, count))
    sums, sizes = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for number, values in enumerate(map(np.asarray, groups)):
        for column in range(count):
            (rows,) = np.nonzero(drawn[:, column] == number)
            sums[rows] += chance.choice(values, size=(rows.size, values.size)).sum(axis=1)
            sizes[rows] += values.size
    tail = _tail(count)
    low, high = np.quantile(sums / sizes, (tail, 1 - tail))
    return Interval(float(low), float(high))


def _tail(count: int) -> float:
    """The part of the resampled means beyond either end of an interval, expanded for `count` values."""
    t = stats.t.ppf((1 + LEVEL) / 2, count - 1)
    return float(stats.norm.sf(math.sqrt(count / (count - 1)) * t))
