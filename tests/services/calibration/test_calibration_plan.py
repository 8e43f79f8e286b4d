"""The plan of a calibration, and how it condenses measurements."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from common.protocol import TrainingSample
from common.types import JobConfig
from services.calibration.calibration_plan import (
    Curve,
    MeasuredPlacement,
    batch_configs,
    cost_table,
    easiest_target,
    grid_point,
    hardest_target,
    is_small,
    merge_curves,
    placements,
    times_by_batch,
    total_batch_sizes,
    unmeasurable,
)
from tests.fixtures.logs import sample as logged_sample
from tests.fixtures.measurements import curve_row
from workloads.applications import applications

DIGITS = applications()["digits-cnn"]
CHAR_LM = applications()["char-lm"]


# --------------------------------------------------------------------------- the grid


def test_every_small_placement_and_one_of_each_larger_size_is_measured():
    rows = placements(2, 4)
    small = {row for row in rows if sum(row) <= 4}
    assert small == {(1,), (2,), (3,), (4,), (1, 1), (2, 1), (2, 2), (3, 1)}
    assert [row for row in rows if sum(row) > 4] == [(4, 4), (4, 3), (3, 3), (3, 2)]


def test_a_job_grows_and_then_shrinks_over_two_nodes():
    sizes = [sum(row) for row in placements(2, 4)]
    assert sizes == sorted(sizes[:4]) + sorted(sizes[4:], reverse=True)
    assert placements(1, 2) == [(1,), (2,)]


def test_there_is_always_a_larger_group_for_a_table_of_its_own():
    assert [(row, is_small(row, 1)) for row in placements(2, 1)] == [((1,), True), ((1, 1), False)]


@pytest.mark.parametrize("spec", applications().values(), ids=applications())
def test_local_batches_range_from_the_smallest_to_the_largest_within_the_bounds(spec):
    for replicas in range(1, 9):
        found = batch_configs(spec, replicas)
        sizes = sorted({config.atomic_batch for config in found})
        whole = spec.initial_batch_size / (2 if replicas == 1 else replicas)
        assert sizes[0] - 1 < max(spec.min_atomic_batch, whole) <= sizes[0]
        assert sizes[-1] == min(spec.max_atomic_batch, spec.max_batch_size // replicas)
        assert all(later <= 2 * former for former, later in pairwise(sizes))
        for config in found:
            assert spec.initial_batch_size <= config.total_batch(replicas) <= spec.max_batch_size


def test_the_grid_includes_the_accumulation_that_jobs_use():
    alone = [(config.atomic_batch, config.accumulation) for config in batch_configs(DIGITS, 1)]
    assert alone == [(8, 1), (16, 0), (16, 1), (32, 0), (32, 1), (64, 0), (64, 1)]
    assert [config.atomic_batch for config in batch_configs(DIGITS, 2)] == [8, 16, 32, 64]
    accumulated = [config.atomic_batch for config in batch_configs(CHAR_LM, 2) if config.accumulation]
    assert accumulated == [CHAR_LM.max_atomic_batch]


def test_a_group_without_a_valid_batch_is_not_measured():
    assert batch_configs(replace(DIGITS, min_atomic_batch=64), 4) == []
    assert batch_configs(replace(DIGITS, max_atomic_batch=4), 1) == []


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ({}, ""),
        ({"min_atomic_batch": 32}, "no group of more than 4 replicas, which have a table of their own, can"),
        ({"max_atomic_batch": 3}, "no group of at most 4 replicas can have a batch"),
        ({"min_atomic_batch": 200}, "no group of at most 4 replicas can have a batch"),
    ],
)
def test_an_application_without_a_complete_profile_is_found_before_it_is_measured(bounds, reason):
    assert unmeasurable(replace(DIGITS, **bounds), 2, 4).startswith(reason)
    assert bool(unmeasurable(replace(DIGITS, **bounds), 2, 4)) == bool(reason)


def test_total_batches_double_up_to_the_largest():
    assert total_batch_sizes(DIGITS) == [16, 32, 64, 128]
    assert total_batch_sizes(replace(DIGITS, max_batch_size=100)) == [16, 32, 64, 96]
    assert total_batch_sizes(replace(DIGITS, max_batch_size=16)) == [16]


def test_the_hardest_target_depends_on_the_direction_of_the_metric():
    assert (easiest_target(DIGITS), hardest_target(DIGITS)) == (0.5, 0.975)
    assert (easiest_target(CHAR_LM), hardest_target(CHAR_LM)) == (5.0, 2.5)


# --------------------------------------------------------------------------- points


def sample(step_s: float, steps: int = 10, window_s: float = 0.5, accumulation: int = 0) -> TrainingSample:
    config = JobConfig(atomic_batch=16, accumulation=accumulation)
    counts = {"steps": steps, "timed_steps": steps, "total_steps": 0, "total_examples": 0, "progress": 0.0}
    times_s = {"accumulation_s": 0.03, "step_s": step_s, "sync_s": 0.01}
    return logged_sample("a", 1, window_s, replicas=2, config=config, **counts, **times_s)


def test_a_point_has_the_medians_of_its_samples():
    config = JobConfig(atomic_batch=16)
    found = grid_point(config, [(sample(s), 0) for s in (0.04, 0.05, 0.09)])
    assert (found.atomic, found.step_s, found.sync_s, found.steps) == (16, 0.05, 0.01, 30)
    assert (found.pass_s, found.accumulated) == (0.03, False)
    accumulated = JobConfig(atomic_batch=16, accumulation=1)
    assert grid_point(accumulated, [(sample(0.05, accumulation=1), 0)]).accumulated


def test_times_come_from_accumulating_steps_only_without_others():
    plain = grid_point(JobConfig(atomic_batch=16), [(sample(0.05), 0)])
    accumulated = grid_point(JobConfig(atomic_batch=16, accumulation=1), [(sample(0.08, accumulation=1), 0)])
    assert times_by_batch(MeasuredPlacement(points=(plain, accumulated))) == {16: (0.05, 0.01, 0.03)}
    assert times_by_batch(MeasuredPlacement(points=(accumulated, plain))) == {16: (0.05, 0.01, 0.03)}
    assert times_by_batch(MeasuredPlacement(points=(accumulated,))) == {16: (0.08, 0.01, 0.03)}


def test_windows_with_warm_up_steps_do_not_count_for_the_overhead():
    cold = replace(sample(0.05, window_s=9.0), timed_steps=7)
    found = grid_point(JobConfig(atomic_batch=16), [(cold, 0), (sample(0.04, window_s=0.44), 0)])
    assert (found.quiet_s, found.quiet_steps_s) == (0.44, pytest.approx(0.4))
    assert found.step_s == pytest.approx(0.045)


def test_overhead_and_evaluations_are_separated():
    config = JobConfig(atomic_batch=16)
    seen = grid_point(config, [(sample(0.05, window_s=0.55), 0), (sample(0.05, window_s=0.95), 2)])
    table = cost_table(
        {(1,): MeasuredPlacement(points=(seen,)), (2,): MeasuredPlacement(points=(seen,), resize_s=0.2)}, []
    )
    assert table["step_overhead"] == pytest.approx(1.1)
    # 0.4 s for two evaluations, by one replica and by two that share the work
    assert table["evaluation_slot_s"] == pytest.approx(0.2)
    assert table["evaluation_group_s"] == pytest.approx(0.2 - 0.2 / 2)
    assert table["resize_s"] == 0.2
    assert "start_s" not in table


# --------------------------------------------------------------------------- trainings


def test_the_first_row_that_meets_a_target_is_the_median_need():
    courses = ([0.1, 0.9, 0.9], [0.1, 0.2, 0.9], [0.9, 0.3, 0.3])
    curves = [Curve(rows=tuple(curve_row(n + 1, m) for n, m in enumerate(c)), reached=False) for c in courses]
    merged = merge_curves(curves, "max")
    assert [r.metric for r in merged] == [0.1, 0.9, 0.9]
    assert [r.progress for r in merged] == [25.0, 50.0, 75.0]
    assert [r.metric for r in merge_curves(curves, "min")] == [0.1, 0.1, 0.1]


def test_a_training_that_met_the_hardest_target_keeps_its_metric():
    short = Curve(rows=(curve_row(1, 0.99),), reached=True)
    long = Curve(rows=(curve_row(1, 0.1), curve_row(2, 0.5), curve_row(3, 0.7)), reached=False)
    assert [r.metric for r in merge_curves([short, long, short], "max")] == [0.99, 0.99, 0.99]


def test_rows_end_when_most_trainings_are_no_longer_known():
    short = Curve(rows=(curve_row(1, 0.2),), reached=False)
    long = Curve(rows=(curve_row(1, 0.1), curve_row(2, 0.5)), reached=False)
    assert len(merge_curves([short, short, long], "max")) == 1
    assert len(merge_curves([short, long, long], "max")) == 2


def test_a_row_without_statistics_gets_those_of_the_next_row():
    rows = merge_curves(
        [Curve(rows=(curve_row(1, 0.1, None), curve_row(2, 0.2), curve_row(3, 0.3, 2.0)), reached=False)],
        "max",
    )
    assert [(r.sqr, r.trusted) for r in rows] == [(1.0, 0.0), (1.0, 1.0), (2.0, 1.0)]


def test_trust_is_the_fraction_of_trainings_with_trusted_statistics():
    curves = [Curve(rows=(curve_row(1, 0.1, sqr),), reached=False) for sqr in (None, 3.0, 1.0, 2.0)]
    assert [(r.sqr, r.trusted) for r in merge_curves(curves, "max")] == [(2.0, 0.75)]
