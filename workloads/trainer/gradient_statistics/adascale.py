"""AdaScale: how the learning rate follows the batch size, and how many steps at M0 a step is worth.

Source: Johnson, Agrawal, Gu, Guestrin, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training",
2020, section 3. A step at scale S = total batch / M0 >= 1 averages S times as many examples as a step at M0.
Its gain is

    r(S) = (var + sqr) / (var / S + sqr)      in [1, S]

(`common.goodput.model.gain`, with the estimates of `noise_scale`). The learning rate tuned at M0 is
multiplied by r, and the step counts as r steps at M0. If noise dominates, r is near S (linear scaling);
without noise, r is near 1 and a larger batch is useless. The sum of r is the progress. Rate schedules,
budgets and evaluations run on progress, so they are the same at every batch size (Algorithm 1,
"scale-invariant iterations").

Adam-like optimizers divide the gradient by its own running size, so their rate must not be multiplied by the
gain. It is multiplied by the square root of S (Krizhevsky 2014, for a constant variance of the update;
Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022). Progress still counts
r.

Adam's running averages reflect the batches that it has seen, for about a thousand steps. When the scale
changes from S to S', `rescale_averages` converts them to the new scale:

    squares      The expected square of a gradient at S is sqr + var / S. The remembered squares are
    multiplied
                 by q, its ratio at S' to that at S (`second_moment_ratio`). Otherwise the step size would
                 still suit the old noise.
    memory       n steps at S have as many examples as n S / S' steps at S', so the step count becomes that.
                 Adam divides the averages by 1 - beta^n to correct their bias, so they are multiplied by
                 (1 - beta^(n S / S')) / (1 - beta^n). Otherwise the first gradients, far larger than all
                 later ones, would be remembered for S' / S times as many examples.
    momentum     The move that the average gradient stands for, rate x average / sqrt(squares), must stay the
                 same at the moment of the change: the average is multiplied by sqrt(q) x old rate / new rate.
                 Otherwise the noise of a few small batches would move the weights up to S' / S times as far
                 as intended. This is the opposite of the momentum correction of Goyal et al. ("Accurate,
                 Large Minibatch SGD", 2017, section 3), which lets past gradients follow the new rate; the
                 figures below support it.

Progress to a target (char-lm 2.8, matfac 0.97; medians of three seeds; at most 1500) of jobs that change from
M0 to 16 M0, with nothing converted, with squares only, and with all three:

                                    char-lm                    matfac
    16 M0 from the beginning        381                        583
    after 10 steps                  978    1080    326         734     685    587
    after 50 steps                  533     405    309         957     660    607
    there and back every 20         651     675    280       > 1500  > 1500   581

The alternatives are worse. Forgetting everything whenever the batch doubles does as well for char-lm (282,
258, 226), less well for matfac (589, 663, 637), and would also happen after the short last step of every
epoch. Counting memory in progress, by the ratio of gains in place of S / S', leaves char-lm at 906 after 10
steps (without `momentum`).

Limits: growth within the first five steps is still slow: char-lm needs 754 after 1 step, 408 after 2, 531
after 3, 1002 after 4, 1306 after 5 (307 after 6). It needs 1378 after 5 if everything is forgotten, so memory
is not the cause. After more than the thousand steps that Adam remembers, the converted step count is too
large. Weight decay (AdamW) and SGD's momentum are not converted.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.types import GradientStatistics

if TYPE_CHECKING:
    import torch

ScalingRule = Callable[[float, float], float]
"""(gain, scale) -> factor on the learning rate tuned at M0. Raises ValueError for a scale below 1."""


class UnknownOptimizer(ValueError):
    """There is no scaling rule for this optimizer."""


def scale_of(total_batch: int, initial_batch_size: int) -> float:
    """The scale S of a step. The last step of an epoch may be smaller than M0; it counts as one step at
    M0."""
    return max(total_batch / initial_batch_size, 1.0)


def check_scale(scale: float) -> None:
    """Raises ValueError for a scale that is below 1 or not finite."""
    if not 1.0 <= scale < math.inf:
        raise ValueError(f"scale {scale:g}: allowed: finite, at least 1 (the initial batch size)")


def _adascale(gain: float, scale: float) -> float:
    check_scale(scale)
    return gain


def _square_root(gain: float, scale: float) -> float:
    check_scale(scale)
    return math.sqrt(scale)


SECOND_MOMENTS = {"exp_avg_sq", "max_exp_avg_sq"}
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


def second_moment_ratio(known: GradientStatistics, old_scale: float, scale: float) -> float:
    """The expected square of a gradient at `scale`, divided by that at `old_scale`; 1 if nothing is known."""
    before = known.sqr + known.var / old_scale
    return (known.sqr + known.var / scale) / before if before > 0.0 and math.isfinite(before) else 1.0


def rescale_averages(
    optimizer: "torch.optim.Optimizer",
    known: GradientStatistics | None,
    old_scale: float,
    scale: float,
    rate_ratio: float,
) -> None:
    """Convert the running averages of an Adam-like optimizer from `old_scale` to `scale`: number of steps,
    squares and gradients. An optimizer that averages no squares is not changed. `rate_ratio`: old rate / new
    rate."""
    steps = old_scale / scale
    squares = second_moment_ratio(known, old_scale, scale) if known else 1.0
    gradients = math.sqrt(squares) * rate_ratio
    for group in optimizer.param_groups:
        for kept in (optimizer.state.get(parameter, {}) for parameter in group["params"]):
            if "exp_avg_sq" in kept:
                before = float(kept["step"])
                after = float(kept["step"].mul_(steps))
                bias, squares_bias = ((1.0 - beta**after) / (1.0 - beta**before) for beta in group["betas"])
                kept["exp_avg"].mul_(gradients * bias)
                for name in SECOND_MOMENTS & kept.keys():
                    kept[name].mul_(squares * squares_bias)
