import pytest

from workloads.trainer.adascale import UnknownOptimizer, scale_of, scaling_rule


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
