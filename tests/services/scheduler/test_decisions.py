"""Invalid decisions, as a user's own policy may make them, and how the core handles them."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from common.protocol import RoundDecided
from common.types import JobConfig, JobState
from services.scheduler.decisions import unchanged_because
from services.scheduler.policies.interface import Decision
from tests.fixtures.scheduler_driver import Driver, placed, run_job


def answer_with(driver: Driver, change: Callable[[Decision], Any]) -> None:
    """Let the policy return what `change` makes of its decision."""
    decide = driver.policy.decide
    driver.policy.decide = lambda *given: change(decide(*given))


def test_an_invalid_decision_changes_nothing_and_is_reported(driver: Driver) -> None:
    run_job(driver, a=1)
    driver.policy.give("job-1", placed(a=5), JobConfig(atomic_batch=16))
    driver.round()
    assert driver.job("job-1").allocation == placed(a=1)
    assert "no valid decision" in driver.events(RoundDecided)[-1].reasons["job-1"]


def test_a_policy_that_raises_changes_nothing_and_is_reported(driver: Driver) -> None:
    run_job(driver, a=1)

    def broken(*_: object) -> Decision:
        raise ZeroDivisionError("by design")

    driver.policy.decide = broken  # type: ignore[method-assign]
    driver.round()
    assert driver.job("job-1").allocation == placed(a=1)
    line = broken.__code__.co_firstlineno + 1
    assert f"ZeroDivisionError: by design (test_decisions.py, line {line})" in driver.job("job-1").reason


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"configs": {"job-1": JobConfig(atomic_batch=np.int64(16))}}, "configs: .* numpy.int64 is unsupp"),
        ({"configs": {"job-1": JobConfig(atomic_batch=16.0)}}, "configs: Expected `int`, got `float`"),  # type: ignore[arg-type]
        ({"allocations": {"job-1": placed(a=np.int32(1))}}, "allocations: .* numpy.int32 is unsupported"),
        ({"allocations": {"job-1": placed(a=1.5)}}, "allocations: Expected `int`, got `float`"),  # type: ignore[arg-type]
        ({"reasons": {"job-1": None}}, "reasons: Expected `str`, got"),
        ({"reasons": {"job-1": 7}}, "reasons: Expected `str`, got `int`"),
        ({"reasons": {"job-1": "\udcff"}}, "reasons: .* surrogates not allowed"),
        ({"value": np.float64(0.5)}, "value: .* numpy.float64 is unsupported"),
        ({"value": "high"}, "value: Expected `float | null`, got `str`"),
        ({"value": float("nan")}, "value is nan; allowed: a finite number or None"),
        ({"bound": float("inf")}, "bound is inf; allowed: a finite number or None"),
    ],
)
def test_a_decision_with_wrong_types_changes_nothing_and_is_reported(
    driver: Driver, changes: dict[str, Any], problem: str
) -> None:
    run_job(driver, a=2)
    answer_with(driver, lambda decision: msgspec.structs.replace(decision, memory="lost", **changes))
    driver.round()
    assert driver.job("job-1").allocation == placed(a=2)
    assert driver.state.memory is None
    event = driver.events(RoundDecided)[-1]
    start = unchanged_because("scripted")
    assert re.match(f"{re.escape(start)}{problem}".replace("|", r"\|"), event.reasons["job-1"])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=RoundDecided) == event


def test_a_missing_decision_changes_nothing_and_is_reported(driver: Driver) -> None:
    run_job(driver, a=2)
    answer_with(driver, lambda _: None)
    driver.round()
    assert driver.job("job-1").allocation == placed(a=2)
    assert "it is of type NoneType; needed: Decision" in driver.job("job-1").reason


def test_a_failure_is_reported_in_characters_that_a_log_can_hold(driver: Driver) -> None:
    def broken(_: Decision) -> Decision:
        raise ValueError("\udcff")

    run_job(driver)
    answer_with(driver, broken)
    driver.round()
    assert r"ValueError: \udcff (" in driver.job("job-1").reason


def test_lists_and_whole_numbers_are_converted(driver: Driver) -> None:
    run_job(driver, a=2)
    memory = object()
    changes: dict[str, Any] = {"allocations": {"job-1": []}, "value": 1, "memory": memory}
    answer_with(driver, lambda decision: msgspec.structs.replace(decision, **changes))
    driver.round()
    event = driver.events(RoundDecided)[-1]
    assert (event.allocations, event.reasons) == ({"job-1": ()}, {"job-1": "by script"})
    assert isinstance(event.value, float)
    assert driver.job("job-1").state is JobState.PREEMPTING
    assert driver.state.memory is memory
