"""Gradient statistics: the square and the variance of the gradient, estimated from gradients that training
computes anyway.

Sources: McCandlish, Kaplan, Amodei, "An Empirical Model of Large-Batch Training", 2018, appendix A.1 (norms
at two batch sizes give unbiased estimates of both); Johnson et al., "AdaScale SGD", 2020, section 3 (the
gain, and averages over steps); Qiao et al., "Pollux", 2021, section 3.1 (both, and how a scheduler uses
them).

    here            McCandlish 2018      AdaScale 2020        meaning
    mu              G                    the gradient         gradient of the true loss at the current weights
    trace           tr(Sigma)            M0 sigma^2           trace of the covariance of ONE example's
    gradient trace / sqr     B_simple (eq. 2.9)                        the noise scale, in examples
    var             tr(Sigma) / M0       sigma^2              variance of the gradient of M0 examples
    sqr             |G|^2                mu^2                 |mu|^2

A *group* is one pass of one replica: the examples whose gradient is averaged before other gradients are
added. All quantities are plain numbers: sums over all parameters of the model.

**Several groups in a step** (`of_groups`). N groups of b_i examples, B = sum b_i, weights w_i = b_i / B,
gradients g_i [parameters], their average g = sum w_i g_i. Since E|g_i|^2 = |mu|^2 + trace / b_i,

    E[sum w_i |g_i|^2] = |mu|^2 + N trace / B          E|g|^2 = |mu|^2 + trace / B

and hence without bias (McCandlish A.1 for the two "batch sizes" b_i and B, but for groups of any size)

    trace = (sum w_i |g_i|^2 - |g|^2) B / (N - 1)      |mu|^2 = |g|^2 - trace / B.

**One group in a step** (`of_successive`). The gradients a, b, c [parameters] of three successive steps are
compared. Their noise is independent, but mu changes between steps, and it changes *against* the gradient that
was just followed, noise included. So the mean product of two gradients falls with the number k of steps
between them, at first by about q k^2 (momentum makes it smooth). Neither term below depends on q: products at
two distances are extrapolated to distance zero, and a second difference ignores any steady drift
(pseudo-residuals: Gasser, Sroka, Jennen-Steinmetz, "Residual variance and residual pattern in nonlinear
regression", Biometrika 1986):

    |mu|^2 = (4 b.c - a.c) / 3          trace = |a - 2b + c|^2 / (1 / B_a + 4 / B_b + 1 / B_c).

Compared with four groups of the very same steps (at M0, averages over 6 seeds at several points of a
training), this overestimates the noise scale by a factor of 1.11 to 1.43 for digits-cnn and 1.11 to 1.19 for
char-lm. With products and differences of neighbouring steps only, the factors were 1.47 to 1.79 and 1.27 to
1.46.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from common.goodput.model import gain
from common.types import GradientStatistics
from workloads.trainer.gradient_statistics.adascale import check_scale

MEMORY_STEPS = 100.0
"""How many steps at M0 the averages remember. AdaScale uses 1000, for jobs of many thousand steps. Our jobs
have hundreds, and a noise scale that grows fivefold during the training."""
MIN_ESTIMATES = 10
"""Statistics of fewer estimates are never trusted."""
ROUNDING = 1e-6
"""Relative differences of squared norms below this may be rounding errors of single precision."""


@dataclass(frozen=True)
class StepEstimate:
    """Unbiased estimates from a single step, and therefore noisy."""

    sqr: float
    """|mu|^2; often negative."""
    trace: float
    """tr(Sigma) of one example's gradient."""
    noisy: bool
    """Whether the gradients differed by more than rounding."""


def of_groups(groups: int, batch: int, local_sqr: float, mean_sqr: float) -> StepEstimate:
    """The estimate from `groups` >= 2 groups with `batch` examples in all. `local_sqr` is sum w_i |g_i|^2 and
    `mean_sqr` is |g|^2."""
    difference = local_sqr - mean_sqr
    trace = difference * batch / (groups - 1)
    return StepEstimate(mean_sqr - trace / batch, trace, difference > ROUNDING * local_sqr)


class Products(NamedTuple):
    """The scalar products of three successive gradients a, b, c, oldest first."""

    aa: float
    ab: float
    ac: float
    bb: float
    bc: float
    cc: float


