import pytest
from msgspec import structs

from analysis.fidelity.agreement import compare_pairs
from analysis.run.step_times import StepTime
from common.types import JobConfig
from tests.fixtures.fidelity_pairs import pair


def test_errors_are_of_means_over_runs_by_policy_and_set():
    found = compare_pairs(
        [
            pair("steady", "fixed", 1, [10.0, 30.0], [11.0, 33.0]),
            pair("burst", "fixed", 1, [40.0], [36.0]),
            pair("steady", "pollux", 1, [10.0, 10.0], [10.0, 12.0]),
        ]
    )
    assert found.mean_jct_error == {"fixed": pytest.approx(58 / 60 - 1), "pollux": pytest.approx(0.1)}
    assert found.mean_jct_error_by_set == {
        "burst": pytest.approx(-0.1),
        "steady": pytest.approx((22 + 11) / 30 - 1),
    }
    assert found.mean_jct_error_by_set_and_policy == {
        "burst": {"fixed": pytest.approx(-0.1)},
        "steady": {"fixed": pytest.approx(0.1), "pollux": pytest.approx(0.1)},
    }
    assert found.job_jct_error == {
        "overall": pytest.approx((0.1 + 0.1 + 0.1 + 0.0 + 0.2) / 5),
        "fixed": pytest.approx(0.1),
        "pollux": pytest.approx(0.1),
    }
    assert (found.runs, found.jobs) == (3, 5)
    assert found.parts["fixed"]["queue_s"].simulated == 2.0
    assert found.applications["matfac"]["jct_s"].real == 20.0


def test_ranks_are_correlated_within_runs_and_over_all_jobs():
    found = compare_pairs(
        [
            pair("steady", "fixed", 1, [10.0, 20.0, 30.0], [1.0, 2.0, 3.0]),
            pair("steady", "fixed", 2, [10.0, 20.0, 30.0], [2.0, 1.0, 3.0]),
            pair("steady", "fixed", 3, [10.0, 10.0], [2.0, 1.0]),
            pair("steady", "fixed", 4, [10.0], [2.0]),
        ]
    )
    correlations = [run.rank_correlation for run in found.per_run]
    assert correlations == [pytest.approx(1.0), pytest.approx(0.5), None, None]
    assert found.rank_correlation.within_mean == pytest.approx(0.75)
    assert found.rank_correlation.within_least == pytest.approx(0.5)
    assert found.rank_correlation.overall is not None


def test_winners_and_the_order_of_policies_are_compared_set_by_set():
    found = compare_pairs(
        [
            *(pair("steady", "fixed", seed, [20.0 + seed], [21.0]) for seed in (1, 2)),
            *(pair("steady", "pollux", seed, [10.0], [11.0]) for seed in (1, 2)),
            *(pair("burst", "fixed", seed, [10.0], [12.0]) for seed in (1, 2)),
            *(pair("burst", "pollux", seed, [seed * 8.0], [11.0]) for seed in (1, 2)),
        ]
    )
    assert list(found.winners) == ["burst", "steady"]
    assert (found.sets_agreeing, found.sets_differing_within_noise) == (1, 1)
    assert found.policy_order == {
        "overall": pytest.approx(1.0),
        "burst": pytest.approx(-1.0),
        "steady": pytest.approx(1.0),
    }


def test_a_set_whose_policies_share_no_seed_has_no_winner_and_says_so():
    found = compare_pairs(
        [pair("steady", "fixed", 2, [90.0], [90.0]), pair("steady", "pollux", 1, [10.0], [10.0])]
    )
    assert found.winners == {}
    assert [(entry.run, entry.why) for entry in found.left_out] == [
        ("steady", "it has no winner: its policies have no seed in common")
    ]


def test_ratios_of_policies_are_taken_pair_by_pair():
    found = compare_pairs(
        [
            pair("steady", "fixed", 1, [10.0], [10.0]),
            pair("steady", "fixed", 2, [90.0], [10.0]),
            pair("steady", "pollux", 1, [5.0], [8.0]),
            pair("burst", "pollux", 1, [5.0], [8.0]),
        ]
    )
    assert list(found.ratios) == ["pollux/fixed"]
    ratio = found.ratios["pollux/fixed"]
    assert (ratio.real, ratio.simulated) == pytest.approx((0.5, 0.8))


def test_batches_are_compared_over_the_runs_that_have_the_figure_on_both_sides():
    known = structs.replace(
        pair("steady", "fixed", 1, [10.0], [10.0]), real_batches=0.8, simulated_batches=0.9
    )
    half_known = structs.replace(pair("steady", "fixed", 2, [10.0], [10.0]), real_batches=0.2)
    found = compare_pairs([known, half_known, pair("steady", "pollux", 1, [10.0], [10.0])])
    assert list(found.batch_efficiency) == ["fixed"]
    assert (found.batch_efficiency["fixed"].real, found.batch_efficiency["fixed"].simulated) == (0.8, 0.9)


def test_a_figure_that_one_side_lacks_does_not_count():
    run = pair("steady", "fixed", 1, [10.0, 10.0], [10.0, 10.0])
    unknown = structs.replace(run.simulated["j0"], batch=None)
    found = compare_pairs([structs.replace(run, simulated={**run.simulated, "j0": unknown})])
    assert found.applications["matfac"]["batch"].real == 64.0
    assert found.applications["matfac"]["jct_s"].real == 10.0


def test_step_times_are_compared_in_the_configurations_that_both_sides_had():
    def steps(*rows: tuple[int, float, float]) -> tuple[StepTime, ...]:
        return tuple(
            StepTime("matfac", (replicas,), JobConfig(64), step_s, weight_s)
            for replicas, step_s, weight_s in rows
        )

    run = structs.replace(
        pair("steady", "fixed", 1, [10.0], [10.0]),
        real_steps=steps((1, 0.1, 30.0), (2, 0.2, 10.0)),
        simulated_steps=steps((1, 0.2, 5.0), (4, 9.0, 1.0)),
    )
    other = structs.replace(run, run="other", real_steps=steps((1, 0.3, 10.0)), simulated_steps=())
    found = compare_pairs([run, other]).applications["matfac"]["step_s"]
    assert (found.real, found.simulated, found.error) == pytest.approx((0.12, 0.2, 2 / 3))
