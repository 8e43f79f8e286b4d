"""What each policy does with views that a person can check, and what all of them keep on any view."""

import importlib.metadata
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.goodput.model import goodput
from common.types import GradientStatistics, JobConfig, batch_config, replicas_of
from services.scheduler.decisions import check_decision
from services.scheduler.policies import UnknownPolicy, make_policy, policy_names
from services.scheduler.policies.dynamic import equal_shares
from services.scheduler.policies.fixed import FixedPolicy
from services.scheduler.policies.interface import ClusterView, Decision, Policy
from services.scheduler.policies.pollux import GoodputPolicy, JobModel, power_mean, restart_factor, utility
from tests.fixtures.policy_views import (
    CLEAN,
    FAST_NETWORK,
    NOISY,
    Truth,
    apply,
    at,
    job,
    nodes,
    profile,
    random_view,
    view,
)

LIVE = ("fixed", "dynamic", "throughput", "pollux", "coadapt", "tiresias", "srtf")
OWN = (*LIVE, "optimus")
BATCH_ONLY, REPLICAS_ONLY = "pollux:adapt_replicas=false", "pollux:adapt_batch=false"
ALL = (*OWN, BATCH_ONLY, REPLICAS_ONLY)
SEEDS = st.integers(0, 2**32 - 1)


def decide(name: str, given_view: ClusterView) -> Decision:
    given_view = msgspec.structs.replace(given_view, oracle=Truth(given_view))
    return make_policy(name).decide(given_view, None, seed=0)


def counts(decision: Decision) -> dict[str, int]:
    return {name: replicas_of(allocation) for name, allocation in decision.allocations.items()}


# ------------------------------------------------------------------------------ all policies


@pytest.mark.parametrize("name", ALL)
@given(SEEDS)
def test_every_decision_is_complete_and_within_capacity_and_bounds(name: str, seed: int) -> None:
    given_view = random_view(seed)
    decision = decide(name, given_view)
    assert check_decision(given_view, decision) == ""
    assert all(decision.reasons.values())
    assert set(decision.configs) == {n for n, a in decision.allocations.items() if a}


@pytest.mark.parametrize("name", ["fixed", "dynamic", "tiresias", "optimus", BATCH_ONLY])
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
def test_an_empty_cluster_and_an_empty_queue_are_no_trouble(name: str) -> None:
    assert decide(name, view()).allocations == {}
    without = decide(name, ClusterView(now_s=0.0, nodes=(), jobs=(job("a"),), restart_penalty_s=1.0))
    assert without.allocations == {"a": ()}
    assert without.reasons["a"].startswith("waits")
    known = job("a", profile=profile("a"))
    nowhere = ClusterView(now_s=0.0, nodes=(), jobs=(known,), restart_penalty_s=1.0)
    assert decide(name, nowhere).allocations == {"a": ()}
    assert decide(name, view(known, on=nodes(0, 0))).allocations == {"a": ()}, "verifiers hold all slots"


# ------------------------------------------------------------------------------ fixed


def test_fixed_gives_what_was_asked_for_packed_on_one_node() -> None:
    decision = decide("fixed", view(job("a", replicas=3, batch_size=48), job("b", replicas=4)))
    assert decision.allocations == {"a": at((1, 3)), "b": at((2, 4))}
    assert decision.configs["a"] == JobConfig(atomic_batch=16)
    assert decision.reasons["a"] == "3 replicas on node-1, batch 48, as requested"


def test_fixed_lets_nobody_overtake() -> None:
    running = job("a", at((1, 4), (2, 2)), replicas=6)
    decision = decide(
        "fixed", view(running, job("b", replicas=4), job("c", replicas=1), job("d", replicas=2))
    )
    assert counts(decision) == {"a": 6, "b": 0, "c": 0, "d": 0}
    assert decision.reasons["b"] == "waits: 4 replicas asked for, slots free: 2"
    assert decision.reasons["c"] == "waits: 1 job before it in order of submission"
    assert decision.reasons["d"] == "waits: 2 jobs before it in order of submission"


