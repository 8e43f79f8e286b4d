import math

import pytest

from common.types import GradientStatistics
from workloads.trainer.adascale import (
    UnknownOptimizer,
    check_scale,
    scale_of,
    scaling_rule,
    second_moment_ratio,
)
from workloads.trainer.noise_scale import GradientNoiseScale, StepEstimate


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
