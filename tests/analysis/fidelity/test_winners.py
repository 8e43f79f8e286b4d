import math

import polars as pl
import pytest

from analysis.fidelity.winners import Winner, scores, winner

SCHEMA = {
    "set": pl.String,
    "policy": pl.String,
    "seed": pl.Int64,
    "real": pl.Float64,
    "simulated": pl.Float64,
}


def times(**by_policy: list[tuple[float, float]]) -> pl.DataFrame:
    """By policy, the real and simulated times with seeds 1, 2, ..."""
    rows = [
        ("burst", policy, seed, *both_s)
        for policy, of_seeds in by_policy.items()
        for seed, both_s in enumerate(of_seeds, start=1)
    ]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def winner_of(**by_policy: list[tuple[float, float]]) -> Winner:
    found = winner(times(**by_policy))
    assert found is not None
    return found


def test_a_winner_on_both_sides_has_a_margin_over_the_second() -> None:
    found = winner_of(fixed=[(21.0, 21.0), (22.0, 21.0)], pollux=[(10.0, 11.0), (10.0, 11.0)])
    assert (found.real, found.simulated, found.agree, found.apart) == ("pollux", "pollux", True, 0.0)
    assert (found.runner_up, found.margin) == ("fixed", pytest.approx(math.sqrt(2.1 * 2.2)))
    assert found.could_be_noise is None, "both sides name the same policy"


def test_different_winners_are_apart_by_the_real_ratio() -> None:
    found = winner_of(fixed=[(10.0, 12.0), (10.0, 12.0)], pollux=[(8.0, 11.0), (16.0, 11.0)])
    assert (found.real, found.simulated, found.agree) == ("fixed", "pollux", False)
    assert found.apart == pytest.approx(math.sqrt(0.8 * 1.6) - 1)
    assert (found.seeds, found.seeds_for_real) == (2, 1)


def test_fewer_than_five_seeds_give_a_range_and_leave_reality_inconclusive() -> None:
    found = winner_of(fixed=[(20.0, 20.0)] * 4, pollux=[(10.0, 30.0)] * 3 + [(12.0, 30.0)])
    assert (found.margin_bounds, found.margin_low) == ("range", pytest.approx(20 / 12))
    assert found.margin_high == pytest.approx(2.0)
    assert (found.margin_noise, found.could_be_noise) == (True, True)


def test_five_seeds_on_one_side_are_conclusive() -> None:
    seeds = range(5)
    found = winner_of(
        fixed=[(20.0 + seed, 10.0) for seed in seeds], pollux=[(10.0 + seed, 30.0) for seed in seeds]
    )
    assert found.margin_bounds == "interval"
    assert found.margin_low is not None
    assert found.margin_low > 1
    assert (found.margin_noise, found.could_be_noise) == (False, False)


def test_an_interval_that_contains_1_is_inconclusive() -> None:
    factors = (0.8, 0.9, 1.1, 1.2, 1.3)
    found = winner_of(fixed=[(10.0, 10.0)] * 5, pollux=[(10.0 * factor, 10.0) for factor in factors])
    assert found.margin_bounds == "interval"
    assert found.margin_noise


def test_one_seed_has_no_bounds() -> None:
    found = winner_of(fixed=[(9.0, 9.0)], pollux=[(10.0, 10.0)])
    assert (found.margin, found.margin_low, found.margin_high, found.margin_bounds) == (
        pytest.approx(10 / 9),
        None,
        None,
        None,
    )
    assert found.margin_noise


def test_only_seeds_that_every_policy_has_count() -> None:
    """Over all its runs pollux has the smaller mean, because it lacks the hard seed 2."""
    found = winner_of(fixed=[(9.0, 9.0), (90.0, 90.0)], pollux=[(10.0, 10.0)])
    assert (found.real, found.simulated, found.seeds) == ("fixed", "fixed", 1)
    without_common_seed = times(fixed=[(9.0, 9.0), (90.0, 90.0)], pollux=[(10.0, 10.0)]).filter(
        (pl.col("policy") == "pollux") | (pl.col("seed") == 2)
    )
    assert winner(without_common_seed) is None
    assert scores(without_common_seed) == {}


def test_every_seed_counts_the_same_however_long_it_lasts() -> None:
    found = winner_of(
        fixed=[(10.0, 10.0), (10.0, 10.0), (100.0, 100.0)], pollux=[(5.0, 5.0), (5.0, 5.0), (120.0, 120.0)]
    )
    assert found.real == "pollux", "although its arithmetic mean is larger"


def test_a_single_policy_wins_nothing() -> None:
    assert winner(times(fixed=[(10.0, 10.0)])) is None
