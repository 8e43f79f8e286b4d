"""Publish/subscribe for events and orders.

ZeroMQ may lose published messages. Therefore events are numbered and repaired, and orders are versioned and
repeated (DESIGN section 3). A message has two frames: the name of the event and an EventRecord, or "Orders"
and an Orders struct.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from common.codec import DecodeError, decode, encode
from common.config import EndpointsConfig, LimitsConfig
from common.messaging.curve_keys import Keys, load_keys
from common.messaging.outbox import Delivery, Origin, event_limits
from common.messaging.reactor import Reactor
from common.messaging.request_reply import RequestClient, log_bad
from common.messaging.sockets import PubSocket, SubSocket
from common.protocol import Event, EventRecord, Orders

LIMITS = LimitsConfig()
ORDERS_TOPIC = "Orders"
T = TypeVar("T")


class EventPublisher:
    """Numbers, keeps and sends the events of one source.

    The logger acknowledges every event; the collector uses those that arrive. `incarnation` must be new at
    every start of the process.
    """

    def __init__(
        self,
        reactor: Reactor,
        run_id: str,
        source: str,
        incarnation: str,
        endpoints: EndpointsConfig,
        outbox_dir: Path,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        limits: LimitsConfig = LIMITS,
    ) -> None:
        self._reactor = reactor
        self._monotonic = monotonic
        self._wall = wall
        limits = event_limits(limits)
        keys = load_keys(endpoints.keys_dir)
        self._client = RequestClient(endpoints.logger_requests, keys, reactor, limits)
        origin = Origin(run_id, source, incarnation)
        self._delivery = Delivery(origin, outbox_dir, self._client, reactor.timers, limits)
        self._socket = PubSocket(reactor, limits)
        self._socket.connect(endpoints.logger_events, keys)
        self._socket.connect(endpoints.collector_events, keys)

    @property
    def pending(self) -> int:
        """Events that the logger has not acknowledged, those of earlier incarnations included."""
        return self._delivery.pending

    def publish(self, event: Event) -> None:
        """Keep the event and send it, without blocking. Raises ValueError beyond twice
        `limits.message_bytes`."""
        data = self._delivery.keep(event, self._monotonic(), self._wall())
        self._socket.send(type(event).__name__.encode(), data)

    def close(self, timeout_s: float = 1.0) -> bool:
        """Wait at most `timeout_s` until the logger has all events. If it has not, return False and leave the
        outbox to the next publisher of this source, or to the logger."""
        end_s = time.monotonic() + timeout_s
        self._delivery.flush()
        flushed = self._reactor.run_until(lambda: self._delivery.pending == 0, timeout_s)
        if flushed:
            said: list[bool] = []
            self._delivery.say_goodbye(lambda: said.append(True))
            self._reactor.run_until(lambda: bool(said), end_s - time.monotonic())
        self._delivery.close()
        self._client.close()
        self._socket.close()
        return flushed


def _decode(
    frames: list[bytes], kind: type[T], limits: LimitsConfig, on_bad: Callable[[str], None]
) -> T | None:
    """The struct in the last frame. If it cannot be decoded, `on_bad` gets the reason, and the result is
    None."""
    try:
        return decode(frames[-1], kind, limits)
    except DecodeError as error:
        on_bad(str(error))
        return None


class EventSubscriber:
    """Binds the endpoint to which publishers send their events.

    `handle` gets each record whose event is in `topics` (names of events; empty: all). `on_bad` gets the
    reason why a message was refused. Raises EndpointError.
    """

    def __init__(
        self,
        reactor: Reactor,
        endpoint: str,
        topics: Sequence[str],
        handle: Callable[[EventRecord], None],
        on_bad: Callable[[str], None] = log_bad,
        keys: Keys | None = None,
        limits: LimitsConfig = LIMITS,
    ) -> None:
        self._handle = handle
        self._on_bad = on_bad
        self._limits = event_limits(limits)
        self._socket = SubSocket(reactor, topics, self._on_messages, self._limits)
        self.endpoint = self._socket.bind(endpoint, keys)

    def close(self) -> None:
        self._socket.close()

    def _on_messages(self, messages: list[list[bytes]]) -> None:
        for frames in messages:
            if record := _decode(frames, EventRecord, self._limits, self._on_bad):
                self._handle(record)


class OrdersPublisher:
    """Binds the endpoint at which agents and monitors receive orders. Raises EndpointError."""

    def __init__(
        self,
        reactor: Reactor,
        endpoint: str,
        keys: Keys | None = None,
        limits: LimitsConfig = LIMITS,
    ) -> None:
        self._socket = PubSocket(reactor, limits)
        self.endpoint = self._socket.bind(endpoint, keys)

    def publish(self, orders: Orders) -> None:
        """Send orders without blocking. A subscriber that does not keep up misses some."""
        self._socket.send(ORDERS_TOPIC.encode(), encode(orders))

    def close(self) -> None:
        self._socket.close()


class OrdersSubscriber:
    """Connects to the scheduler's orders. If several orders wait, `handle` gets only the newest."""

    def __init__(
        self,
        reactor: Reactor,
        endpoint: str,
        handle: Callable[[Orders], None],
        on_bad: Callable[[str], None] = log_bad,
        keys: Keys | None = None,
        limits: LimitsConfig = LIMITS,
    ) -> None:
        self._handle = handle
        self._on_bad = on_bad
        self._limits = limits
        self._socket = SubSocket(reactor, (ORDERS_TOPIC,), self._on_messages, limits)
        self._socket.connect(endpoint, keys)

    def close(self) -> None:
        self._socket.close()

    def _on_messages(self, messages: list[list[bytes]]) -> None:
        if messages and (orders := _decode(messages[-1], Orders, self._limits, self._on_bad)):
            self._handle(orders)
