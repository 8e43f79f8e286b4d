import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.trainer.adascale import UnknownOptimizer, gain, scale_of, scaling_rule

positive = st.floats(1e-12, 1e12)


def test_the_gain_is_that_of_the_paper() -> None:
    assert gain(sqr=2.0, var=6.0, scale=4.0) == pytest.approx((6.0 + 2.0) / (6.0 / 4.0 + 2.0))


@given(sqr=positive, var=positive, scale=st.floats(1.0, 1e6))
def test_the_gain_lies_between_one_and_the_scale(sqr: float, var: float, scale: float) -> None:
    assert 1.0 <= gain(sqr, var, scale) <= scale


@given(sqr=positive, var=positive)
def test_one_batch_of_the_initial_size_is_one_step(sqr: float, var: float) -> None:
    assert gain(sqr, var, 1.0) == 1.0


def test_pure_noise_gains_the_scale_and_no_noise_gains_nothing() -> None:
    assert gain(sqr=0.0, var=1.0, scale=8.0) == 8.0
    assert gain(sqr=1.0, var=0.0, scale=8.0) == 1.0


@pytest.mark.parametrize("sqr", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("var", [math.nan, math.inf, -1.0, 0.0, 1.0])
def test_impossible_statistics_gain_nothing(sqr: float, var: float) -> None:
    assert gain(sqr, var, 16.0) == 1.0


@pytest.mark.parametrize("scale", [0.99, 0.0, -1.0, math.nan])
def test_a_scale_below_one_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        gain(1.0, 1.0, scale)


def test_the_short_last_step_of_an_epoch_counts_as_one_at_the_initial_size() -> None:
    assert scale_of(5, 32) == 1.0
    assert scale_of(48, 32) == 1.5


def test_sgd_follows_the_gain_and_adam_the_square_root_of_the_scale() -> None:
    assert scaling_rule("sgd")(3.0, 16.0) == 3.0
    assert scaling_rule("adam")(3.0, 16.0) == 4.0
    assert scaling_rule("adamw")(3.0, 16.0) == 4.0


def test_an_optimizer_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(UnknownOptimizer, match=r"'lion'.*adam, adamw, sgd"):
        scaling_rule("lion")
