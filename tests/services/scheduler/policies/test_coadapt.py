"""coadapt: its weights against closed forms, the cost of restarts, and the work left."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from common.types import GradientStatistics, JobConfig, JobProfile, ThroughputParameters
from services.scheduler.policies.coadapt import (
    LATE,
    RESTART_HORIZON_S,
    TOO_LATE,
    CoadaptPolicy,
    CoadaptRound,
    estimate_all,
    exponent,
    hesrpt_weights,
    lateness,
    progress_left,
    ranks,
    work_left_s,
)
from services.scheduler.policies.interface import ClusterView, JobView
from services.scheduler.policies.pollux import JobModel
from tests.fixtures.known_models import FAST_NETWORK, NOISY
from tests.fixtures.policy_views import SEEDS, at, counts, decide, job, nodes, profile, random_view, view

LINEAR = ThroughputParameters(
    alpha_c=1e-6, beta_c=0.002, alpha_n=1e-7, beta_n=1e-8, alpha_r=1e-7, beta_r=1e-8, gamma=1.0
)
VERY_NOISY = structs.replace(NOISY, var=1e9)


def models(given_view: ClusterView) -> list[JobModel]:
    slots = sum(node.slots for node in given_view.nodes)
    fair = math.ceil(slots / len(given_view.jobs))
    scale = len(given_view.nodes) / slots
    return [JobModel(one, (), slots, fair, scale) for one in given_view.jobs]


def this_round(now_s: float = 100.0, **lags_s: float) -> CoadaptRound:
    return CoadaptRound(-0.1, {name: (lag_s, now_s) for name, lag_s in lags_s.items()})


def with_progress(name: str, made: float, **changes: Any) -> JobView:
    needed = changes.pop("needed_progress", 0.0)
    known = structs.replace(profile(name), progress=made, needed_progress=needed)
    return job(name, profile=known, **changes)


def coadapt_counts(given_view: ClusterView) -> dict[str, int]:
    return counts(decide("coadapt", given_view))


# ------------------------------------------------------------------------------ weights


def test_weights_are_hesrpts_shares() -> None:
    left = np.array([30.0, 10.0, 20.0])  # places from the largest: 1, 3, 2
    assert hesrpt_weights(left, 0.0) == pytest.approx([1.0, 1.0, 1.0])
    # k^2 - (k - 1)^2 = 2k - 1
    assert hesrpt_weights(left, 0.5) == pytest.approx(np.array([1.0, 5.0, 3.0]) / 3)
    # k^4 - (k - 1)^4
    assert hesrpt_weights(left, 0.75) == pytest.approx(np.array([1.0, 65.0, 15.0]) / 27)


def test_equal_work_has_equal_weight() -> None:
    weights = hesrpt_weights(np.array([5.0, 1.0, 5.0, 9.0]), 0.5)
    # 9 has one job with at least as much, each 5 has three, 1 has four
    assert weights == pytest.approx(np.array([5.0, 7.0, 5.0, 1.0]) / 4.5)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=40), st.floats(0.05, 0.85))
def test_weights_are_positive_with_mean_1_and_fall_with_the_work(work: list[float], a: float) -> None:
    left = np.array(work)
    weights = hesrpt_weights(left, a)
    assert np.all(weights > 0)
    assert float(weights.mean()) == pytest.approx(1.0)
    assert np.all(np.diff(weights[np.argsort(left, kind="stable")]) <= 1e-9)


def test_weights_of_many_jobs_stay_finite() -> None:
    weights = hesrpt_weights(np.arange(20_000.0), 0.85)
    assert np.all(np.isfinite(weights))
    assert np.all(weights >= 0)


def test_a_job_without_a_model_counts_as_long_as_the_median_and_gets_at_most_one_slot() -> None:
    others = [with_progress("a", 990.0), with_progress("b", 0.0), with_progress("c", 0.0, max_progress=1e4)]
    given_view = view(*others, job("new"))
    left_s = estimate_all(models(given_view), work_left_s)
    assert left_s[0] < left_s[1] < left_s[2]
    assert left_s[3] == pytest.approx(left_s[1])
    assert coadapt_counts(view(with_progress("b", 0.0), job("new")))["new"] == 1
    alone = view(job("new"))
    assert this_round().weights(models(alone), alone) == [1.0]


@given(SEEDS, st.randoms(use_true_random=False))
def test_weights_do_not_depend_on_names_or_order(seed: int, rng: Any) -> None:
    given_view = random_view(seed)
    order = list(range(len(given_view.jobs)))
    rng.shuffle(order)
    renamed = [
        structs.replace(given_view.jobs[j], spec=structs.replace(given_view.jobs[j].spec, id=f"x{n}"))
        for n, j in enumerate(order)
    ]
    other = structs.replace(given_view, jobs=tuple(renamed))
    if given_view.jobs:
        before = this_round().weights(models(given_view), given_view)
        assert this_round().weights(models(other), other) == pytest.approx(before[order])


@given(SEEDS)
def test_a_decision_does_not_depend_on_names(seed: int) -> None:
    given_view = random_view(seed)
    names = {one.spec.id: f"{99 - n}-x" for n, one in enumerate(given_view.jobs)}
    renamed = tuple(
        structs.replace(one, spec=structs.replace(one.spec, id=names[one.spec.id])) for one in given_view.jobs
    )
    policy = CoadaptPolicy()
    before = policy.decide(given_view, None, 0).allocations
    after = policy.decide(structs.replace(given_view, jobs=renamed), None, 0).allocations
    assert after == {names[name]: allocation for name, allocation in before.items()}


def test_a_job_without_a_model_has_at_least_the_mean_weight() -> None:
    """Next to many short jobs the median alone would leave it with the share of a long job."""
    others = [with_progress(f"short-{n}", 990.0) for n in range(4)]
    given_view = view(*others, job("new"))
    *known, new = this_round().weights(models(given_view), given_view)
    assert new == 1.0
    assert min(known) > new


def test_a_job_that_holds_no_slots_has_a_restart_ahead_of_it() -> None:
    given_view = view(with_progress("holds", 500.0), with_progress("waits", 500.0))
    holds, waits = models(given_view)
    assert this_round().weights([holds, waits], given_view) == pytest.approx([1.0, 1.0])
    holds.present = ((0, 1),)
    weights = this_round().weights([holds, waits], given_view)
    assert weights[0] > weights[1]


def test_a_nearly_finished_job_gets_more() -> None:
    made = coadapt_counts(view(with_progress("a", 10.0), with_progress("b", 900.0)))
    assert made["b"] > made["a"] > 0
    assert coadapt_counts(view(with_progress("a", 10.0), with_progress("b", 10.0))) == {"a": 4, "b": 4}


# ------------------------------------------------------------------------------ late jobs


def test_lateness_is_the_projected_finish_time_fairness() -> None:
    assert lateness(120.0, 20.0) == pytest.approx(1.2)
    assert lateness(120.0, 0.0) == 1.0
    assert lateness(120.0, -30.0) == pytest.approx(0.8)
    assert lateness(120.0, 120.0) == math.inf


def test_the_weight_of_a_late_job_has_a_floor_that_rises_to_the_mean() -> None:
    given_view = view(
        with_progress("big", 0.0, max_progress=10_000.0),
        *(with_progress(n, 900.0) for n in "abcd"),
        now_s=1000.0,
    )

    def weight(lag_s: float) -> float:
        return float(this_round(1000.0, big=lag_s).weights(models(given_view), given_view)[0])

    whole_s = 1000.0 + 10_000.0 * 16 / models(given_view)[0].fair_rate
    assert weight(0.0) < 0.3
    for late, floor in (((LATE + TOO_LATE) / 2, 0.5), (TOO_LATE, 1.0), (2.0, 1.0)):
        assert weight(whole_s * (1 - 1 / late)) == pytest.approx(floor)


def test_the_lag_behind_a_fair_share_is_kept_from_round_to_round() -> None:
    """Two jobs on 8 slots: one waits, the other has its fair share."""
    policy, memory = CoadaptPolicy(), None
    for now_s in (100.0, 110.0, 130.0):
        given_view = view(
            with_progress("has", 5.0, allocation=at((1, 4))), with_progress("waits", 5.0), now_s=now_s
        )
        decision = policy.decide(given_view, memory, 0)
        memory = msgspec.msgpack.decode(msgspec.msgpack.encode(decision.memory))
    assert memory == {"has": [pytest.approx(0.0), 130.0], "waits": [pytest.approx(30.0), 130.0]}
    saving = policy.decide(view(job("new"), now_s=140.0), memory, 0).memory
    assert saving == {**{name: tuple(lag) for name, lag in memory.items()}, "new": (0.0, 140.0)}
    back = policy.decide(view(with_progress("waits", 5.0), job("new"), now_s=150.0), saving, 0).memory
    assert back["waits"] == (pytest.approx(50.0), 150.0)
    assert back["new"] == (pytest.approx(10.0), 150.0)
    assert set(policy.decide(view(job("new"), now_s=195.0), back, 0).memory) == {"waits", "new"}
    assert set(policy.decide(view(job("new"), now_s=215.0), back, 0).memory) == {"new"}


# ------------------------------------------------------------------------------ exponent


def test_the_exponent_is_the_mean_slope_plus_delta() -> None:
    useless = structs.replace(NOISY, var=1e-9)  # a larger batch gains nothing

    def a_of(*statistics: GradientStatistics, delta: float = 0.0, **changes: Any) -> float:
        jobs = [
            job(
                f"j{n}",
                profile=profile(f"j{n}", 1, known, parameters=LINEAR),
                max_batch_size=10**6,
                min_atomic_batch=16,
                **changes,
            )
            for n, known in enumerate(statistics)
        ]
        given_view = view(*jobs)
        return exponent(models(given_view), given_view, delta)

    assert a_of(VERY_NOISY, VERY_NOISY, delta=-0.1) == pytest.approx(0.8), "linear speedup"
    assert a_of(VERY_NOISY, VERY_NOISY, delta=0.5) == pytest.approx(0.85), "the maximum"
    assert a_of(useless, useless) == pytest.approx(0.05), "the minimum"
    assert a_of(VERY_NOISY, useless) == pytest.approx((0.9 + 0.02) / 2)
    assert a_of(VERY_NOISY, VERY_NOISY, max_replicas=1) == 0.5, "no job can use several slots"


def test_the_exponent_extrapolates_beyond_the_profiled_replicas() -> None:
    def a_of(profiled: int) -> float:
        given_view = view(
            *(job(n, profile=profile(n, profiled, VERY_NOISY), max_batch_size=10**6) for n in "ab")
        )
        return exponent(models(given_view), given_view, 0.0)

    assert a_of(1) == a_of(8)


# ------------------------------------------------------------------------------ restarts


def test_a_restart_is_free_for_a_new_job_and_spread_over_the_time_left_for_others() -> None:
    def factor(one: JobView) -> float:
        given_view = view(one)
        return this_round().factor(models(given_view)[0], given_view)

    costly = structs.replace(profile(restart_s=24.0), progress=0.0)
    assert factor(job(profile=costly)) == 1.0
    runs = job(profile=costly, allocation=at((1, 1)), run_s=50.0, max_progress=1e9)
    assert factor(runs) == pytest.approx(1 - 24 / RESTART_HORIZON_S)
    # With 2 s left on all 8 slots, a restart of 24 s can never pay off.
    model = models(view(runs))[0]
    short = structs.replace(runs, spec=structs.replace(runs.spec, max_progress=2 * model.fair_rate / 16))
    assert factor(short) == pytest.approx(1 - 24 / 25)
    unmeasured = job(allocation=at((1, 1)), run_s=50.0)
    assert factor(unmeasured) == pytest.approx(1 - 1 / RESTART_HORIZON_S), "the cluster's default, 1 s"


# ------------------------------------------------------------------------------ work


def test_work_is_the_seconds_that_one_slot_takes_for_the_remaining_progress() -> None:
    one = models(view(with_progress("a", 400.0, max_progress=1000.0)))[0]
    assert work_left_s(one) == pytest.approx(600 * 16 / one.rates[0, 1])


def test_the_declared_progress_is_what_earlier_jobs_needed_or_else_the_budget() -> None:
    assert progress_left(with_progress("a", 100.0, max_progress=1000.0)) == 900.0
    assert progress_left(with_progress("a", 100.0, max_progress=1000.0, needed_progress=300.0)) == 200.0
    assert progress_left(with_progress("a", 100.0, max_progress=250.0, needed_progress=300.0)) == 150.0
    assert progress_left(job("a", max_progress=50.0)) == 50.0


def test_a_job_that_exceeded_its_declaration_has_as_much_left_as_it_has_made() -> None:
    over = with_progress("a", 400.0, max_progress=1000.0, needed_progress=300.0)
    assert progress_left(over) == 400.0
    assert progress_left(with_progress("a", 800.0, max_progress=1000.0, needed_progress=300.0)) == 200.0
    assert progress_left(with_progress("a", 1200.0, max_progress=1000.0)) == 1200.0


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=30), st.data())
def test_a_false_declaration_moves_each_other_job_by_at_most_one_rank(work: list[float], data: Any) -> None:
    honest = np.array(work)
    liar = data.draw(st.integers(0, len(work) - 1))
    lying = honest.copy()
    lying[liar] = data.draw(st.floats(0, 1e9))
    moved = np.delete(ranks(lying) - ranks(honest), liar)
    assert np.all(np.abs(moved) <= 1)


def test_declaring_too_little_helps_until_it_is_exceeded_and_hurts_afterwards() -> None:
    def share(made: float, declared: float) -> int:
        liar = with_progress("liar", made, max_progress=declared)
        return coadapt_counts(view(liar, with_progress("honest", made, max_progress=1000.0)))["liar"]

    assert share(100.0, 150.0) > 4, "its 150 steps seem nearly done"
    assert share(600.0, 150.0) < 4, "it is now expected to need 600 more steps, the other one 400"


def test_reasons_name_the_source_of_the_estimate() -> None:
    given_view = view(
        with_progress("a", 100.0),
        with_progress("b", 100.0, needed_progress=300.0),
        with_progress("c", 350.0, needed_progress=300.0),
        job("d"),
    )
    reasons = CoadaptPolicy().decide(given_view, None, 0).reasons
    assert reasons["a"].endswith("900 steps left in its budget; how many its target needs is unknown")
    assert "200 steps left, judging by earlier jobs of its application" in reasons["b"]
    assert "exceeded the expected 300 steps, assumed to be half done" in reasons["c"]
    assert "how many its target needs is unknown" in reasons["d"]


def test_a_new_job_of_a_remembered_application_may_get_several_slots_at_once() -> None:
    remembered = JobProfile(
        job_id="a", parameters=FAST_NETWORK, statistics=VERY_NOISY, application_replicas=2
    )
    assert coadapt_counts(view(job("a", profile=remembered)))["a"] == 8
    assert coadapt_counts(view(job("a")))["a"] == 1


def test_a_running_job_that_gains_little_stays_where_it_is() -> None:
    known = profile("a", 8, NOISY)
    placed = job("a", at((1, 4)), profile=known, run_s=10.0, config=JobConfig(atomic_batch=64))
    other = job(
        "b", at((2, 4)), profile=profile("b", 8, NOISY), run_s=10.0, config=JobConfig(atomic_batch=64)
    )
    decision = CoadaptPolicy().decide(view(placed, other, on=nodes(4, 4)), None, 0)
    assert decision.allocations == {"a": at((1, 4)), "b": at((2, 4))}
    assert decision.value == pytest.approx(decision.bound)
