"""Estimates of the gradient's square and variance, from gradients that training computes anyway.

Sources: McCandlish, Kaplan, Amodei, "An Empirical Model of Large-Batch Training", 2018, appendix A.1 (two
batch sizes give both numbers without bias); Johnson et al. 2020 (AdaScale), section 3.2 (averages);
Pollux (OSDI'21), section 3.1.

A *group* is one pass of one replica. A step has N groups of b_i examples, B = sum b_i, weights w_i = b_i / B,
gradients g_i, and their average g = sum w_i g_i. Since E|g_i|^2 = |mu|^2 + tr(Sigma) / b_i,

    E[sum w_i |g_i|^2] = |mu|^2 + N tr(Sigma) / B          E|g|^2 = |mu|^2 + tr(Sigma) / B

for the true gradient mu and the covariance Sigma of one example's gradient; hence without bias

    tr(Sigma) = (sum w_i |g_i|^2 - |g|^2) B / (N - 1)      |mu|^2 = |g|^2 - tr(Sigma) / B.

With one group a step, two successive steps are taken for two groups (`successive`); the little that the
weights moved in between counts as noise.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from common.goodput.model import gain
from common.types import GradientStatistics

MEMORY_STEPS = 100.0
"""Steps at M0 that the averages remember. AdaScale (section 3.2) has 1000, for jobs of many thousands; ours
have hundreds, and a noise scale that grows fivefold on the way."""
MIN_ESTIMATES = 10
"""Fewer estimates are never trusted."""
MIN_DEVIATIONS = 2.0
"""Standard errors by which the mean gradient's square must exceed zero to be trusted."""
ROUNDING = 1e-6
"""Relative size of a difference of squared norms in single precision that says nothing."""


@dataclass(frozen=True)
class GroupNorms:
    """What a step shows: `local_sqr` is sum w_i |g_i|^2, `mean_sqr` is |g|^2, over `groups` groups that have
    `batch` examples together."""

    groups: int
    batch: int
    local_sqr: float
    mean_sqr: float


def successive(first_batch: int, first_sqr: float, batch: int, sqr: float, dot: float) -> GroupNorms:
    """Two steps of one group each as two groups of one step; `dot` is the product of their gradients."""
    total = first_batch + batch
    first_weight, weight = first_batch / total, batch / total
    local_sqr = first_weight * first_sqr + weight * sqr
    mean_sqr = first_weight**2 * first_sqr + weight**2 * sqr + 2.0 * first_weight * weight * dot
    return GroupNorms(2, total, local_sqr, mean_sqr)


class EfficiencyEstimator(Protocol):
    """What the trainer needs of an estimator of statistical efficiency."""

    def update(self, norms: GroupNorms, scale: float) -> None:
        """Take in what a step at `scale` = total batch / M0 has shown."""

    def gain(self, scale: float) -> float:
        """Steps at M0 that a step at `scale` is worth, in [1, scale]."""

    def statistics(self) -> GradientStatistics | None:
        """What the scheduler may know; None before there is an estimate."""

    def state(self) -> dict[str, float]: ...

    def load(self, state: dict[str, float]) -> None: ...


class GradientNoiseScale:
    """Debiased exponential averages of |mu|^2 and of tr(Sigma) / M0.

    Smoothing: a step at scale S weighs theta = (1 - 1/MEMORY_STEPS)^S, the continuous form of AdaScale's
    1 - S/1000, so that the averages span the same number of examples at every batch size.

    A single estimate of |mu|^2 may well be negative, and is averaged like any other, since leaving it out
    would bias the average upwards. An estimate that is not finite is left out. An *average* of |mu|^2 is
    believed down to its own standard error and no further: below that it cannot be told from zero, and
    zero would make the largest batch look free. Statistics are trusted when the last estimate was finite,
    there are at least MIN_ESTIMATES, the average of |mu|^2 is MIN_DEVIATIONS standard errors above zero, and
    there is variance beyond rounding.
    """

    def __init__(self, initial_batch_size: int) -> None:
        self.initial_batch_size = initial_batch_size
        self._weight = 0.0
        self._weight_sqr = 0.0
        self._sqr = 0.0
        self._sqr_moment = 0.0
        self._var = 0.0
        self._noise_seen = 0.0
        self._estimates = 0.0
        self._believed = 0.0

    def update(self, norms: GroupNorms, scale: float) -> None:
        if norms.groups < 2:
            return
        difference = norms.local_sqr - norms.mean_sqr
        trace = difference * norms.batch / (norms.groups - 1)
        sqr = norms.mean_sqr - trace / norms.batch
        moment = sqr * sqr
        self._believed = float(math.isfinite(moment) and math.isfinite(trace))
        if not self._believed:
            return
        keep = (1.0 - 1.0 / MEMORY_STEPS) ** scale
        take = 1.0 - keep
        self._weight = keep * self._weight + take
        self._weight_sqr = keep**2 * self._weight_sqr + take**2
        self._sqr = keep * self._sqr + take * sqr
        self._sqr_moment = keep * self._sqr_moment + take * moment
        self._var = keep * self._var + take * max(trace, 0.0) / self.initial_batch_size
        self._noise_seen = keep * self._noise_seen + take * (difference > ROUNDING * norms.local_sqr)
        self._estimates += 1.0

    def statistics(self) -> GradientStatistics | None:
        if self._estimates < 2:
            return None
        sqr, error = self._sqr / self._weight, self._sqr_error()
        trusted = (
            self._believed > 0
            and self._estimates >= MIN_ESTIMATES
            and sqr > MIN_DEVIATIONS * error
            and self._noise_seen > 0.5 * self._weight
        )
        return GradientStatistics(sqr=max(sqr, error), var=self._var / self._weight, trusted=trusted)

    def gain(self, scale: float) -> float:
        known = self.statistics()
        return float(gain(known, scale)) if known else 1.0

    def _sqr_error(self) -> float:
        """Standard error of the average of |mu|^2: the weighted variance of its estimates, times
        rho / (1 - rho) with rho = sum of squared weights / square of their sum (one over their number,
        were they equal)."""
        share = self._weight_sqr / self._weight**2
        variance = self._sqr_moment / self._weight - (self._sqr / self._weight) ** 2
        return math.sqrt(max(variance, 0.0) * share / (1.0 - share))

    def state(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name.startswith("_")}

    def load(self, state: dict[str, float]) -> None:
        for name in self.state():
            setattr(self, name, state[name])
