"""What a larger batch does to the learning rate (AdaScale).

Source: Johnson, Agrawal, Gu, Guestrin, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training",
2020, section 3. The gain itself is `common.goodput.model.gain`.

`scale` is S = total batch / M0 everywhere, at least 1.
"""

import math
from collections.abc import Callable

ScalingRule = Callable[[float, float], float]
"""(gain, scale) -> factor of the learning rate that was tuned at M0."""


class UnknownOptimizer(ValueError):
    """No rule is known by which this optimizer's rate follows the batch size."""


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
