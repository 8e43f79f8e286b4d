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

What such an optimizer has averaged is of the batches that it has seen, and it remembers a thousand steps.
When the scale changes from S to S', its averages are told at the new one (`rescale_averages`):

    squares      of a gradient at S are sqr + var / S in expectation. What is remembered is multiplied by the
                 ratio q of that at S' to that at S (`second_moment_ratio`), or the steps would go on as suits
                 the noise of before.
    memory       n steps at S have as many examples as n S / S' at S'. So many are said to be averaged, and
                 the averages, which Adam divides by 1 - beta^n to correct their bias, are multiplied by
                 (1 - beta^(n S / S')) / (1 - beta^n). Or the first gradients, far larger than all later
                 ones, would be remembered for S' / S times as many examples.
    momentum     The move that the average gradient stands for, the rate times the average over the root of
                 the squares, stays what it was at the moment of the change: the average is multiplied by
                 sqrt(q) times the former over the new rate. Or the noise of a few small batches would move
                 the weights up to S' / S times as far as it was to. This is the opposite of the momentum
                 correction of Goyal et al. ("Accurate, Large Minibatch SGD", 2017, section 3), which lets
                 past gradients follow a new rate; the figures below are what speaks for it.

Progress to a target (char-lm 2.8, matfac 0.97; medians of three seeds; given up at 1500) of jobs that change
from M0 to 16 M0, with nothing told, the squares alone, and all three:

                                    char-lm                    matfac
    16 M0 from the beginning        381                        583
    after 10 steps                  978    1080    326         734     685    587
    after 50 steps                  533     405    309         957     660    607
    there and back every 20         651     675    280       > 1500  > 1500   581

To forget everything whenever the batch grows twofold does as well for char-lm (282, 258, 226), less well for
matfac (589, 663, 637), and would happen after the short last step of every epoch. Memory counted in progress,
by the ratio of gains in place of S / S', still leaves char-lm at 906 after 10 steps (without `momentum`).
Not mended is growth within the first five steps: char-lm needs 754 after 1 step, 408 after 2, 531 after 3,
1002 after 4, 1306 after 5 (307 after 6). It needs 1378 after 5 when everything is forgotten, so that no
memory is at fault. The memory is told too long once there were more than the thousand steps that Adam
remembers; weight decay (AdamW) and SGD's momentum are left as they are.
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


def second_moment_ratio(known: GradientStatistics, former: float, scale: float) -> float:
    """The expected square of a gradient at `scale` over that of one at `former`; 1 where nothing is known."""
    before = known.sqr + known.var / former
    return (known.sqr + known.var / scale) / before if before > 0.0 and math.isfinite(before) else 1.0


def rescale_averages(
    optimizer: "torch.optim.Optimizer",
    known: GradientStatistics | None,
    former: float,
    scale: float,
    rates: float,
) -> None:
    """Tell at `scale` what an Adam-like optimizer has averaged at `former`: the number of steps, the squares,
    and the gradients. One that averages no squares is left alone. `rates`: the former over the new rate."""
    steps = former / scale
    squares = second_moment_ratio(known, former, scale) if known else 1.0
    gradients = math.sqrt(squares) * rates
    for group in optimizer.param_groups:
        for kept in (optimizer.state.get(parameter, {}) for parameter in group["params"]):
            if "exp_avg_sq" in kept:
                before = float(kept["step"])
                after = float(kept["step"].mul_(steps))
                bias, squares_bias = ((1.0 - beta**after) / (1.0 - beta**before) for beta in group["betas"])
                kept["exp_avg"].mul_(gradients * bias)
                for name in SECOND_MOMENTS & kept.keys():
                    kept[name].mul_(squares * squares_bias)
