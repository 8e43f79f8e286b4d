"""How a total batch size is split over replicas."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from common.types import JobConfig, JobSpec, batch_config, can_share
from tests.fixtures.specifications import make_job


def spec(least: int, most: int, min_atomic: int, max_atomic: int) -> JobSpec:
    return make_job(
        batch_size=least,
        min_batch_size=least,
        max_batch_size=most,
        min_atomic_batch=min_atomic,
        max_atomic_batch=max_atomic,
    )


@pytest.mark.parametrize(
    ("total", "replicas", "bounds", "split"),
    [
        (64, 4, (16, 256, 4, 64), JobConfig(atomic_batch=16)),
        (256, 2, (16, 256, 4, 64), JobConfig(atomic_batch=64, accumulation=1)),
        (17, 2, (16, 256, 4, 64), JobConfig(atomic_batch=9)),
        (256, 3, (16, 256, 4, 64), JobConfig(atomic_batch=42, accumulation=1)),
        (21, 1, (21, 21, 1, 12), JobConfig(atomic_batch=7, accumulation=2)),
    ],
    ids=["evenly", "in passes", "rounded up", "rounded down at the maximum", "in more passes than needed"],
)
def test_a_batch_is_split_in_few_passes_and_within_its_bounds(
    total: int, replicas: int, bounds: tuple[int, int, int, int], split: JobConfig
) -> None:
    assert batch_config(total, replicas, spec(*bounds)) == split


def test_a_batch_that_cannot_be_split_says_so() -> None:
    with pytest.raises(
        ValueError, match="4 replicas cannot share a batch of 21 with 1 to 12 examples a pass"
    ):
        batch_config(21, 4, spec(21, 21, 1, 12))
    assert not can_share(4, spec(21, 21, 1, 12))


@given(
    bounds=st.tuples(st.integers(1, 60), st.integers(1, 60)).map(sorted),
    atomic=st.tuples(st.integers(1, 20), st.integers(1, 20)).map(sorted),
    replicas=st.integers(1, 8),
    data=st.data(),
)
def test_a_split_is_found_exactly_where_one_exists(
    bounds: list[int], atomic: list[int], replicas: int, data: st.DataObject
) -> None:
    job = spec(*bounds, *atomic)
    exists = any(
        bounds[0] <= replicas * passes * size <= bounds[1]
        for size in range(atomic[0], atomic[1] + 1)
        for passes in range(1, 61)
    )
    assert can_share(replicas, job) == exists
    assume(exists)
    config = batch_config(data.draw(st.integers(*bounds)), replicas, job)
    assert atomic[0] <= config.atomic_batch <= atomic[1]
    assert bounds[0] <= config.total_batch(replicas) <= bounds[1]
