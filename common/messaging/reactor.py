"""The poll loop of a service, in one thread: sockets, file descriptors, timers and the stop flag."""

import math
import time
from collections.abc import Callable

import zmq
import zmq.utils.z85

from common.lifecycle import StopFlag, Timer, Timers, get_logger

LINGER_MS = 200
"""After a close, messages already sent have this long to leave."""

Socket = zmq.Socket[bytes]
log = get_logger()


class Reactor:
    """Calls handlers when sockets or file descriptors are readable or a timer is due.

    A whole service runs in the thread that runs its reactor. If a handler raises, `run` raises the same
    exception: that is a bug of the service.
    """

    def __init__(self, stop: StopFlag, clock: Callable[[], float] = time.monotonic) -> None:
        self.stop = stop
        self.timers = Timers(clock)
        self._clock = clock
        self.context = zmq.Context()
        self._poller = zmq.Poller()
        self._handlers: dict[object, Callable[[], None]] = {}
        self._zap: Socket | None = None
        self._allowed: frozenset[bytes] = frozenset()
        self._refused: tuple[bytes, ...] = ()
        self.on_fd(stop.wakeup_fd, stop.drain)

    def every(self, interval_s: float, handler: Callable[[], None]) -> Timer:
        """Call `handler` every `interval_s`, first after one interval. A busy loop skips calls."""
        return self.timers.every(interval_s, handler)

    def call_later(self, delay_s: float, handler: Callable[[], None]) -> Timer:
        """Call `handler` once; with a delay of 0, after the other handlers that are due now."""
        return self.timers.call_later(delay_s, handler)

    def run(self) -> None:
        """Run until the stop flag is set."""
        while not self.stop.requested:
            self._turn(None)

    def run_until(self, predicate: Callable[[], object], timeout_s: float) -> bool:
        """Run until `predicate` holds, whatever the stop flag says; False if it does not within
        `timeout_s`."""
        end_s = self._clock() + timeout_s
        while not predicate():
            left_s = end_s - self._clock()
            if left_s <= 0:
                return False
            self._turn(left_s)
        return True

    def on_fd(self, fd: int, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `fd` is readable or closed at the other end."""
        self._handlers[fd] = handler
        self._poller.register(fd, zmq.POLLIN)

    def remove_fd(self, fd: int) -> None:
        self._handlers.pop(fd, None)
        if fd in self._poller:
            self._poller.unregister(fd)

    def on_socket(self, socket: Socket, handler: Callable[[], None]) -> None:
        """Call `handler` whenever the socket is readable. For this package only."""
        self._handlers[socket] = handler
        self._poller.register(socket, zmq.POLLIN)

    def close_socket(self, socket: Socket) -> None:
        self._handlers.pop(socket, None)
        self._poller.unregister(socket)
        socket.close()

    def guard(self, allowed: frozenset[bytes]) -> None:
        """Let only clients with these CURVE keys connect to the sockets bound here (ZeroMQ RFC 27, ZAP)."""
        if self._zap is None:
            self._zap = self.context.socket(zmq.REP)
            self._zap.bind("inproc://zeromq.zap.01")
            self.on_socket(self._zap, self._on_zap)
        self._allowed |= allowed

    def close(self) -> None:
        """Close all sockets that are still open; messages already sent have LINGER_MS to leave."""
        self.context.destroy(linger=LINGER_MS)

    def _on_zap(self) -> None:
        assert self._zap is not None
        version, request_id, _domain, address, _identity, mechanism, *credentials = self._zap.recv_multipart()
        known = mechanism == b"CURVE" and zmq.utils.z85.encode(credentials[0]) in self._allowed
        if not known and (*credentials, address) != self._refused:
            self._refused = (*credentials, address)
            log.warning("refused an unknown key", address=address.decode(errors="replace"))
        status = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._zap.send_multipart((version, request_id, *status, b"", b""))

    def _turn(self, timeout_s: float | None) -> None:
        waits = [s for s in (timeout_s, self.timers.seconds_to_next()) if s is not None]
        self._dispatch(math.ceil(min(waits) * 1000) if waits else None)
        self.timers.run_due()

    def _dispatch(self, timeout_ms: int | None) -> None:
        for key, _events in self._poller.poll(timeout_ms):
            if handler := self._handlers.get(key):
                handler()
