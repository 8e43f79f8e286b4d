import math

import polars as pl
import pytest
from msgspec import structs

from analysis.compare.comparison import JCT, Comparison, Contrast, compare
from analysis.compare.intervals import Bounds
from analysis.compare.pairing import LeftOut
from tests.fixtures.runs import compared_run, two_pairs_with_one_rho


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Ratios of pollux to fixed: 1/2, 1/2, 1/2 on burst; 2, 2, 1 on tail."""
    return compare(
        [
            *(compared_run("burst", "fixed", seed, 20, 40) for seed in (1, 2, 3)),
            *(compared_run("burst", "pollux", seed, 10, 20, rescales=2) for seed in (1, 2, 3)),
            *(compared_run("tail", "fixed", seed, 10) for seed in (1, 2, 3)),
            *(compared_run("tail", "pollux", seed, jct_s) for seed, jct_s in ((1, 20), (2, 20), (3, 10))),
        ]
    )


@pytest.fixture
def contrast(comparison: Comparison) -> Contrast:
    found = comparison.contrast("pollux", "fixed")
    assert found is not None
    return found


def test_a_ratio_is_the_geometric_mean_over_the_pairs(contrast: Contrast) -> None:
    effect = contrast.overall["mean_jct_ratio"]
    assert effect.value == pytest.approx((0.5**3 * 2 * 2 * 1) ** (1 / 6))
    assert (effect.pairs, effect.better) == (6, 3)
    assert contrast.by_set["burst"]["mean_jct_ratio"].value == pytest.approx(0.5)


def test_a_set_of_three_seeds_has_a_range_and_all_six_pairs_have_an_interval(contrast: Contrast) -> None:
    assert contrast.by_set["tail"]["mean_jct_ratio"].bounds == Bounds(
        pytest.approx(1.0), pytest.approx(2.0), "range"
    )
    bounds = contrast.overall["mean_jct_ratio"].bounds
    assert bounds is not None
    assert bounds.kind == "interval"
    assert 0.5 < bounds.low < 0.89 < bounds.high < 2


def test_a_measure_that_can_be_0_is_compared_by_its_mean_difference(contrast: Contrast) -> None:
    # On burst, rho is 1 and 2 with fixed, at most 1 with pollux; each of the two jobs has two rescales.
    assert contrast.by_set["burst"]["unfair_fraction_difference"].value == pytest.approx(-0.5)
    assert contrast.by_set["burst"]["rescales_difference"].value == pytest.approx(4.0)
    assert contrast.overall["rescales_difference"].value == pytest.approx(2.0)


def test_more_goodput_is_better(contrast: Contrast) -> None:
    goodput = contrast.by_set["burst"]["goodput_ratio"]
    assert (goodput.value, goodput.better) == (pytest.approx(2.0), 3)


def test_the_inverse_contrast_has_inverse_ratios(comparison: Comparison, contrast: Contrast) -> None:
    inverse = comparison.contrast("fixed", "pollux")
    assert inverse is not None
    effect, back = contrast.overall["mean_jct_ratio"], inverse.overall["mean_jct_ratio"]
    assert effect.value is not None
    assert effect.bounds is not None
    assert back.bounds is not None
    assert back.value == pytest.approx(1 / effect.value)
    assert back.bounds.low == pytest.approx(1 / effect.bounds.high, rel=0.03)
    assert [shown.name for shown in comparison.shown()] == ["pollux/fixed"]


def test_means_are_over_the_runs_that_every_policy_has(comparison: Comparison) -> None:
    fixed = comparison.means["fixed"]
    assert fixed["runs"] == 6
    assert fixed["mean_jct"] == pytest.approx((3 * 30 + 3 * 10) / 6)
    assert fixed["worst_rho"] == pytest.approx(2.0), "the worst of all runs, not a mean"


def test_a_pair_knows_its_two_runs_and_its_change(comparison: Comparison, contrast: Contrast) -> None:
    pairs = comparison.pairs_of(contrast).filter(pl.col("set") == "tail")
    assert pairs["run"].to_list() == ["tail-pollux-1", "tail-pollux-2", "tail-pollux-3"]
    assert pairs["run_baseline"].to_list() == ["tail-fixed-1", "tail-fixed-2", "tail-fixed-3"]
    assert pairs["change"].to_list() == pytest.approx([math.log(2), math.log(2), 0.0])


def test_step_times_are_compared_where_both_runs_have_one() -> None:
    step_times = {("fixed", 1): 1.0, ("pollux", 1): 1.2, ("fixed", 2): 1.1, ("pollux", 2): 1.1}
    timed = [
        structs.replace(compared_run("burst", policy, seed, 20), step_time=step_time)
        for (policy, seed), step_time in step_times.items()
    ]
    untimed = [compared_run("burst", policy, 3, 20) for policy in ("fixed", "pollux")]
    comparison = compare([*timed, *untimed])
    contrast = comparison.contrast("pollux", "fixed")
    assert contrast is not None
    ratio = contrast.overall["step_time_ratio"]
    assert (ratio.value, ratio.pairs) == (pytest.approx(math.sqrt(1.2)), 2)
    at_equal_steps = contrast.overall["mean_jct_at_equal_steps_ratio"]
    assert (at_equal_steps.value, at_equal_steps.pairs) == (pytest.approx(1 / math.sqrt(1.2)), 2)
    assert comparison.means["pollux"]["step_time"] is None, "one run has none"
    assert compare(timed).means["pollux"]["step_time"] == pytest.approx(1.15)


def test_a_single_pair_has_a_ratio_without_bounds() -> None:
    contrast = compare([compared_run("tail", "fixed", 1, 10), compared_run("tail", "pollux", 1, 5)]).shown()[
        0
    ]
    effect = contrast.overall["mean_jct_ratio"]
    assert (effect.value, effect.bounds) == (pytest.approx(0.5), None)
    assert effect.outcome(JCT) == "inconclusive"


def test_a_run_without_a_partner_is_left_out_of_pairs_and_means() -> None:
    runs = [compared_run("tail", "fixed", 1, 10)]
    runs += [compared_run("tail", "pollux", seed, 5) for seed in (1, 2)]
    comparison = compare(runs)
    assert [entry.run for entry in comparison.left_out] == ["tail-fixed-2"]
    assert comparison.shown()[0].pairs == 1
    assert [run.name for run in comparison.common] == ["tail-fixed-1", "tail-pollux-1"]


def test_runs_of_other_jobs_and_what_was_left_out_before_are_listed_first() -> None:
    noisy = LeftOut(run="tail-fixed-9", why="noisy")
    runs = [
        compared_run("tail", "dynamic", 1, 10),
        compared_run("tail", "fixed", 1, 10, application="matfac"),
        compared_run("tail", "pollux", 1, 5),
    ]
    comparison = compare(runs, [noisy])
    assert [entry.run for entry in comparison.left_out] == ["tail-fixed-9", "tail-fixed-1"]
    assert comparison.policies == ("dynamic", "pollux")


def test_a_given_baseline_is_the_only_one() -> None:
    runs = [compared_run("tail", policy, 1, 10) for policy in ("fixed", "dynamic", "pollux")]
    comparison = compare(runs, baselines=["pollux"])
    assert [contrast.name for contrast in comparison.contrasts] == ["fixed/pollux", "dynamic/pollux"]
    assert comparison.shown() == list(comparison.contrasts)


def test_a_pair_without_the_measure_does_not_count_for_it() -> None:
    contrast = compare(two_pairs_with_one_rho()).shown()[0]
    assert contrast.overall["mean_jct_ratio"].pairs == 2
    assert contrast.overall["worst_rho_ratio"].pairs == 1


@pytest.mark.parametrize("step_time", [math.inf, math.nan])
def test_a_figure_that_is_not_finite_counts_as_missing(step_time: float) -> None:
    runs = [compared_run("tail", policy, 1, 10) for policy in ("fixed", "pollux")]
    runs = [structs.replace(run, step_time=step_time) for run in runs]
    comparison = compare(runs)
    assert comparison.shown()[0].overall["step_time_ratio"].pairs == 0
    assert comparison.means["fixed"]["step_time"] is None


def test_without_runs_there_is_nothing_to_compare() -> None:
    comparison = compare([])
    assert (comparison.policies, comparison.contrasts, comparison.means) == ((), (), {})