def test_fixed_places_a_job_anew_whose_node_is_gone() -> None:
    lost = job("a", at((3, 2)), replicas=2)
    kept = job("b", at((1, 4)), replicas=4)
    decision = decide("fixed", view(lost, kept))
    assert decision.allocations == {"a": at((2, 2)), "b": at((1, 4))}


# ------------------------------------------------------------------------------ dynamic


def test_dynamic_divides_equally_and_the_first_get_what_is_over() -> None:
    decision = decide("dynamic", view(job("a"), job("b"), job("c")))
    assert counts(decision) == {"a": 3, "b": 3, "c": 2}


def test_dynamic_gives_one_each_to_the_first_when_slots_are_short() -> None:
    decision = decide("dynamic", view(*(job(name) for name in "abcde"), on=nodes(2, 1)))
    assert counts(decision) == {"a": 1, "b": 1, "c": 1, "d": 0, "e": 0}


def test_dynamic_gives_no_more_than_a_job_may_have_or_its_batch_can_feed() -> None:
    few = job("a", max_replicas=1)
    small_batch = job("b", batch_size=16, min_atomic_batch=8)
    decision = decide("dynamic", view(few, small_batch, job("c")))
    assert counts(decision) == {"a": 1, "b": 2, "c": 5}
    assert "no more than it can use" in decision.reasons["b"]


def test_dynamic_keeps_the_requested_batch_whatever_the_share() -> None:
    decision = decide("dynamic", view(job("a", batch_size=64)))
    assert counts(decision) == {"a": 8}
    assert decision.configs["a"].total_batch(8) == 64


def test_dynamic_moves_only_those_whose_share_changed() -> None:
    a, b = job("a", at((1, 4))), job("b", at((2, 4)))
    alone = decide("dynamic", view(a, b))
    assert alone.allocations["a"] is a.allocation
    assert alone.allocations["b"] is b.allocation
    three = decide("dynamic", view(a, b, job("c")))
    assert counts(three) == {"a": 3, "b": 3, "c": 2}
    assert three.allocations["a"] == at((1, 3))
    assert three.allocations["b"] == at((2, 3))


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 40))
def test_shares_are_equal_up_to_one_where_no_limit_binds(limits: list[int], slots: int) -> None:
    shares = equal_shares(limits, slots)
    assert sum(shares) == min(slots, sum(limits))
    unbound = [share for share, limit in zip(shares, limits, strict=True) if share < limit]
    assert not unbound or max(shares) - min(unbound) <= 1
    assert all(share <= limit for share, limit in zip(shares, limits, strict=True))


# ------------------------------------------------------------------------------ pollux


def test_a_job_without_profile_starts_with_one_replica_at_m0() -> None:
    decision = decide("pollux", view(job("a"), job("b", profile=profile("b", parameters=None))))
    assert counts(decision) == {"a": 1, "b": 1}
    assert decision.configs["a"].total_batch(1) == 16
    assert "until its step times are known" in decision.reasons["a"]


def test_bounds_that_leave_no_room_for_rounding_are_met_with_more_passes() -> None:
    tight = job("a", min_batch_size=17, max_batch_size=17, min_atomic_batch=1, max_atomic_batch=5)
    decision = decide("pollux", view(tight))
    assert decision.configs["a"] == JobConfig(atomic_batch=1, accumulation=16)


@pytest.mark.parametrize(("profiled", "most"), [(0, 1), (1, 2), (2, 4), (4, 8)])
def test_a_job_explores_at_most_twice_the_replicas_it_was_profiled_with(profiled: int, most: int) -> None:
    lone = job("a", profile=profile(profiled=profiled), max_replicas=64, max_batch_size=4096)
    assert counts(decide("pollux", view(lone, on=nodes(16)))) == {"a": most}


def test_a_job_that_lost_its_profile_keeps_what_it_has() -> None:
    running = job("a", at((1, 3)), config=JobConfig(atomic_batch=20))
    decision = decide("pollux", view(running))
    assert decision.allocations["a"] is running.allocation
    assert decision.configs["a"] == running.config


def test_a_job_without_profile_that_has_to_give_slots_back_goes_to_one_replica() -> None:
    running = job("a", at((1, 4)), config=JobConfig(atomic_batch=20))
    others = [job(name) for name in "bcd"]
    assert counts(decide("pollux", view(running, *others, on=nodes(6))))["a"] == 1


