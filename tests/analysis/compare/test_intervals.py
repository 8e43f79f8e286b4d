import numpy as np
import pytest

from analysis.compare.intervals import interval, interval_by_group


def test_of_a_single_value_there_is_no_interval() -> None:
    assert interval([1.0]) is None
    assert interval([]) is None


def test_of_few_values_the_interval_is_their_whole_range() -> None:
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval([2.0, 2.0, 2.0, 2.0]) == (2.0, 2.0)
    assert interval([5.0, 1.0, 2.0, 2.0, 2.0]) == (1.0, 5.0)


def test_it_depends_on_nothing_but_the_values() -> None:
    values = [0.3, -1.0, 2.5, 0.1, 0.7, 1.1, -0.4]
    assert interval(values) == interval(values[::-1])


def test_it_holds_the_mean_about_as_often_as_it_says() -> None:
    draws = np.random.default_rng(3).normal(size=(120, 8)).tolist()
    held = [found.low <= 0 <= found.high for values in draws if (found := interval(values))]
    assert np.mean(held) >= 0.9


def test_for_many_values_it_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(5).normal(size=200)
    found = interval(values.tolist())
    half = 1.97 * values.std(ddof=1) / np.sqrt(200)
    assert found == pytest.approx((values.mean() - half, values.mean() + half), abs=0.03)


def test_groups_that_differ_widen_the_interval_and_a_single_one_has_none() -> None:
    near, far = [0.0, 0.1, 0.2], [1.0, 1.1, 1.2]
    pooled, found = interval([*near, *far]), interval_by_group([near, far])
    assert pooled is not None
    assert found is not None
    assert found.low < pooled.low < pooled.high < found.high
    assert found == interval_by_group([near, far])
    assert interval_by_group([near]) is None
    assert interval_by_group([]) is None


def test_by_group_it_holds_the_mean_of_many_groups_about_as_often_as_it_says() -> None:
    chance = np.random.default_rng(7)
    held = []
    for _ in range(100):
        groups = (chance.normal(size=(4, 1)) + chance.normal(scale=0.5, size=(4, 3))).tolist()
        found = interval_by_group(groups)
        assert found is not None
        held.append(found.low <= 0 <= found.high)
    assert np.mean(held) >= 0.85
