"""The two halves of pollux: only the batch, and only the replicas."""

import pytest
from hypothesis import given

from common.types import batch_config, replicas_of
from services.scheduler.policies.registry import UnknownPolicy, make_policy
from tests.fixtures.known_models import CLEAN, NOISY
from tests.fixtures.policy_views import SEEDS, at, counts, decide, job, nodes, profile, random_view, view

BATCH_ONLY, REPLICAS_ONLY = "pollux:adapt_replicas=false", "pollux:adapt_batch=false"


@given(SEEDS)
def test_batch_only_places_jobs_as_fixed_does(seed: int) -> None:
    given_view = random_view(seed)
    assert decide(BATCH_ONLY, given_view).allocations == decide("fixed", given_view).allocations


def test_batch_only_trains_the_requested_replicas_with_their_best_batch() -> None:
    jobs = (
        job("noisy", at((1, 2)), profile=profile("noisy", statistics=NOISY)),
        job("clean", at((1, 2)), profile=profile("clean", statistics=CLEAN)),
        job("new", replicas=4),
    )
    decision = decide(BATCH_ONLY, view(*jobs))
    assert counts(decision) == {"noisy": 2, "clean": 2, "new": 4}
    batches = {name: config.total_batch(counts(decision)[name]) for name, config in decision.configs.items()}
    assert batches["noisy"] > batches["clean"] >= 16
    assert batches["new"] == 16
    assert decision.reasons["new"].endswith("the requested replicas; its step times are not measured yet")
    alone = decide("pollux", view(jobs[0], on=nodes(2)))
    assert decision.configs["noisy"] == alone.configs["noisy"]


@given(SEEDS)
def test_replicas_only_never_leaves_the_requested_batch(seed: int) -> None:
    given_view = random_view(seed)
    decision = decide(REPLICAS_ONLY, given_view)
    for one in given_view.jobs:
        if replicas := replicas_of(decision.allocations[one.spec.id]):
            held = one.profile is None and one.config and replicas == replicas_of(one.allocation)
            split = batch_config(one.spec.batch_size, replicas, one.spec)
            assert held or decision.configs[one.spec.id] == split


def test_replicas_only_gives_more_replicas_to_the_job_that_gains_more() -> None:
    """At a batch of 512 more replicas share the computing; at one of 16 they only wait for each other."""
    large = job("large", at((1, 1)), batch_size=512, profile=profile("large"))
    small = job("small", at((2, 1)), batch_size=16, profile=profile("small"))
    given_counts = counts(decide(REPLICAS_ONLY, view(large, small)))
    assert given_counts["large"] > given_counts["small"]


def test_replicas_only_ignores_gradient_statistics() -> None:
    """One batch has one efficiency, however many share it."""
    rows = []
    for statistics in (NOISY, CLEAN, None):
        jobs = [job(n, profile=profile(n, statistics=statistics), batch_size=256) for n in "ab"]
        rows.append(decide(REPLICAS_ONLY, view(*jobs)).allocations)
    assert rows[0] == rows[1] == rows[2]


def test_an_ablation_of_both_halves_is_refused() -> None:
    with pytest.raises(UnknownPolicy, match="needs adapt_batch and by_goodput"):
        make_policy("pollux:adapt_replicas=false,adapt_batch=false")