def test_noisy_gradients_get_a_larger_batch_than_clean_ones() -> None:
    totals = {}
    for name, statistics in (("noisy", NOISY), ("clean", CLEAN)):
        decision = decide("pollux", view(job(name, profile=profile(name, statistics=statistics))))
        totals[name] = decision.configs[name].total_batch(counts(decision)[name])
    assert totals["noisy"] > 2 * totals["clean"]


def test_the_batch_is_the_goodput_optimum_of_the_job() -> None:
    decision = decide("pollux", view(job("a", profile=profile()), on=nodes(4)))
    replicas = counts(decision)["a"]
    chosen = decision.configs["a"]

    def rate(atomic: int) -> float:
        return float(goodput(FAST_NETWORK, NOISY, 16, 1, replicas, atomic, 0))

    assert chosen.accumulation == 0
    assert rate(chosen.atomic_batch) >= 0.995 * max(rate(m) for m in range(4, 129))


@pytest.mark.parametrize("statistics", [None, GradientStatistics(sqr=1e-9, var=1e9, trusted=False)])
def test_statistics_that_are_not_trusted_never_raise_the_batch(statistics: GradientStatistics | None) -> None:
    fresh = job("a", profile=profile(statistics=statistics))
    decision = decide("pollux", view(fresh))
    assert decision.configs["a"].total_batch(counts(decision)["a"]) == 16
    assert "do not allow a larger batch" in decision.reasons["a"]
    running = job("a", at((1, 2)), config=JobConfig(atomic_batch=20), profile=profile(statistics=statistics))
    decision = decide("pollux", view(running))
    assert decision.configs["a"].total_batch(counts(decision)["a"]) <= 40


def test_a_job_that_keeps_replicas_with_no_best_batch_keeps_its_batch() -> None:
    """Three replicas share a batch of 16 as 3 x 5 only where fewer than M0 are allowed."""
    tight = {"min_batch_size": 16, "max_batch_size": 17, "batch_size": 16, "max_replicas": 3}
    one = job("a", at((1, 3)), config=JobConfig(atomic_batch=5), profile=profile("a"), **tight)
    model = JobModel(one, ((0, 3),), slots=3, fair=3, scale=1.0)
    assert not model.knows(((0, 3),))
    assert model.config(((0, 3),)) == JobConfig(atomic_batch=5)


