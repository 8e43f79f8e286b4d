"""Calls that may never return, with a bound on how long the caller waits for them."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Calls = SimpleQueue[tuple[Callable[[], Any], SimpleQueue[tuple[Any, BaseException | None]]] | None]


class BoundedCaller:
    """Makes calls one after the other in a thread of its own.

    A call that takes too long is abandoned together with its thread; the next call gets a new thread. The
    abandoned thread ends if the call ever returns. Threads are daemons, so the process can exit while one
    still hangs; the threads of `concurrent.futures` would block the exit.
    """

    def __init__(self) -> None:
        self._calls: Calls | None = None

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Return or raise what `function` returns or raises; raise TimeoutError after `timeout_s`."""
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_make_calls, args=(self._calls,), daemon=True).start()
        answer: SimpleQueue[tuple[T, BaseException | None]] = SimpleQueue()
        self._calls.put((function, answer))
        try:
            value, error = answer.get(timeout=timeout_s)
        except Empty:
            self._calls.put(None)
            self._calls = None
            raise TimeoutError(f"no answer in {timeout_s:g} s") from None
        if error is not None:
            raise error
        return value


def _make_calls(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        function, answer = call
        try:
            answer.put((function(), None))
        except BaseException as error:
            answer.put((None, error))
        # Release the objects now; otherwise they would live until the next call.
        del call, function, answer
