"""How much a larger batch is worth, and what it does to the learning rate (AdaScale).

Source: Johnson, Agrawal, Gu, Guestrin, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training",
2020, section 3; Pollux (OSDI'21), section 3.1, measures training progress by the same gain.

`scale` is S = total batch / M0 everywhere, at least 1.
"""

import math
from collections.abc import Callable

ScalingRule = Callable[[float, float], float]
"""(gain, scale) -> factor of the learning rate that was tuned at M0."""


class UnknownOptimizer(ValueError):
    """No rule is known by which this optimizer's rate follows the batch size."""


def gain(sqr: float, var: float, scale: float) -> float:
    """r(S) = (var + sqr) / (var / S + sqr), in [1, S]: the steps at M0 that one step at S M0 is worth.

    `sqr` is the squared norm of the true gradient, `var` the trace of the covariance of a gradient at batch
    size M0 (AdaScale, equation for r_t in section 3.2). Values that cannot be one (negative, not finite,
    both zero) are worth no gain: 1. Raises ValueError for a scale below 1.
    """
    if not scale >= 1.0:
        raise ValueError(f"scale {scale}: must be at least 1 (a total batch below M0 is not supported)")
    if not (math.isfinite(sqr) and math.isfinite(var) and math.isfinite(scale)):
        return 1.0
    if sqr < 0.0 or var <= 0.0:
        return 1.0
    return min(max((var + sqr) / (var / scale + sqr), 1.0), scale)


def scale_of(total_batch: int, initial_batch_size: int) -> float:
    """S of one step. The last step of an epoch may be smaller than M0; it counts as one step at M0."""
    return max(total_batch / initial_batch_size, 1.0)


def _adascale(gain: float, scale: float) -> float:
    return gain


def _square_root(gain: float, scale: float) -> float:
    return math.sqrt(scale)


RULES: dict[str, ScalingRule] = {"sgd": _adascale, "adam": _square_root, "adamw": _square_root}


def scaling_rule(optimizer: str) -> ScalingRule:
    """The rule for an optimizer's name: AdaScale's gain for "sgd", the square root of the scale for
    "adam" and "adamw", whose step does not depend on the gradient's length. Raises UnknownOptimizer."""
    try:
        return RULES[optimizer]
    except KeyError:
        raise UnknownOptimizer(
            f"optimizer {optimizer!r}: no rule for its learning rate; known are {', '.join(sorted(RULES))}"
        ) from None
