import numpy as np
import pytest

from analysis.compare.intervals import Bounds, bounds_of_mean, outcome


def test_fewer_than_two_values_have_no_bounds() -> None:
    assert bounds_of_mean([]) is None
    assert bounds_of_mean([[1.0]]) is None


@pytest.mark.parametrize("strata", [[[3.0, 1.0, 2.0]], [[3.0], [1.0, 2.0]], [[1.0, 2.0], [2.5, 3.0]]])
def test_fewer_than_five_values_give_a_range(strata: list[list[float]]) -> None:
    assert bounds_of_mean(strata) == Bounds(1.0, 3.0, "range")


def test_five_values_give_an_interval() -> None:
    found = bounds_of_mean([[5.0, 1.0, 2.0, 2.0, 2.0]])
    assert found is not None
    assert found.kind == "interval"
    assert found.low < 2.4 < found.high


def test_bounds_depend_on_nothing_but_the_values_and_their_strata() -> None:
    strata = [[0.3, -1.0, 2.5], [0.1, 0.7, 1.1, -0.4], [0.2]]
    assert bounds_of_mean(strata) == bounds_of_mean([stratum[::-1] for stratum in strata[::-1]])


@pytest.mark.parametrize(
    ("sizes", "at_least"),
    [((5,), 0.9), ((8,), 0.9), ((3, 3, 3, 3), 0.92), ((6, 1), 0.9), ((4, 1, 1, 1), 0.9), ((2, 2, 2), 0.8)],
)
def test_an_interval_holds_the_mean_about_as_often_as_it_says(
    sizes: tuple[int, ...], at_least: float
) -> None:
    """Sets differ from one another, except those of a single value, which share a stratum."""
    chance = np.random.default_rng(3)
    centers = chance.normal(size=len(sizes)) if min(sizes) > 1 else np.zeros(len(sizes))
    mean = np.average(centers, weights=sizes)
    held = []
    for _ in range(200):
        strata = [chance.normal(center, 1.0, n).tolist() for center, n in zip(centers, sizes, strict=True)]
        found = bounds_of_mean(strata)
        assert found is not None
        held.append(found.low <= mean <= found.high)
    assert np.mean(held) >= at_least


def test_an_interval_of_many_values_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(5).normal(size=200)
    half = 1.97 * values.std(ddof=1) / np.sqrt(200)
    found = bounds_of_mean([values.tolist()])
    assert found is not None
    assert found[:2] == pytest.approx((values.mean() - half, values.mean() + half), abs=0.03)


def test_differences_between_sets_do_not_widen_the_interval() -> None:
    near, far = [0.0, 0.1, 0.2], [1.0, 1.1, 1.2]
    stratified, pooled = bounds_of_mean([near, far]), bounds_of_mean([[*near, *far]])
    assert stratified is not None
    assert pooled is not None
    assert pooled.low < stratified.low < 0.6 < stratified.high < pooled.high


def test_equal_values_give_an_interval_without_width() -> None:
    assert bounds_of_mean([[2.0] * 5]) == Bounds(2.0, 2.0, "interval")


@pytest.mark.parametrize(
    ("bounds", "less_is_better", "expected"),
    [
        (Bounds(0.5, 0.9, "interval"), True, "better"),
        (Bounds(0.5, 0.9, "interval"), False, "worse"),
        (Bounds(1.1, 1.2, "interval"), True, "worse"),
        (Bounds(1.1, 1.2, "interval"), False, "better"),
        (Bounds(0.9, 1.0, "interval"), True, "inconclusive"),
        (Bounds(0.5, 0.9, "range"), True, "inconclusive"),
        (None, True, "inconclusive"),
    ],
)
def test_only_an_interval_on_one_side_decides(
    bounds: Bounds | None, less_is_better: bool, expected: str
) -> None:
    assert outcome(bounds, neutral=1.0, less_is_better=less_is_better) == expected
