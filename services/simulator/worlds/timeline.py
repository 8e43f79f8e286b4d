"""Pending actions of an event-driven world, ordered by time, and the events they have produced. Pure."""

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from common.protocol import Event, Fact
from services.simulator.worlds.interface import WorldEvent


class Timeline:
    """`stops` are the facts that stop the clock, so that the scheduler can respond to them."""

    def __init__(self, stops: tuple[type, ...]) -> None:
        self.now_s = 0.0
        self._stops = stops
        self._stopped = False
        self._pending: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._events: list[WorldEvent] = []

    def after(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._pending, (self.now_s + seconds, next(self._order), act, arguments))

    def emit(self, source: str, content: Fact | Event) -> None:
        self._stopped = self._stopped or isinstance(content, self._stops)
        self._events.append(WorldEvent(self.now_s, source, content))

    def take_events(self) -> Sequence[WorldEvent]:
        """The events since the last call, in order of time."""
        events, self._events = self._events, []
        return events

    def advance(self, until_s: float) -> None:
        """Run the actions that are due by `until_s`, up to the first fact that stops the clock."""
        self._stopped = False
        while self._pending and self._pending[0][0] <= until_s and not self._stopped:
            self.now_s, _, act, arguments = heapq.heappop(self._pending)
            act(*arguments)
        if not self._stopped:
            self.now_s = until_s
