"""Decisions of `pollux` and `throughput` do not hang on order or on history, and their ties have a rule."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import replicas_of
from services.scheduler.policies import make_policy
from services.scheduler.policies.interface import ClusterView, Decision
from tests.fixtures.policy_views import at, job, nodes, random_view, view

POLICIES = ("pollux", "throughput")
SEEDS = st.integers(0, 2**32 - 1)


def decide(name: str, given_view: ClusterView) -> Decision:
    return make_policy(name).decide(given_view, None, seed=0)


@pytest.mark.parametrize("name", POLICIES)
@given(SEEDS)
def test_the_order_of_jobs_does_not_matter_where_their_service_tells_them_apart(name: str, seed: int) -> None:
    given_view = random_view(seed)
    mixed = random.Random(seed).sample(given_view.jobs, len(given_view.jobs))
    other = decide(name, msgspec.structs.replace(given_view, jobs=tuple(mixed)))
    assert other == decide(name, given_view)


@pytest.mark.parametrize("name", POLICIES)
@given(SEEDS)
def test_a_decision_made_again_is_the_same(name: str, seed: int) -> None:
    given_view = random_view(seed)
    policy = make_policy(name)
    first = policy.decide(given_view, None, seed=0)
    policy.decide(random_view(seed + 1), None, seed=1)
    assert policy.decide(given_view, None, seed=2) == first


def test_among_jobs_to_which_slots_are_worth_nothing_yet_those_that_had_least_come_first() -> None:
    """All have just come, so that the formula of the restart factor gives 0 to each of them."""
    new = [job(n, submitted_s=100.0, attained_slot_s=had) for n, had in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    decision = decide("pollux", view(*new, on=nodes(2)))
    assert {n: replicas_of(a) for n, a in decision.allocations.items()} == {"a": 0, "b": 1, "c": 1}


def test_of_equals_the_first_that_came_gets_the_slot() -> None:
    new = [job(n, submitted_s=100.0) for n in "cab"]
    decision = decide("pollux", view(*new, on=nodes(2)))
    assert {n: replicas_of(a) for n, a in decision.allocations.items()} == {"c": 1, "a": 1, "b": 0}


def test_a_job_that_holds_slots_is_not_moved_for_another_of_the_same_worth() -> None:
    held = job("b", at((1, 1)), submitted_s=100.0, attained_slot_s=9.0)
    decision = decide("pollux", view(job("a", submitted_s=100.0), held, on=nodes(1)))
    assert decision.allocations == {"a": (), "b": held.allocation}
