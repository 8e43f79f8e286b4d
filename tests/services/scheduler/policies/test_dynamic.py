"""dynamic: equal shares, requested batches."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policies.dynamic import equal_shares
from tests.fixtures.policy_views import at, counts, decide, job, nodes, view


def test_shares_are_equal_and_the_first_jobs_get_the_remainder() -> None:
    decision = decide("dynamic", view(job("a"), job("b"), job("c")))
    assert counts(decision) == {"a": 3, "b": 3, "c": 2}


def test_the_first_jobs_get_one_slot_each_when_there_are_too_few() -> None:
    decision = decide("dynamic", view(*(job(name) for name in "abcde"), on=nodes(2, 1)))
    assert counts(decision) == {"a": 1, "b": 1, "c": 1, "d": 0, "e": 0}


def test_a_share_is_limited_to_the_replicas_that_the_job_may_have_and_its_batch_suffices_for() -> None:
    few = job("a", max_replicas=1)
    small_batch = job("b", batch_size=16, min_atomic_batch=8)
    decision = decide("dynamic", view(few, small_batch, job("c")))
    assert counts(decision) == {"a": 1, "b": 2, "c": 5}
    assert "limited to what it can use" in decision.reasons["b"]


def test_the_requested_batch_stays_whatever_the_share() -> None:
    decision = decide("dynamic", view(job("a", batch_size=64)))
    assert counts(decision) == {"a": 8}
    assert decision.configs["a"].total_batch(8) == 64


def test_only_jobs_whose_share_changed_move() -> None:
    a, b = job("a", at((1, 4))), job("b", at((2, 4)))
    alone = decide("dynamic", view(a, b))
    assert alone.allocations["a"] is a.allocation
    assert alone.allocations["b"] is b.allocation
    three = decide("dynamic", view(a, b, job("c")))
    assert counts(three) == {"a": 3, "b": 3, "c": 2}
    assert three.allocations["a"] == at((1, 3))
    assert three.allocations["b"] == at((2, 3))


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 40))
def test_shares_differ_by_at_most_one_where_no_limit_applies(limits: list[int], slots: int) -> None:
    shares = equal_shares(limits, slots)
    assert sum(shares) == min(slots, sum(limits))
    unbound = [share for share, limit in zip(shares, limits, strict=True) if share < limit]
    assert not unbound or max(shares) - min(unbound) <= 1
    assert all(share <= limit for share, limit in zip(shares, limits, strict=True))
