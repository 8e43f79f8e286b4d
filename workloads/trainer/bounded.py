"""Calls that may never return, with a bound on the wait for them."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Calls = SimpleQueue[tuple[Callable[[], Any], SimpleQueue[tuple[Any, BaseException | None]]] | None]


class BoundedCaller:
    """Makes calls one after the other, in a thread of its own. A call that takes too long is left behind
    together with its thread, which ends should the call ever return; the next one gets a new thread.

    The threads are daemons: the end of the process does not wait for them, which rules out those of
    `concurrent.futures`.
    """

    def __init__(self) -> None:
        self._calls: Calls | None = None

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """What `function` returns or raises; TimeoutError after `timeout_s` without either."""
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), daemon=True).start()
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


def _serve(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        function, answer = call
        try:
            answer.put((function(), None))
        except BaseException as error:
            answer.put((None, error))
        # What was asked and answered must not live on until the next call.
        del call, function, answer
