"""Request/reply between processes: `RequestClient` sends, `ReplyServer` answers (DESIGN section 3).

A client repeats a request under the same id a bounded number of times. The server carries it out once, and
never after its client has given up.
"""

import contextlib
import errno
import itertools
import math
import os
import select
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from common.codec import DecodeError, convert, decode, encode, unpack
from common.config import LimitsConfig
from common.lifecycle import EXIT_UNAVAILABLE, Timer, Timers, UserError, get_logger
from common.messaging.curve_keys import Keys
from common.messaging.reactor import Reactor, Socket
from common.messaging.sockets import (
    DRAIN_MESSAGES,
    bind_socket,
    connect_socket,
    drain,
    open_socket,
    send_if_possible,
)
from common.protocol import PROTOCOL_VERSION, Refused, Reply, ReplyFrame, Request, RequestFrame

REMEMBER_S = 30.0
"""How long a server remembers a reply."""
REMEMBER_BYTES = 4_000_000
"""Total size of the requests and replies that a server remembers."""
MAX_ID_CHARS = 100
MAX_WAIT_S = 4.5
"""The longest time that a blocking request takes, so that a command ends within 5 s."""
RECEIPT = b""
"""A server sends this before it carries out a request, to check that the client is still connected."""
LIMITS = LimitsConfig()

log = get_logger()


def log_bad(text: str) -> None:
    """The default reaction to a bad message: a line in the log."""
    log.warning("bad message", error=text)


class ServerUnavailable(UserError):
    """A request got no reply. `waited_s` is None if no server received it; otherwise the server received it
    and did not answer within this time."""

    exit_code = EXIT_UNAVAILABLE

    def __init__(self, endpoint: str, waited_s: float | None = None) -> None:
        if waited_s is None:
            super().__init__(f"the server at {endpoint} does not answer: is the stack running?")
        else:
            super().__init__(
                f"the server at {endpoint} received the request but did not answer within {waited_s:g} s: "
                "the request may or may not have been carried out"
            )


class RememberedReplies:
    """The replies to recent requests, so that a repeated request is answered but not carried out again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replies: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self._size_bytes = 0

    def get(self, request: bytes) -> bytes | None:
        entry = self._replies.get(request)
        return entry[1] if entry else None

    def put(self, request: bytes, reply: bytes) -> None:
        now_s = self._clock()
        self._replies[request] = (now_s, reply)
        self._size_bytes += len(request) + len(reply)
        while self._replies:
            oldest, (put_s, old_reply) = next(iter(self._replies.items()))
            if now_s - put_s < REMEMBER_S and self._size_bytes <= REMEMBER_BYTES:
                break
            del self._replies[oldest]
            self._size_bytes -= len(oldest) + len(old_reply)


class RequestHandler:
    """Turns the bytes of a request, whatever they are, into the bytes of its reply.

    `handle` gets each valid request once. Any other request is answered by Refused, and `on_bad` gets the
    reason.
    """

    def __init__(
        self, handle: Callable[[Request], Reply], on_bad: Callable[[str], None], limits: LimitsConfig
    ) -> None:
        self._handle = handle
        self._on_bad = on_bad
        self._limits = limits
        self._remembered = RememberedReplies()

    def answer(self, data: bytes) -> bytes:
        reply = self._remembered.get(data)
        if reply is None:
            try:
                frame = _request_frame(unpack(data, self._limits))
            except DecodeError as error:
                return self.refuse(str(error), _id_of(data))
            reply = encode(ReplyFrame(id=frame.id, reply=self._handle(frame.request)))
            self._remembered.put(data, reply)
        return reply

    def refuse(self, text: str, frame_id: str = "") -> bytes:
        self._on_bad(text)
        return encode(ReplyFrame(id=frame_id, reply=Refused(reason=text)))


def _request_frame(tree: Any) -> RequestFrame:
    version = tree.get("version") if isinstance(tree, dict) else None
    if isinstance(version, int) and version != PROTOCOL_VERSION:
        raise DecodeError(f"protocol version {version}; this side speaks {PROTOCOL_VERSION}")
    frame: RequestFrame = convert(tree, RequestFrame)
    if len(frame.id) > MAX_ID_CHARS:
        raise DecodeError(f"id of {len(frame.id)} characters; at most {MAX_ID_CHARS} are allowed")
    return frame


def _id_of(data: bytes) -> str:
    """The id of a request that is otherwise bad, such as too large; "" if it has none."""
    try:
        tree = unpack(data, LimitsConfig(message_bytes=max(1, len(data))))
    except DecodeError:
        return ""
    found = tree.get("id") if isinstance(tree, dict) else None
    return found[:MAX_ID_CHARS] if isinstance(found, str) else ""


class RequestEncoder:
    """Encodes the requests of one client, each with an id that no other request has, and decodes replies."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._name = os.urandom(16).hex()
        self._numbers = itertools.count(1)

    def request_bytes(self, request: Request) -> tuple[str, bytes]:
        """The id and the bytes of a request. Raises UserError if it is larger than the server accepts."""
        frame_id = f"{self._name}-{next(self._numbers)}"
        data = encode(RequestFrame(id=frame_id, request=request))
        if len(data) > self._limits.message_bytes:
            raise UserError(
                f"{type(request).__name__} of {len(data)} bytes; "
                f"at most limits.message_bytes = {self._limits.message_bytes} are allowed"
            )
        return frame_id, data

    def reply_frame(self, data: bytes) -> ReplyFrame | None:
        """The reply; None, and a line in the log, for bytes that are not a reply."""
        try:
            return decode(data, ReplyFrame, self._limits)
        except DecodeError as error:
            log.warning("bad reply", error=str(error))
            return None


