"""Calls in their own thread. The tests release hanging calls with events."""

import threading

import pytest

from workloads.trainer.bounded_call import BoundedCaller

LONG_S = 30.0


def test_a_call_returns_or_raises_what_its_function_does() -> None:
    caller = BoundedCaller()
    assert caller.call(lambda: 3, LONG_S) == 3
    with pytest.raises(ZeroDivisionError):
        caller.call(lambda: 1 // 0, LONG_S)
    assert caller.call(lambda: 4, LONG_S) == 4


def test_one_thread_makes_all_calls_as_long_as_none_hangs() -> None:
    caller = BoundedCaller()
    threads = {caller.call(threading.current_thread, LONG_S) for _ in range(5)}
    assert len(threads) == 1
    assert threads.pop().daemon


def test_a_call_that_hangs_is_abandoned_and_does_not_delay_the_next() -> None:
    caller = BoundedCaller()
    first = caller.call(threading.current_thread, LONG_S)
    let_go = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        caller.call(let_go.wait, 0.05)
    second = caller.call(threading.current_thread, LONG_S)
    assert second is not first
    assert first.is_alive()
    let_go.set()
    first.join(LONG_S)
    assert not first.is_alive()
    assert caller.call(threading.current_thread, LONG_S) is second
