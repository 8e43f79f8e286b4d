import math

import pytest
import torch
from torch import nn

from common.types import GradientStatistics
from workloads.trainer.gradient_statistics.adascale import (
    UnknownOptimizer,
    check_scale,
    rescale_averages,
    scale_of,
    scaling_rule,
    second_moment_ratio,
)
from workloads.trainer.gradient_statistics.noise_scale import GradientNoiseScale, StepEstimate


def test_the_short_last_step_of_an_epoch_counts_as_one_at_the_initial_size() -> None:
    assert scale_of(5, 32) == 1.0
    assert scale_of(48, 32) == 1.5


def test_sgd_follows_the_gain_and_adam_the_square_root_of_the_scale() -> None:
    assert scaling_rule("sgd")(3.0, 16.0) == 3.0
    assert scaling_rule("adam")(3.0, 16.0) == 4.0
    assert scaling_rule("adamw")(3.0, 16.0) == 4.0


def test_remembered_squares_follow_the_noise_of_the_scale() -> None:
    known = GradientStatistics(sqr=1.0, var=4.0)
    assert second_moment_ratio(known, 1.0, 4.0) == pytest.approx((1.0 + 1.0) / (1.0 + 4.0))
    assert second_moment_ratio(known, 4.0, 1.0) == pytest.approx(5.0 / 2.0)
    assert second_moment_ratio(GradientStatistics(sqr=1.0, var=0.0), 1.0, 16.0) == 1.0


@pytest.mark.parametrize("sqr", [0.0, math.nan, math.inf])
def test_statistics_that_say_nothing_leave_remembered_squares_alone(sqr: float) -> None:
    assert second_moment_ratio(GradientStatistics(sqr=sqr, var=0.0), 1.0, 16.0) == 1.0


KNOWN = GradientStatistics(sqr=1.0, var=4.0)