def test_a_batch_changes_only_when_it_pays() -> None:
    best = decide("pollux", view(job("a", profile=profile(), max_replicas=2)))
    config, allocation = best.configs["a"], best.allocations["a"]
    near = JobConfig(atomic_batch=config.atomic_batch + 4)
    far = JobConfig(atomic_batch=max(config.atomic_batch // 4, 8))
    for present, kept in ((near, True), (far, False)):
        running = job("a", allocation, config=present, profile=profile(), max_replicas=2)
        decision = decide("pollux", view(running))
        assert decision.allocations["a"] is allocation
        assert (decision.configs["a"] == present) is kept


def test_a_restart_that_costs_too_much_is_not_made() -> None:
    first = job("a", at((1, 2)), profile=profile("a", profiled=8))
    for age_s, restarts, restart_s, moves in ((1000.0, 0, 0.1, True), (60.0, 2, 20.0, False)):
        running = msgspec.structs.replace(
            first,
            submitted_s=100.0 - age_s,
            restarts=restarts,
            profile=profile("a", profiled=8, restart_s=restart_s),
        )
        decision = decide("pollux", view(running))
        assert (decision.allocations["a"] is not running.allocation) is moves


def test_the_factor_charges_what_restarts_have_cost_and_never_falls_to_nothing() -> None:
    def factor(age_s: float, restarts: int, restart_s: float) -> float:
        known = job("a", submitted_s=100.0 - age_s, restarts=restarts, profile=profile(restart_s=restart_s))
        return restart_factor(known, view(known))

    assert factor(90.0, 1, 30.0) == pytest.approx(60 / 120)
    assert factor(0.0, 0, 30.0) == factor(60.0, 3, 30.0) == 0.01
    assert restart_factor(job("a"), view(job("a"))) == pytest.approx(100 / 101), "the assumed penalty"


def test_a_job_that_has_just_come_gets_a_slot_of_a_full_cluster() -> None:
    running = [job(n, at((i, 4)), profile=profile(n)) for i, n in ((1, "a"), (2, "b"))]
    decision = decide("pollux", view(*running, job("new", submitted_s=100.0)))
    assert counts(decision)["new"] == 1
    assert sum(counts(decision).values()) == 8


def test_a_job_restarted_longer_than_it_exists_keeps_what_it_has() -> None:
    restless = job("a", at((1, 2)), submitted_s=90.0, restarts=50, profile=profile("a", restart_s=1.0))
    decision = decide("pollux", view(restless, job("b", profile=profile("b"))))
    assert decision.allocations["a"] is restless.allocation


def test_when_slots_are_short_those_that_had_least_come_first() -> None:
    jobs = [job(n, attained_slot_s=had) for n, had in (("a", 50.0), ("b", 10.0), ("c", 30.0))]
    assert counts(decide("pollux", view(*jobs, on=nodes(2)))) == {"a": 0, "b": 1, "c": 1}


def test_only_one_job_that_spans_nodes_uses_a_node_unless_allowed() -> None:
    jobs = [job(n, profile=profile(n, profiled=8), max_replicas=6) for n in "abcd"]
    big = view(*jobs, on=nodes(3, 3, 3, 3, 3, 3))
    used = [p.node for a in decide("pollux", big).allocations.values() if len(a) > 1 for p in a]
    assert used
    assert len(used) == len(set(used))
    free = GoodputPolicy(avoid_interference=False).decide(big, None, 0)
    assert free.value is not None
    assert free.value >= (decide("pollux", big).value or 0.0) - 1e-12


@given(SEEDS)
def test_value_never_exceeds_bound(seed: int) -> None:
    for name in ("pollux", "throughput"):
        decision = decide(name, random_view(seed))
        if decision.allocations:
            assert decision.value is not None
            assert decision.bound is not None
            assert 0 <= decision.value <= decision.bound * (1 + 1e-9)


@pytest.mark.parametrize("power", [-2.0, -1.0, 0.0, 0.5, 1.0])
def test_any_power_and_weights_can_be_the_objective(power: float) -> None:
    class Weighted(GoodputPolicy):
        def weights(self, jobs: Any, given_view: ClusterView) -> Any:
            return super().weights(jobs, given_view) * [1.0, 8.0]

    policy = Weighted(power=power)
    decision = policy.decide(view(job("a", profile=profile("a")), job("b", profile=profile("b"))), None, 0)
    assert counts(decision)["b"] >= counts(decision)["a"]
    equal = power_mean(float(utility(np.array([0.5, 0.5]), power).mean()), power)
    assert equal == pytest.approx(0.501)


def test_reasons_say_what_the_model_says() -> None:
    decision = decide("pollux", view(job("a", profile=profile(profiled=1)), *[job(n) for n in "bcdefghij"]))
    assert decision.reasons["a"].startswith("1 replica on node-1, batch ")
    assert "modelled goodput" in decision.reasons["a"]
    assert decision.reasons["j"] == "waits: 8 of 8 slots go to 8 jobs to which they are worth more"
    grown = decide("pollux", view(job("a", profile=profile(profiled=1)), on=nodes(4)))
    assert grown.reasons["a"].endswith("x one replica")


# ------------------------------------------------------------------------------ throughput


def test_throughput_takes_a_larger_batch_than_is_good_for_training() -> None:
    clean = view(job("a", profile=profile(statistics=CLEAN)), on=nodes(4))
    by_goodput, by_throughput = decide("pollux", clean), decide("throughput", clean)
    total = {
        name: d.configs["a"].total_batch(counts(d)["a"])
        for name, d in (("goodput", by_goodput), ("throughput", by_throughput))
    }
    assert total["throughput"] == 512
    assert total["goodput"] < 100
    assert "modelled throughput" in by_throughput.reasons["a"]


def test_throughput_needs_no_gradient_statistics() -> None:
    decision = decide("throughput", view(job("a", profile=profile(statistics=None)), on=nodes(4)))
    assert decision.configs["a"].total_batch(counts(decision)["a"]) == 512


# ------------------------------------------------------------------------------ one half of pollux


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
    assert decision.reasons["new"].endswith("the requested replicas; its step times are not known yet")
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


def test_replicas_only_gives_more_to_whom_more_are_worth_more() -> None:
    """At a batch of 512 more replicas share the computing; at one of 16 they only wait for each other."""
    large = job("large", at((1, 1)), batch_size=512, profile=profile("large"))
    small = job("small", at((2, 1)), batch_size=16, profile=profile("small"))
    given_counts = counts(decide(REPLICAS_ONLY, view(large, small)))
    assert given_counts["large"] > given_counts["small"]


def test_replicas_only_does_not_go_by_gradient_statistics() -> None:
    """One batch has one efficiency, however many share it."""
    rows = []
    for statistics in (NOISY, CLEAN, None):
        jobs = [job(n, profile=profile(n, statistics=statistics), batch_size=256) for n in "ab"]
        rows.append(decide(REPLICAS_ONLY, view(*jobs)).allocations)
    assert rows[0] == rows[1] == rows[2]


def test_an_ablation_of_both_halves_is_refused() -> None:
    with pytest.raises(UnknownPolicy, match="needs adapt_batch and by_goodput"):
        make_policy("pollux:adapt_replicas=false,adapt_batch=false")


# ------------------------------------------------------------------------------ registry


def test_our_own_policies_are_found_by_name() -> None:
    assert [make_policy(name).name for name in OWN] == list(OWN)
    assert [name for name in policy_names() if name in OWN] == list(OWN)


def test_an_unknown_policy_is_answered_with_those_that_exist() -> None:
    with pytest.raises(UnknownPolicy, match=r"'best': not one of fixed, dynamic, throughput, pollux"):
        make_policy("best")


@pytest.mark.parametrize(
    ("given_text", "problem"),
    [
        ("power=1e400", "power '1e400': allowed: float, a number of at most 1.8e308"),
        (f"power={'9' * 400}", "9': allowed: float, a number of at most"),
        ("adapt_batch=2", "adapt_batch '2': allowed: bool, true or false"),
        ("power=0,power=1", "power: given twice"),
    ],
)
def test_parameters_that_cannot_be_meant_are_refused(given_text: str, problem: str) -> None:
    with pytest.raises(UnknownPolicy, match=problem):
        make_policy(f"pollux:{given_text}")


class Mine(FixedPolicy):
    name = "mine"

    def __init__(self, slots: int = 1) -> None:
        pass


class Nameless(Policy):
    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        raise NotImplementedError


class Numbered(Nameless):
    name = 7


def test_a_package_can_offer_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Mine.__module__
    offered = [
        importlib.metadata.EntryPoint(name, value, "coadapt.policies")
        for name, value in (
            ("mine", f"{here}:Mine"),
            ("gone", f"{here}:NoSuchThing"),
            ("nameless", f"{here}:Nameless"),
            ("number", "builtins:int"),
            ("numbered", f"{here}:Numbered"),
            ("fixed", f"{here}:Mine"),
        )
    ]
    monkeypatch.setattr("services.scheduler.policies.entry_points", lambda group: offered)
    assert make_policy("mine").name == "mine"
    assert make_policy("fixed").name == "fixed"
    assert policy_names()[-5:] == ["gone", "mine", "nameless", "number", "numbered"]
    with pytest.raises(UnknownPolicy, match="NoSuchThing cannot be used"):
        make_policy("gone")
    with pytest.raises(UnknownPolicy, match="gives a int; needed: a subclass of"):
        make_policy("number")
    with pytest.raises(UnknownPolicy, match="Nameless has no `name` that is a string"):
        make_policy("nameless")
    with pytest.raises(UnknownPolicy, match="Numbered has no `name` that is a string"):
        make_policy("numbered")
    with pytest.raises(UnknownPolicy, match=r"slots '1\.5': allowed: int, a whole number"):
        make_policy("mine:slots=1.5")
