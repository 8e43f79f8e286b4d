"""srtf: shortest estimated remaining time first."""

import pytest
from msgspec import structs

from common.types import GradientStatistics
from services.scheduler.policies.interface import JobView
from services.scheduler.policies.srtf import remaining_s
from tests.fixtures.known_models import CLEAN, NOISY
from tests.fixtures.policy_views import apply, at, counts, decide, job, nodes, profile, view


def known(name: str, progress: float, statistics: GradientStatistics = CLEAN, **changes: object) -> JobView:
    done = profile(name, statistics=statistics, progress=progress)
    return job(name, profile=done, **changes)


def test_the_job_with_least_time_left_runs_and_others_fill_the_rest() -> None:
    long, short = known("long", 100.0, replicas=6), known("short", 900.0, replicas=6)
    middle = known("middle", 500.0, replicas=2)
    decision = decide("srtf", view(long, middle, short))
    assert counts(decision) == {"long": 0, "middle": 2, "short": 6}
    assert "s to its declared progress" in decision.reasons["short"]
    assert decision.reasons["long"].endswith("requests 6 replicas, but the jobs before it leave 0 slots")


def test_a_job_that_cannot_be_estimated_goes_first_and_its_reason_says_so() -> None:
    decision = decide("srtf", view(known("a", 999.0, replicas=8), job("b", replicas=4)))
    assert counts(decision) == {"a": 0, "b": 4}
    assert "its remaining time is unknown" in decision.reasons["b"]


def test_the_estimate_is_the_remaining_progress_at_the_modelled_goodput() -> None:
    running = known("a", 400.0, allocation=at((1, 2)), replicas=2, batch_size=64)
    seconds = 0.01 + 32 * 0.002
    step_s = (seconds**1.5 + 0.005**1.5) ** (1 / 1.5)  # within one node
    gain = (0.05 + 1) / (0.05 / 4 + 1)
    expected_s = (1000.0 - 400.0) / gain * step_s
    assert remaining_s(running, 4, 1.0) == pytest.approx(expected_s)
    waiting = known("a", 400.0, replicas=2, batch_size=64)
    assert remaining_s(waiting, 4, 1.0) == pytest.approx(expected_s + 0.1), "its restart comes on top"
    overrun = known("a", 2000.0, allocation=at((1, 2)))
    assert remaining_s(overrun, 4, 1.0) == 0.0


def test_a_larger_batch_gains_nothing_until_its_statistics_are_trusted() -> None:
    vague = GradientStatistics(sqr=1e-9, var=1e9, trusted=False)
    trusted, untrusted = known("a", 0.0, NOISY, batch_size=256), known("a", 0.0, vague, batch_size=256)
    assert remaining_s(untrusted, 4, 1.0) > 3 * remaining_s(trusted, 4, 1.0)  # type: ignore[operator]
    reason = decide("srtf", view(untrusted)).reasons["a"]
    assert reason.endswith("at most: its gradient statistics do not show yet what its larger batch gains")


def test_two_equal_jobs_do_not_take_turns() -> None:
    a, b = known("a", 500.0, replicas=8), known("b", 500.5, replicas=8)
    first = decide("srtf", view(a, b))
    assert counts(first) == {"a": 0, "b": 8}
    running = apply(first, view(a, b))
    ahead = known("a", 500.6, replicas=8)
    after = view(ahead, running.jobs[1], now_s=101.0)
    assert counts(decide("srtf", after)) == {"a": 0, "b": 8}


def test_a_spread_out_job_does_not_keep_swapping_with_an_equal_one() -> None:
    ones = [known(name, 990.0, allocation=at((n, 1)), replicas=1) for n, name in enumerate("xy", start=1)]
    a, b = (known(name, 500.0, replicas=2) for name in "ab")
    present = view(*ones, structs.replace(a, allocation=at((1, 1), (2, 1))), b, on=nodes(2, 2))
    for _ in range(4):
        decision = decide("srtf", present)
        assert counts(decision) == {"x": 1, "y": 1, "a": 2, "b": 0}
        present = apply(decision, present)
