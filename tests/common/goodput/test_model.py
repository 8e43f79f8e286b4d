"""The goodput model against its equations, and the best batch against a search over every batch."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from common.goodput.model import (
    BatchBounds,
    accumulation_time,
    best_batch,
    efficiency,
    gain,
    goodput,
    last_pass_time,
    network_time,
    step_time,
    throughput,
)
from common.types import GradientStatistics, JobConfig, ThroughputParameters, split_batch

PARAMETERS = ThroughputParameters(
    alpha_c=0.02, beta_c=0.001, alpha_n=0.05, beta_n=0.004, alpha_r=0.01, beta_r=0.002, gamma=1.6
)
NOISY = GradientStatistics(sqr=1.0, var=20.0)
BOUNDS = BatchBounds(initial=16, maximum=512, min_atomic=4, max_atomic=64)

bounds = st.builds(
    lambda initial, times, least, most, alone: BatchBounds(
        initial=initial,
        maximum=initial * times,
        min_atomic=least,
        max_atomic=least * most,
        accumulates_alone=alone,
    ),
    st.integers(4, 200),
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(1, 32),
    st.booleans(),
)
statistics = st.builds(GradientStatistics, sqr=st.floats(1e-6, 1e3), var=st.floats(1e-6, 1e3))


def test_one_replica_does_not_synchronise() -> None:
    assert last_pass_time(PARAMETERS, 1, 1, 32) == pytest.approx(0.02 + 0.001 * 32, rel=1e-4)


def test_synchronisation_grows_with_replicas_beyond_two_and_costs_more_across_nodes() -> None:
    assert network_time(PARAMETERS, 1, np.array([2, 3, 4])) == pytest.approx([0.01, 0.012, 0.014])
    assert network_time(PARAMETERS, 2, np.array([2, 3, 4])) == pytest.approx([0.05, 0.054, 0.058])


def test_gamma_blends_computing_and_synchronising() -> None:
    compute, network = 0.02 + 0.001 * 32, 0.01
    expected = (compute**1.6 + network**1.6) ** (1 / 1.6)
    assert last_pass_time(PARAMETERS, 1, 2, 32) == pytest.approx(expected)


def test_every_step_is_updated_once_however_many_passes_and_replicas_it_has() -> None:
    updated = structs.replace(PARAMETERS, update_s=0.007)
    for replicas, accumulation in ((1, 0), (1, 3), (4, 2)):
        plain_s = step_time(PARAMETERS, 1, replicas, 8, accumulation)
        assert step_time(updated, 1, replicas, 8, accumulation) == pytest.approx(plain_s + 0.007)


def test_one_replica_accumulates_if_the_update_is_expensive() -> None:
    """An example costs the same in a pass of any size, so nothing else favours larger batches."""
    bounds = BatchBounds(initial=8, maximum=256, min_atomic=8, max_atomic=16)
    noisy = GradientStatistics(sqr=1.0, var=40.0)
    linear = structs.replace(PARAMETERS, alpha_c=1e-9)
    free = best_batch(bounds, linear, noisy, 1, 1)
    expensive = best_batch(bounds, structs.replace(linear, update_s=0.05), noisy, 1, 1)
    assert int(free.accumulation) == 0
    assert int(expensive.accumulation) > 0


def test_a_step_is_its_passes_and_throughput_counts_all_of_their_examples() -> None:
    expected = 3 * float(accumulation_time(PARAMETERS, 8)) + float(last_pass_time(PARAMETERS, 1, 2, 8))
    assert step_time(PARAMETERS, 1, 2, 8, 3) == pytest.approx(expected)
    assert throughput(PARAMETERS, 1, 2, 8, 3) == pytest.approx(2 * 8 * 4 / expected)


@given(statistics, st.floats(1, 1e4))
def test_the_gain_lies_between_one_and_the_scale(measured: GradientStatistics, scale: float) -> None:
    assert 1 <= float(gain(measured, scale)) <= scale
    assert float(efficiency(measured, scale)) <= 1


def test_the_gain_is_that_of_the_paper() -> None:
    measured = GradientStatistics(sqr=2.0, var=6.0)
    assert gain(measured, np.array([1.0, 4.0])) == pytest.approx([1.0, (6.0 + 2.0) / (6.0 / 4.0 + 2.0)])


@pytest.mark.parametrize("sqr", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("var", [math.nan, math.inf, -1.0, 0.0, 1.0])
def test_impossible_statistics_gain_nothing(sqr: float, var: float) -> None:
    for measured in (GradientStatistics(sqr=sqr, var=var), GradientStatistics(sqr=abs(var), var=sqr)):
        assert gain(measured, np.array([1.0, 16.0])).tolist() == [1.0, 1.0]


def test_pure_noise_makes_every_batch_efficient_and_no_noise_none() -> None:
    assert gain(GradientStatistics(sqr=0.0, var=1.0), 8.0) == pytest.approx(8.0)
    assert gain(GradientStatistics(sqr=1.0, var=0.0), 8.0) == pytest.approx(1.0)
    assert gain(GradientStatistics(sqr=0.0, var=0.0), 8.0) == pytest.approx(1.0)


def test_without_statistics_goodput_is_throughput() -> None:
    assert goodput(PARAMETERS, None, 16, 1, 2, 64, 0) == throughput(PARAMETERS, 1, 2, 64, 0)


@given(bounds, statistics, st.integers(1, 12), st.integers(1, 2))
def test_the_best_batch_is_within_all_bounds(
    limits: BatchBounds, measured: GradientStatistics, replicas: int, nodes: int
) -> None:
    best = best_batch(limits, PARAMETERS, measured, nodes, replicas)
    if best.goodput == 0:
        assert best.atomic_batch == 0
        return
    total = replicas * int(best.atomic_batch) * (int(best.accumulation) + 1)
    assert limits.initial <= total <= limits.maximum
    assert limits.min_atomic <= int(best.atomic_batch) <= limits.max_atomic
    assert best.accumulation >= 0
    if limits.accumulates_alone and replicas == 1 and total > limits.initial:
        assert best.accumulation >= 1


@given(bounds, statistics, st.data())
def test_the_only_allowed_batch_is_split_like_a_requested_one(
    limits: BatchBounds, measured: GradientStatistics, data: st.DataObject
) -> None:
    only = data.draw(st.integers(limits.initial, limits.maximum))
    replicas = np.arange(1, 13)
    best = best_batch(structs.replace(limits, only=only), PARAMETERS, measured, 1, replicas)
    totals, passes = (limits.initial, limits.maximum), (limits.min_atomic, limits.max_atomic)
    for n, atomic, accumulation in zip(replicas, best.atomic_batch, best.accumulation, strict=True):
        if atomic:
            split = JobConfig(atomic_batch=int(atomic), accumulation=int(accumulation))
            assert split == split_batch(only, int(n), totals, passes)
        else:
            with pytest.raises(ValueError, match="cannot share"):
                split_batch(only, int(n), totals, passes)


@given(statistics, st.integers(1, 8), st.booleans())
def test_the_best_batch_is_close_to_the_best_of_all_batches(
    measured: GradientStatistics, replicas: int, accumulates_alone: bool
) -> None:
    limits = structs.replace(BOUNDS, accumulates_alone=accumulates_alone)
    best = float(best_batch(limits, PARAMETERS, measured, 1, replicas).goodput)
    every = [
        float(goodput(PARAMETERS, measured, BOUNDS.initial, 1, replicas, atomic, accumulation))
        for atomic in range(BOUNDS.min_atomic, BOUNDS.max_atomic + 1)
        for accumulation in range(8)
        if BOUNDS.initial <= replicas * atomic * (accumulation + 1) <= BOUNDS.maximum
        and (not accumulates_alone or replicas > 1 or accumulation > 0 or atomic == BOUNDS.initial)
    ]
    assert 0.97 * max(every) <= best <= max(every) * (1 + 1e-9)


def test_a_noisier_gradient_asks_for_a_larger_batch() -> None:
    totals = []
    for var in (0.1, 10.0, 1000.0):
        best = best_batch(BOUNDS, PARAMETERS, GradientStatistics(sqr=1.0, var=var), 1, 4)
        totals.append(4 * int(best.atomic_batch) * (int(best.accumulation) + 1))
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]


def test_arrays_give_what_single_calls_give() -> None:
    replicas = np.arange(1, 9)
    together = best_batch(BOUNDS, PARAMETERS, NOISY, np.array([[1], [2]]), replicas[None, :])
    assert together.goodput.shape == (2, 8)
    for n, nodes in enumerate((1, 2)):
        for r in replicas:
            single = best_batch(BOUNDS, PARAMETERS, NOISY, nodes, int(r))
            assert together.goodput[n, r - 1] == single.goodput
            assert together.atomic_batch[n, r - 1] == single.atomic_batch


def test_more_replicas_than_the_largest_batch_feeds_have_no_batch() -> None:
    tight = BatchBounds(initial=16, maximum=32, min_atomic=8, max_atomic=16)
    best = best_batch(tight, PARAMETERS, NOISY, 1, np.array([4, 5]))
    assert best.goodput[0] > 0
    assert best.goodput[1] == 0
    assert math.isfinite(float(best.goodput[0]))
