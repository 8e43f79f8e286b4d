"""What every policy guarantees on any view."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given

from services.scheduler.decisions import check_decision
from services.scheduler.policies.interface import ClusterView
from services.scheduler.policies.registry import BUILT_IN, make_policy
from tests.fixtures.policy_views import SEEDS, apply, decide, job, nodes, profile, random_view, view

ALL = (*BUILT_IN, "pollux:adapt_replicas=false", "pollux:adapt_batch=false")
STABLE = ("fixed", "dynamic", "tiresias", "optimus", "pollux:adapt_replicas=false")
BY_SERVICE = ("pollux", "throughput")


@pytest.mark.parametrize("name", ALL)
@given(SEEDS)
def test_every_decision_is_complete_and_within_capacity_and_bounds(name: str, seed: int) -> None:
    given_view = random_view(seed)
    decision = decide(name, given_view)
    assert check_decision(given_view, decision) == ""
    assert all(decision.reasons.values())
    assert set(decision.configs) == {n for n, a in decision.allocations.items() if a}


@pytest.mark.parametrize("name", STABLE)
@given(SEEDS)
def test_between_arrivals_and_finishes_nothing_changes(name: str, seed: int) -> None:
    given_view = random_view(seed)
    first = decide(name, given_view)
    second = decide(name, apply(first, given_view))
    for job_id, allocation in second.allocations.items():
        assert allocation is first.allocations[job_id]


@pytest.mark.parametrize("name", ALL)
@given(SEEDS)
def test_names_of_jobs_and_nodes_do_not_matter(name: str, seed: int) -> None:
    given_view = random_view(seed)
    jobs = [v.spec.id for v in given_view.jobs]
    mixed = random.Random(seed).sample(jobs, len(jobs))
    renamed = dict(zip(jobs, (f"x{old}" for old in mixed), strict=True))
    new_nodes = {n.name: f"z{9 - i}" for i, n in enumerate(given_view.nodes)}

    def rename(value: Any) -> Any:
        if isinstance(value, str):
            return renamed.get(value, new_nodes.get(value, value))
        if isinstance(value, (list, tuple)):
            return [rename(v) for v in value]
        return {k: rename(v) for k, v in value.items()} if isinstance(value, dict) else value

    other = msgspec.convert(rename(msgspec.to_builtins(given_view)), ClusterView)
    one, two = decide(name, given_view), decide(name, other)
    for v in given_view.jobs:
        old, new = v.spec.id, renamed[v.spec.id]
        assert [(new_nodes[p.node], p.replicas) for p in one.allocations[old]] == [
            (p.node, p.replicas) for p in two.allocations[new]
        ]
        assert one.configs.get(old) == two.configs.get(new)
    assert one.value == two.value
    assert one.bound == two.bound


@pytest.mark.parametrize("name", ALL)
def test_an_empty_cluster_and_an_empty_queue_get_empty_decisions(name: str) -> None:
    assert decide(name, view()).allocations == {}
    known = job("a", profile=profile("a"))
    for one in (job("a"), known):
        no_nodes = ClusterView(now_s=0.0, nodes=(), jobs=(one,), restart_penalty_s=1.0)
        decision = decide(name, no_nodes)
        assert decision.allocations == {"a": ()}
        assert decision.reasons["a"].startswith("waits: ")
    assert decide(name, view(known, on=nodes(0, 0))).allocations == {"a": ()}, "verifiers hold all slots"


@pytest.mark.parametrize("name", BY_SERVICE)
@given(SEEDS)
def test_the_order_of_jobs_does_not_matter_when_their_attained_service_differs(name: str, seed: int) -> None:
    given_view = random_view(seed)
    mixed = random.Random(seed).sample(given_view.jobs, len(given_view.jobs))
    other = decide(name, msgspec.structs.replace(given_view, jobs=tuple(mixed)))
    assert other == decide(name, given_view)


@pytest.mark.parametrize("name", BY_SERVICE)
@given(SEEDS)
def test_a_policy_keeps_no_state_between_decisions(name: str, seed: int) -> None:
    given_view = random_view(seed)
    policy = make_policy(name)
    first = policy.decide(given_view, None, seed=0)
    policy.decide(random_view(seed + 1), None, seed=1)
    assert policy.decide(given_view, None, seed=2) == first


@pytest.mark.parametrize("name", BY_SERVICE)
@given(SEEDS)
def test_value_never_exceeds_bound(name: str, seed: int) -> None:
    decision = decide(name, random_view(seed))
    if decision.allocations:
        assert decision.value is not None
        assert decision.bound is not None
        assert 0 <= decision.value <= decision.bound * (1 + 1e-9)
