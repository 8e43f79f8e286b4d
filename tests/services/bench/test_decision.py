"""The benchmark of decisions, in its smallest form."""

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from common.lifecycle import UserError
from services.bench.decision import first_view, next_view, run
from services.scheduler.policies.fixed import FixedPolicy
from services.scheduler.policies.interface import ClusterView, Decision
from services.scheduler.policies.registry import BUILT_IN, make_policy


def test_a_result_has_the_times_and_how_close_to_the_bound_the_decisions_are() -> None:
    found = run(jobs=8, nodes=4, slots=2, rounds=4, policy_name="pollux", seed=0)
    for key in ("decision_ms", "decision_cpu_ms"):
        spread = found[key]
        assert 0.0 < spread["p50"] <= spread["p99"] <= spread["max"]
        assert 0.0 < spread["mean"] <= spread["max"]
        assert 0.0 < spread["first"] <= spread["max"]
    assert 0.9 < found["value_over_bound_least"] <= found["value_over_bound"] <= 1.0 + 1e-9
    assert 0.5 < found["slots_used"] <= 1.0


def test_a_policy_without_a_bound_is_timed_too() -> None:
    found = run(jobs=4, nodes=2, slots=2, rounds=2, policy_name="fixed", seed=0)
    assert found["value_over_bound"] is None
    assert found["decision_ms"]["mean"] > 0.0


def test_rounds_have_jobs_in_all_stages() -> None:
    rng, policy = random.Random(1), make_policy("pollux")
    view = first_view(rng, jobs=20, nodes=16, slots=4)
    jobs = list(view.jobs)
    for number in range(8):
        view = next_view(rng, view, policy.decide(view, None, number), number)
        assert len(view.jobs) == 20
        jobs += view.jobs
    assert any(job.profile is None for job in jobs), "new"
    assert any(job.profile is not None and not job.allocation for job in jobs), "profiled, waiting"
    assert any(job.restarts > 0 for job in jobs), "resized"
    assert any(len(job.allocation) > 1 for job in jobs), "on several nodes"
    assert all(job.config is not None for job in jobs if job.allocation)


def test_the_same_seed_gives_the_same_decisions() -> None:
    one, two = (run(10, 4, 4, 3, "pollux", seed=5) for _ in range(2))
    for key in ("value_over_bound", "value_over_bound_least", "slots_used"):
        assert one[key] == two[key]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda: None, "round 2: it is of type NoneType; needed: Decision"),
        (lambda: sys.exit(0), "round 2: SystemExit: 0"),
        (lambda: 1 // 0, "round 2: ZeroDivisionError"),
    ],
)
def test_a_policy_that_fails_is_named_with_its_round_and_problem(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Any], problem: str
) -> None:
    class Failing(FixedPolicy):
        def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
            return super().decide(view, memory, seed) if seed == 0 else answer()

    monkeypatch.setitem(BUILT_IN, "failing", Failing)
    with pytest.raises(UserError, match=f"policy 'failing' gave no valid decision in {problem}"):
        run(2, 2, 2, 3, "failing", 0)


def test_a_policy_that_is_unknown_or_needs_a_simulator_is_refused() -> None:
    with pytest.raises(UserError, match="'best': not one of"):
        run(1, 1, 1, 1, "best", 0)
    with pytest.raises(UserError, match="only a simulator knows"):
        run(1, 1, 1, 1, "optimus", 0)
