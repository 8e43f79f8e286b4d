"""pollux: replicas and batch chosen together by goodput."""

from typing import Any

import msgspec
import numpy as np
import pytest

from common.goodput.model import goodput
from common.types import GradientStatistics, JobConfig
from services.scheduler.policies.interface import ClusterView
from services.scheduler.policies.pollux import GoodputPolicy, JobModel, power_mean, restart_factor, utility
from tests.fixtures.known_models import CLEAN, FAST_NETWORK, NOISY
from tests.fixtures.policy_views import at, counts, decide, job, nodes, profile, view


def test_a_job_without_a_profile_starts_with_one_replica_at_m0() -> None:
    decision = decide("pollux", view(job("a"), job("b", profile=profile("b", parameters=None))))
    assert counts(decision) == {"a": 1, "b": 1}
    assert decision.configs["a"].total_batch(1) == 16
    assert "until its step times are measured" in decision.reasons["a"]


def test_bounds_that_leave_no_room_for_rounding_are_met_with_more_passes() -> None:
    tight = job("a", min_batch_size=17, max_batch_size=17, min_atomic_batch=1, max_atomic_batch=5)
    decision = decide("pollux", view(tight))
    assert decision.configs["a"] == JobConfig(atomic_batch=1, accumulation=16)


@pytest.mark.parametrize(("profiled", "most"), [(0, 1), (1, 2), (2, 4), (4, 8)])
def test_a_job_explores_at_most_twice_the_replicas_it_was_profiled_with(profiled: int, most: int) -> None:
    lone = job("a", profile=profile(profiled=profiled), max_replicas=64, max_batch_size=4096)
    assert counts(decide("pollux", view(lone, on=nodes(16)))) == {"a": most}


def test_a_job_that_lost_its_profile_keeps_its_slots_and_batch() -> None:
    running = job("a", at((1, 3)), config=JobConfig(atomic_batch=20))
    decision = decide("pollux", view(running))
    assert decision.allocations["a"] is running.allocation
    assert decision.configs["a"] == running.config


def test_a_job_without_a_profile_that_loses_slots_goes_to_one_replica() -> None:
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
    assert "do not support a larger batch" in decision.reasons["a"]
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


def test_the_restart_factor_falls_with_the_cost_of_past_restarts_down_to_its_floor() -> None:
    def factor(age_s: float, restarts: int, restart_s: float) -> float:
        known = job("a", submitted_s=100.0 - age_s, restarts=restarts, profile=profile(restart_s=restart_s))
        return restart_factor(known, view(known))

    assert factor(90.0, 1, 30.0) == pytest.approx(60 / 120)
    assert factor(0.0, 0, 30.0) == factor(60.0, 3, 30.0) == 0.01
    assert restart_factor(job("a"), view(job("a"))) == pytest.approx(100 / 101), "the assumed penalty"


def test_a_job_that_has_just_arrived_gets_a_slot_of_a_full_cluster() -> None:
    running = [job(n, at((i, 4)), profile=profile(n)) for i, n in ((1, "a"), (2, "b"))]
    decision = decide("pollux", view(*running, job("new", submitted_s=100.0)))
    assert counts(decision)["new"] == 1
    assert sum(counts(decision).values()) == 8


def test_a_job_whose_restarts_took_longer_than_its_life_keeps_its_slots() -> None:
    restless = job("a", at((1, 2)), submitted_s=90.0, restarts=50, profile=profile("a", restart_s=1.0))
    decision = decide("pollux", view(restless, job("b", profile=profile("b"))))
    assert decision.allocations["a"] is restless.allocation


def test_jobs_with_the_least_attained_service_come_first_when_slots_are_short() -> None:
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


def test_reasons_give_the_numbers_of_the_model() -> None:
    decision = decide("pollux", view(job("a", profile=profile(profiled=1)), *[job(n) for n in "bcdefghij"]))
    assert decision.reasons["a"].startswith("1 replica on node-1, batch ")
    assert "modelled goodput" in decision.reasons["a"]
    assert decision.reasons["j"] == "waits: 8 of 8 slots go to 8 jobs that gain more from them"
    grown = decide("pollux", view(job("a", profile=profile(profiled=1)), on=nodes(4)))
    assert grown.reasons["a"].endswith("x one replica")


def test_among_jobs_that_have_just_arrived_those_with_the_least_attained_service_come_first() -> None:
    """Their age is 0, so the formula of the restart factor gives 0 to each of them."""
    new = [job(n, submitted_s=100.0, attained_slot_s=had) for n, had in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    decision = decide("pollux", view(*new, on=nodes(2)))
    assert counts(decision) == {"a": 0, "b": 1, "c": 1}


def test_among_equal_jobs_the_first_one_gets_the_slot() -> None:
    new = [job(n, submitted_s=100.0) for n in "cab"]
    decision = decide("pollux", view(*new, on=nodes(2)))
    assert counts(decision) == {"c": 1, "a": 1, "b": 0}


def test_a_job_is_not_moved_for_another_that_gains_the_same() -> None:
    held = job("b", at((1, 1)), submitted_s=100.0, attained_slot_s=9.0)
    decision = decide("pollux", view(job("a", submitted_s=100.0), held, on=nodes(1)))
    assert decision.allocations == {"a": (), "b": held.allocation}