def averaged(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    """A copy of the optimizer's state, by parameter."""
    return [{name: value.clone() for name, value in kept.items()} for kept in optimizer.state.values()]


def corrected(kept: dict[str, torch.Tensor], name: str, beta: float) -> torch.Tensor:
    """An average as Adam uses it, without the bias towards zero."""
    return kept[name] / (1.0 - beta ** float(kept["step"]))


def adam_after(steps: int, amsgrad: bool = False) -> torch.optim.Adam:
    """An optimizer that has averaged `steps` different gradients of a vector and a matrix."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    adam = torch.optim.Adam(parameters, amsgrad=amsgrad)
    for number in range(steps):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1.0 / (number + 1))
        adam.step()
    return adam


@pytest.mark.parametrize("known", [KNOWN, None])
@pytest.mark.parametrize(("former", "scale"), [(1.0, 16.0), (16.0, 1.0), (3.0, 4.5)])
def test_rescaled_averages_cover_the_same_number_of_examples(
    known: GradientStatistics | None, former: float, scale: float
) -> None:
    adam = adam_after(10, amsgrad=True)
    squares = second_moment_ratio(known, former, scale) if known else 1.0
    old = averaged(adam)
    rescale_averages(adam, known, former, scale, rate_ratio=0.5)
    for before, after in zip(old, averaged(adam), strict=True):
        assert after["step"].item() == pytest.approx(10.0 * former / scale)
        for name, beta, factor in (
            ("exp_avg", 0.9, math.sqrt(squares) * 0.5),
            ("exp_avg_sq", 0.999, squares),
            ("max_exp_avg_sq", 0.999, squares),
        ):
            torch.testing.assert_close(corrected(after, name, beta), corrected(before, name, beta) * factor)
        assert {name: (value.dtype, value.shape) for name, value in after.items()} == {
            name: (value.dtype, value.shape) for name, value in before.items()
        }, "checkpoints hold what torch made"


@pytest.mark.parametrize("known", [KNOWN, None])
def test_the_move_by_the_average_gradient_is_unchanged_by_the_rate(
    known: GradientStatistics | None,
) -> None:
    adam = adam_after(10)

    def move(rate: float) -> torch.Tensor:
        kept = averaged(adam)[0]
        means, squares = corrected(kept, "exp_avg", 0.9), corrected(kept, "exp_avg_sq", 0.999)
        return rate * means / squares.sqrt()

    rate = scaling_rule("adam")
    before = move(rate(1.0, 2.0))
    rescale_averages(adam, known, 2.0, 16.0, rate_ratio=rate(1.0, 2.0) / rate(1.0, 16.0))
    torch.testing.assert_close(move(rate(1.0, 16.0)), before)


def test_a_change_and_back_again_changes_nothing() -> None:
    adam = adam_after(10)
    before = averaged(adam)
    rescale_averages(adam, KNOWN, 16.0, 1.5, rate_ratio=3.0)
    rescale_averages(adam, KNOWN, 1.5, 16.0, rate_ratio=1 / 3.0)
    torch.testing.assert_close(averaged(adam), before)


def test_a_short_step_between_larger_ones_weighs_as_little_as_it_is_short() -> None:
    """As at the end of every epoch; its square of 0 takes 1.5 of 10 x 16 + 1.5 parts from the average."""
    adam = adam_after(10)
    (before, _) = averaged(adam)
    rescale_averages(adam, KNOWN, 16.0, 1.5, rate_ratio=3.0)
    for parameter in adam.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    rescale_averages(adam, KNOWN, 1.5, 16.0, rate_ratio=1 / 3.0)
    (after, _) = averaged(adam)
    assert after["step"].item() == pytest.approx(10.0 + 1.5 / 16.0)
    left = corrected(after, "exp_avg_sq", 0.999) / corrected(before, "exp_avg_sq", 0.999)
    assert left.numpy() == pytest.approx(1.0 - 1.5 / 161.5, abs=1e-3)


def test_after_growth_a_new_square_weighs_as_many_steps_as_it_is_worth() -> None:
    """Ten steps with a square of 1, and one at scale 10 with a square of 0, have as many examples."""
    weight = nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([weight])
    for gradient in [1.0] * 10 + [0.0]:
        if not gradient:
            rescale_averages(adam, None, 1.0, 10.0, rate_ratio=1.0)
        weight.grad = torch.full_like(weight, gradient)
        adam.step()
    assert corrected(averaged(adam)[0], "exp_avg_sq", 0.999).numpy() == pytest.approx(0.5, rel=1e-2)


def test_no_averages_of_squares_are_rescaled_where_there_are_none() -> None:
    weight = nn.Parameter(torch.ones(3))
    fresh = torch.optim.Adam([weight])
    rescale_averages(fresh, KNOWN, 1.0, 16.0, rate_ratio=0.25)
    assert not fresh.state
    momentum = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    momentum.step()
    before = averaged(momentum)
    rescale_averages(momentum, KNOWN, 1.0, 16.0, rate_ratio=0.25)
    torch.testing.assert_close(averaged(momentum), before, rtol=0.0, atol=0.0)


def test_an_optimizer_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(UnknownOptimizer, match=r"'lion'.*adam, adamw, sgd"):
        scaling_rule("lion")


@pytest.mark.parametrize("scale", [0.5, 0.0, -1.0, math.nan, math.inf])
def test_a_scale_below_one_is_refused_wherever_one_is_given(scale: float) -> None:
    estimator = GradientNoiseScale(16)
    for use in (
        lambda: check_scale(scale),
        lambda: scaling_rule("sgd")(1.0, scale),
        lambda: scaling_rule("adam")(1.0, scale),
        lambda: estimator.gain(scale),
        lambda: estimator.update(StepEstimate(1.0, 1.0, noisy=True), scale),
    ):
        with pytest.raises(ValueError, match=f"scale {scale:g}: allowed: finite, at least 1"):
            use()
    assert estimator.statistics() is None