@dataclass
class PendingRequest:
    """One request that waits for its reply."""

    data: bytes
    on_reply: Callable[[Reply], None]
    on_silence: Callable[[], None]
    timeout_s: float
    attempts: int
    timer: Timer | None = None


class PostedRequests:
    """Requests that wait for their replies, each with its own timeout and number of attempts.

    After a timeout the connection is closed and reopened (`reopen`), which discards everything still queued
    on it, and all waiting requests are sent again.
    """

    def __init__(self, timers: Timers, send: Callable[[bytes], None], reopen: Callable[[], None]) -> None:
        self._timers = timers
        self._send = send
        self._reopen = reopen
        self._posted: dict[str, PendingRequest] = {}

    def post(
        self,
        frame_id: str,
        data: bytes,
        on_reply: Callable[[Reply], None],
        on_silence: Callable[[], None],
        timeout_s: float,
        attempts: int,
    ) -> None:
        self._posted[frame_id] = posted = PendingRequest(data, on_reply, on_silence, timeout_s, attempts)
        self._send(data)
        self._wait(frame_id, posted)

    def take(self, frame: ReplyFrame) -> None:
        """Pass a reply to its request. Late and repeated replies are ignored."""
        posted = self._posted.pop(frame.id, None)
        if posted:
            if posted.timer:
                posted.timer.cancel()
            posted.on_reply(frame.reply)

    def forget(self) -> None:
        """Drop all waiting requests."""
        for posted in self._posted.values():
            if posted.timer:
                posted.timer.cancel()
        self._posted.clear()

    def _wait(self, frame_id: str, posted: PendingRequest) -> None:
        posted.timer = self._timers.call_later(posted.timeout_s, lambda: self._on_timeout(frame_id))

    def _on_timeout(self, frame_id: str) -> None:
        posted = self._posted[frame_id]
        posted.attempts -= 1
        if posted.attempts <= 0:
            del self._posted[frame_id]
        self._reopen()
        for waiting in self._posted.values():
            self._send(waiting.data)
        if posted.attempts > 0:
            self._wait(frame_id, posted)
        else:
            posted.on_silence()