def of_successive(batches: tuple[int, int, int], products: Products) -> StepEstimate:
    """The estimate from three steps of one group each, with `batches` examples."""
    aa, ab, ac, bb, bc, cc = products
    difference = aa + 4.0 * bb + cc - 4.0 * ab - 4.0 * bc + 2.0 * ac
    trace = difference / (1.0 / batches[0] + 4.0 / batches[1] + 1.0 / batches[2])
    return StepEstimate((4.0 * bc - ac) / 3.0, trace, difference > ROUNDING * (aa + 4.0 * bb + cc))


class EfficiencyEstimator(Protocol):
    """The interface of an estimator of statistical efficiency. Implement it for another one, such as an
    estimator of the critical batch size.

    Only `TrainingState` creates and calls an estimator. Estimators are deterministic: every rank has its own
    and feeds it the same numbers, so that all ranks make the same step.
    """

    def update(self, estimate: StepEstimate, scale: float) -> None:
        """Add the estimate of a step at `scale` = total batch / M0, at least 1. Its values may be not finite.
        Raises ValueError for a scale below 1."""

    def gain(self, scale: float) -> float:
        """How many steps at M0 a step at `scale` is worth, in [1, scale]. It decides the learning rate and
        the progress. Raises ValueError for a scale below 1."""

    def statistics(self) -> GradientStatistics | None:
        """The statistics that the scheduler uses to predict the gain at other batch sizes; None before there
        are any."""

    def state(self) -> dict[str, float]:
        """Everything that `load` needs to continue exactly. It is sent to newcomers and saved in
        checkpoints."""

    def load(self, state: dict[str, float]) -> None:
        """Replace the state. Raises KeyError for a state of another estimator."""


class GradientNoiseScale:
    """Debiased exponential averages of |mu|^2 and of tr(Sigma) / M0.

    Smoothing: a step at scale S keeps the fraction theta = (1 - 1/MEMORY_STEPS)^S of the averages, which is
    the continuous form of AdaScale's 1 - S/1000. So the averages span the same number of examples at every
    batch size.

    A negative estimate of |mu|^2 is averaged like any other, since leaving it out would bias the average
    upwards. An estimate that is not finite is left out. The *average* of |mu|^2 is never reported below its
    own standard error: there it cannot be distinguished from zero, and zero would make the largest batch look
    free.

    Statistics are trusted if the last estimate was finite, there are at least MIN_ESTIMATES, the average of
    |mu|^2 is above its standard error, and there is variance beyond rounding. Requiring two standard errors
    kept digits-cnn and mnist1d-conv at M0 for a sixth of their training, although their noise scales were
    already those of later.
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

    def update(self, estimate: StepEstimate, scale: float) -> None:
        check_scale(scale)
        sqr, trace = estimate.sqr, estimate.trace
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
        self._noise_seen = keep * self._noise_seen + take * estimate.noisy
        self._estimates += 1.0

    def statistics(self) -> GradientStatistics | None:
        if self._estimates < 2:
            return None
        sqr, error = self._sqr / self._weight, self._sqr_error()
        trusted = (
            self._believed > 0
            and self._estimates >= MIN_ESTIMATES
            and sqr > error
            and self._noise_seen > 0.5 * self._weight
        )
        return GradientStatistics(sqr=max(sqr, error), var=self._var / self._weight, trusted=trusted)

    def gain(self, scale: float) -> float:
        check_scale(scale)
        known = self.statistics()
        return float(gain(known, scale)) if known else 1.0

    def _sqr_error(self) -> float:
        """Standard error of the average of |mu|^2.

        The square of it is the weighted variance of the estimates times rho / (1 - rho), where rho is the sum
        of the squared weights over the square of their sum: 1 / n for n equal weights. If the last estimate
        has all the weight, as at a scale of thousands, its error is unknown, and the whole average is
        returned."""
        share = self._weight_sqr / self._weight**2
        if share >= 1.0:
            return abs(self._sqr / self._weight)
        variance = self._sqr_moment / self._weight - (self._sqr / self._weight) ** 2
        return math.sqrt(max(variance, 0.0) * share / (1.0 - share))

    def state(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name.startswith("_")}

    def load(self, state: dict[str, float]) -> None:
        for name in self.state():
            setattr(self, name, state[name])
