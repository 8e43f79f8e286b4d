"""What a larger batch does to the learning rate, and how many steps at M0 a step is worth.

Source: Johnson, Agrawal, Gu, Guestrin, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training",
2020, section 3. A step at scale S = total batch / M0 >= 1 averages S times as many examples as one at M0.
With the gain

    r(S) = (var + sqr) / (var / S + sqr)      in [1, S]

(`common.goodput.model.gain`, from the estimates of `noise_scale`) the rate that was tuned at M0 is multiplied
by r, and the step counts as r steps at M0. Where noise rules, r is near S, which is linear scaling; where it
is absent, r is near 1, and a larger batch is no use. Schedules of the rate run on the sum of r, the progress,
so that a job goes through the same schedule at every batch size (the paper's Algorithm 1, "scale-invariant
iterations"); and so do budgets and evaluations here.

Adam-like optimizers divide the gradient by its own running size, so that the rate must not carry the gain: it
is multiplied by the square root of S (Krizhevsky 2014 for a constant variance of the update; Malladi et al.,
"On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022). Progress counts r as well.

What such an optimizer remembers of squared gradients is of the batches that they were of, and it remembers a
thousand steps: a job that has grown from M0 to 16 M0 would go on with the steps that suit the noise of M0,
and need half as much progress again. So when the scale changes, its memory is told at the new scale. A
gradient at scale S is expected to have the square

    sqr + var / S

and what is remembered is multiplied by the ratio of the new to the old (`second_moment_ratio`). Measured on
char-lm and matfac, three seeds each, from M0 to 16 M0 after 50 steps: progress to a target 533 and 957
before, 405 and 660 so, 381 and 583 at 16 M0 from the beginning. After 10 steps it is of no use to char-lm
(978 before, 1080 so): what is remembered then are the first gradients, far larger than all later ones.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.types import GradientStatistics

if TYPE_CHECKING:
    import torch

ScalingRule = Callable[[float, float], float]
"""(gain, scale) -> factor of the learning rate tuned at M0. Raises ValueError for a scale below 1."""


class UnknownOptimizer(ValueError):
    """No rule is known by which this optimizer's rate follows the batch size."""


def scale_of(total_batch: int, initial_batch_size: int) -> float:
    """S of one step. The last step of an epoch may be smaller than M0; it counts as one step at M0."""
    return max(total_batch / initial_batch_size, 1.0)


def check_scale(scale: float) -> None:
    """Raises ValueError for what is below 1, or no number: no job has a batch smaller than M0."""
    if not 1.0 <= scale < math.inf:
        raise ValueError(f"scale {scale:g}: allowed: finite, at least 1, which is the initial batch size")


def _adascale(gain: float, scale: float) -> float:
    check_scale(scale)
    return gain


def _square_root(gain: float, scale: float) -> float:
    check_scale(scale)
    return math.sqrt(scale)


SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
"""Where torch's Adam and AdamW keep their running averages of squared gradients."""
RULES: dict[str, ScalingRule] = {"sgd": _adascale, "adam": _square_root, "adamw": _square_root}


def scaling_rule(optimizer: str) -> ScalingRule:
    """The rule for an optimizer's name. Raises UnknownOptimizer."""
    try:
        return RULES[optimizer]
    except KeyError:
        raise UnknownOptimizer(
            f"optimizer {optimizer!r}: no rule for its learning rate; known are {', '.join(sorted(RULES))}"
        ) from None


def second_moment_ratio(known: GradientStatistics, former: float, scale: float) -> float:
    """The expected square of a gradient at `scale` over that of one at `former`; 1 where nothing is known."""
    before = known.sqr + known.var / former
    return (known.sqr + known.var / scale) / before if before > 0.0 and math.isfinite(before) else 1.0


def scale_second_moments(optimizer: "torch.optim.Optimizer", ratio: float) -> None:
    """Multiply what the optimizer remembers of squared gradients; one that remembers none is left alone."""
    for kept in optimizer.state.values():
        for name in SECOND_MOMENTS:
            if name in kept:
                kept[name].mul_(ratio)