class ReplyServer:
    """Answers requests at `endpoint`: `handle` gets a valid Request and returns its Reply.

    A repeated request gets the remembered reply. Bytes that are not a request are answered by Refused, and
    `on_bad` gets the reason. A request is not carried out if its client has closed the connection: that
    client has given up and told its user so. Raises EndpointError.
    """

    def __init__(
        self,
        reactor: Reactor,
        endpoint: str,
        handle: Callable[[Request], Reply],
        keys: Keys | None = None,
        on_bad: Callable[[str], None] = log_bad,
        limits: LimitsConfig = LIMITS,
    ) -> None:
        self._reactor = reactor
        self._handler = RequestHandler(handle, on_bad, limits)
        self._socket = open_socket(reactor.context, zmq.ROUTER, limits)
        self._socket.router_mandatory = True
        self.endpoint = bind_socket(reactor, self._socket, endpoint, keys)
        reactor.on_socket(self._socket, self._on_readable)

    def close(self) -> None:
        self._reactor.close_socket(self._socket)

    def _on_readable(self) -> None:
        for _ in range(DRAIN_MESSAGES):
            try:
                client, *frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            if frames and self._still_waits(client.bytes, frames[-1]):
                self._send(client.bytes, self._answer(frames))

    def _answer(self, frames: list[zmq.Frame]) -> bytes:
        if len(frames) > 1:
            return self._handler.refuse(f"a request of {len(frames)} frames; one is allowed")
        return self._handler.answer(frames[0].bytes)

    def _still_waits(self, client: bytes, frame: zmq.Frame) -> bool:
        """Whether the client is still connected. The kernel notices a disconnection first, but cannot be
        asked about peers with an old protocol; libzmq can, once reading EVENTS has refreshed its view."""
        poll = select.poll()
        with contextlib.suppress(zmq.ZMQError):
            poll.register(frame.get(zmq.SRCFD), select.POLLRDHUP)
        hung_up = poll.poll(0)
        self._socket.getsockopt(zmq.EVENTS)
        return not hung_up and self._send(client, RECEIPT)

    def _send(self, client: bytes, data: bytes) -> bool:
        try:
            self._socket.send_multipart((client, data), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                return False
            raise
        return True


class RequestClient:
    """Sends requests to the server at `endpoint`. `request` waits for the reply; `post` does not, and needs a
    reactor.

    After a timeout the connection is closed, which discards everything queued on it, and a new connection
    repeats the request under the same id. After the last attempt nothing is left that could be carried out
    later.
    """

    def __init__(
        self,
        endpoint: str,
        keys: Keys | None = None,
        reactor: Reactor | None = None,
        limits: LimitsConfig = LIMITS,
    ) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._reactor = reactor
        self._limits = limits
        self._context = zmq.Context()
        self._frames = RequestEncoder(limits)
        self._socket: Socket | None = None
        self._posted = PostedRequests(reactor.timers, self._send, self._disconnect) if reactor else None

    def request(self, request: Request, timeout_s: float = 1.0, attempts: int = 3) -> Reply:
        """The reply. Raises ServerUnavailable after `attempts` timeouts of `timeout_s`, or after MAX_WAIT_S.
        A server that has received the request gets all of MAX_WAIT_S."""
        frame_id, data = self._frames.request_bytes(request)
        end_s = time.monotonic() + MAX_WAIT_S
        received = False
        while (attempts > 0 or received) and time.monotonic() < end_s:
            attempts -= 1
            wait_end_s = min(time.monotonic() + timeout_s, end_s)
            with contextlib.closing(self._connected(self._context)) as socket:
                send_if_possible(socket, data)
                while socket.poll(max(0, math.ceil((wait_end_s - time.monotonic()) * 1000))):
                    answer = socket.recv()
                    received = received or answer == RECEIPT
                    frame = self._frames.reply_frame(answer) if answer != RECEIPT else None
                    if frame and frame.id == frame_id:
                        return frame.reply
        self._context.term()  # Returns when the connections are closed: nothing can be delivered any more.
        self._context = zmq.Context()
        raise ServerUnavailable(self.endpoint, MAX_WAIT_S if received else None)

    def post(
        self,
        request: Request,
        on_reply: Callable[[Reply], None],
        on_silence: Callable[[], None],
        timeout_s: float = 1.0,
        attempts: int = 3,
    ) -> None:
        """Call `on_reply` with the reply, or `on_silence` after `attempts` timeouts of `timeout_s`."""
        assert self._posted is not None, "post needs a reactor"
        frame_id, data = self._frames.request_bytes(request)
        self._posted.post(frame_id, data, on_reply, on_silence, timeout_s, attempts)

    def close(self) -> None:
        """Drop all unanswered requests and close the connection."""
        if self._posted:
            self._posted.forget()
            self._disconnect()
        self._context.destroy(linger=0)  # also closes a socket that a Ctrl-C left open

    def _connected(self, context: zmq.Context[Socket]) -> Socket:
        socket = open_socket(context, zmq.DEALER, self._limits)
        socket.linger = 0
        connect_socket(socket, self.endpoint, self._keys)
        return socket

    def _send(self, data: bytes) -> None:
        assert self._reactor is not None
        if self._socket is None:
            self._socket = self._connected(self._reactor.context)
            self._reactor.on_socket(self._socket, self._on_readable)
        send_if_possible(self._socket, data)

    def _on_readable(self) -> None:
        assert self._socket is not None
        assert self._posted is not None
        for *_, answer in list(drain(self._socket)):
            frame = self._frames.reply_frame(answer) if answer != RECEIPT else None
            if frame:
                self._posted.take(frame)

    def _disconnect(self) -> None:
        if self._socket is not None:
            assert self._reactor is not None
            self._reactor.close_socket(self._socket)
            self._socket = None
