"""What is to come in a world of events, by time, and what has happened. Pure."""

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from common.protocol import Event, Fact
from services.simulator.worlds.interface import Happening


class Timeline:
    """`stops`: facts after which time stands still, for the scheduler to answer them."""

    def __init__(self, stops: tuple[type, ...]) -> None:
        self.now_s = 0.0
        self._stops = stops
        self._stopped = False
        self._to_come: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._happened: list[Happening] = []

    def after(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._to_come, (self.now_s + seconds, next(self._order), act, arguments))

    def tell(self, source: str, what: Fact | Event) -> None:
        self._stopped = self._stopped or isinstance(what, self._stops)
        self._happened.append(Happening(self.now_s, source, what))

    def take(self) -> Sequence[Happening]:
        """What has been told since it was last asked for, by time."""
        happened, self._happened = self._happened, []
        return happened

    def advance(self, until_s: float) -> None:
        """Let come what comes up to `until_s`, or to the first fact that stops the time."""
        self._stopped = False
        while self._to_come and self._to_come[0][0] <= until_s and not self._stopped:
            self.now_s, _, act, arguments = heapq.heappop(self._to_come)
            act(*arguments)
        if not self._stopped:
            self.now_s = until_s
