"""Everything that coadapt does with ZeroMQ; no other module imports `zmq`.

Requests and events are described in `common/protocol.py`, and DESIGN section 3 says what they guarantee:

* ReplyServer and RequestClient: a request is repeated a bounded number of times under one id, carried out
  once, and never after its client has given up (`common/requests.py` has the bookkeeping).
* EventPublisher, EventSubscriber, OrdersPublisher, OrdersSubscriber (`common/pubsub.py`, around the sockets
  of this module): pub/sub may lose, so events are numbered and repaired, orders versioned and repeated.

All of it runs in one thread around one Reactor. Bytes that are not what they should be are refused with a
text and never stop a service.
"""

import contextlib
import errno
import math
import select
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import zmq
import zmq.utils.z85

from common.config import LimitsConfig
from common.curve import SERVER, Keys, load_keys, write_keys
from common.endpoints import check_bindable
from common.lifecycle import EndpointError, Loop, StopFlag, get_logger
from common.protocol import Reply, Request
from common.pubsub import EventPublisher, EventSubscriber, OrdersPublisher, OrdersSubscriber
from common.requests import Answerer, FrameMaker, NobodyThere, PostedRequests, log_bad

__all__ = (
    "EventPublisher", "EventSubscriber", "Keys", "NobodyThere", "OrdersPublisher", "OrdersSubscriber",
    "Reactor", "ReplyServer", "RequestClient", "load_keys", "make_keys"
)  # fmt: skip

LIMITS = LimitsConfig()
LINGER_MS = 200
"""How long what was sent may take to leave after a close."""
DRAIN_MESSAGES = 500
"""Messages that one socket may have handled before others get their turn."""
QUEUE_MESSAGES = 10_000
"""High-water mark of PUB and SUB, in messages a peer; more are dropped, and repaired or repeated."""
MAX_WAIT_S = 4.5
"""The longest that a blocking request takes, so that a command ends within 5 s."""
RECEIPT = b""
"""What a server sends before it carries a request out: the proof that its client is still connected."""

Socket = zmq.Socket[bytes]
log = get_logger()


class Reactor(Loop):
    """The poll loop of a service over sockets, file descriptors, planned calls and the stop flag."""

    def __init__(self, stop: StopFlag, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stop, clock)
        self.context = zmq.Context()
        self._poller = zmq.Poller()
        self._handlers: dict[object, Callable[[], None]] = {}
        self._zap: Socket | None = None
        self._allowed: frozenset[bytes] = frozenset()
        self._refused: tuple[bytes, ...] = ()
        self.on_fd(stop.wakeup_fd, stop.drain)

    def on_fd(self, fd: int, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `fd` is readable or at its end."""
        self._handlers[fd] = handler
        self._poller.register(fd, zmq.POLLIN)

    def remove_fd(self, fd: int) -> None:
        self._handlers.pop(fd, None)
        if fd in self._poller:
            self._poller.unregister(fd)

    def on_socket(self, socket: Socket, handler: Callable[[], None]) -> None:
        """For the classes of this module."""
        self._handlers[socket] = handler
        self._poller.register(socket, zmq.POLLIN)

    def close_socket(self, socket: Socket) -> None:
        self._handlers.pop(socket, None)
        self._poller.unregister(socket)
        socket.close()

    def client(self, endpoint: str, keys: Keys | None, limits: LimitsConfig) -> "RequestClient":
        return RequestClient(endpoint, keys, self, limits)

    def pub_socket(self, limits: LimitsConfig) -> "PubSocket":
        return PubSocket(self, limits)

    def sub_socket(
        self, topics: Sequence[str], on_messages: Callable[[list[list[bytes]]], None], limits: LimitsConfig
    ) -> "SubSocket":
        return SubSocket(self, topics, on_messages, limits)

    def guard(self, allowed: frozenset[bytes]) -> None:
        """Let only clients with these CURVE keys connect to the sockets bound here (ZeroMQ's RFC 27)."""
        if self._zap is None:
            self._zap = self.context.socket(zmq.REP)
            self._zap.bind("inproc://zeromq.zap.01")
            self.on_socket(self._zap, self._on_zap)
        self._allowed |= allowed

    def close(self) -> None:
        """Close what is still open; what was sent gets LINGER_MS to leave."""
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

    def _dispatch(self, timeout_ms: int | None) -> None:
        for key, _events in self._poller.poll(timeout_ms):
            if handler := self._handlers.get(key):
                handler()


# --------------------------------------------------------------------------- sockets


def make_keys(folder: Path | str, names: Sequence[str] = ("client",)) -> list[Path]:
    """Make CURVE keys for those that bind and for every name (`common/curve.py` says who needs which)."""
    return write_keys(Path(folder), names, zmq.curve_keypair)


def _open(context: zmq.Context[Socket], kind: int, limits: LimitsConfig) -> Socket:
    socket = context.socket(kind)
    socket.linger = LINGER_MS
    # What decoding refuses gets an error reply; far beyond that libzmq disconnects the peer instead.
    socket.maxmsgsize = 4 * limits.message_bytes
    socket.tcp_keepalive = 1
    socket.reconnect_ivl_max = 500
    return socket


def _bind(reactor: Reactor, socket: Socket, endpoint: str, keys: Keys | None) -> str:
    """Returns the actual endpoint. Raises EndpointError (port taken, address not allowed or not there)."""
    check_bindable(endpoint, with_keys=keys is not None)
    if keys:
        if keys.server_secret is None:
            raise EndpointError(endpoint, f"binding needs {SERVER}.key_secret in endpoints.keys_dir")
        reactor.guard(keys.allowed)
        socket.zap_domain = b"coadapt"
        socket.curve_server = True
        socket.curve_publickey = keys.server_public
        socket.curve_secretkey = keys.server_secret
    socket.ipv6 = "[" in endpoint
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        taken = error.errno == errno.EADDRINUSE
        problem = EndpointError.TAKEN if taken else f"cannot be bound: {error.strerror}"
        raise EndpointError(endpoint, problem) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _connect(socket: Socket, endpoint: str, keys: Keys | None) -> None:
    if keys:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey = keys.own_public
        socket.curve_secretkey = keys.own_secret
    socket.ipv6 = "[" in endpoint
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise EndpointError(endpoint, f"cannot be connected to: {error.strerror}") from error


def _offer(socket: Socket, data: bytes) -> None:
    """Send without waiting: a peer that refused this side's key has left no queue to send to."""
    with contextlib.suppress(zmq.Again):
        socket.send(data, zmq.DONTWAIT)


def _drain(socket: Socket) -> Iterator[list[bytes]]:
    for _ in range(DRAIN_MESSAGES):
        try:
            yield socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return


class PubSocket:
    """Sends frames to whoever subscribes to the first of them."""

    def __init__(self, reactor: Reactor, limits: LimitsConfig) -> None:
        self._reactor = reactor
        self._socket = _open(reactor.context, zmq.PUB, limits)
        self._socket.sndhwm = QUEUE_MESSAGES

    def bind(self, endpoint: str, keys: Keys | None) -> str:
        return _bind(self._reactor, self._socket, endpoint, keys)

    def connect(self, endpoint: str, keys: Keys | None) -> None:
        _connect(self._socket, endpoint, keys)

    def send(self, *frames: bytes) -> None:
        """Never blocks; a peer that does not keep up misses some."""
        self._socket.send_multipart(frames, zmq.DONTWAIT)

    def close(self) -> None:
        self._socket.close()


class SubSocket:
    """Gives `on_messages` the frames of all messages that wait (at most DRAIN_MESSAGES)."""

    def __init__(
        self,
        reactor: Reactor,
        topics: Sequence[str],
        on_messages: Callable[[list[list[bytes]]], None],
        limits: LimitsConfig,
    ) -> None:
        self._reactor = reactor
        self._socket = _open(reactor.context, zmq.SUB, limits)
        self._socket.rcvhwm = QUEUE_MESSAGES
        for topic in topics or ("",):
            self._socket.subscribe(topic)
        self._on_messages = on_messages

    def bind(self, endpoint: str, keys: Keys | None) -> str:
        actual = _bind(self._reactor, self._socket, endpoint, keys)
        self._reactor.on_socket(self._socket, self._on_readable)
        return actual

    def connect(self, endpoint: str, keys: Keys | None) -> None:
        _connect(self._socket, endpoint, keys)
        self._reactor.on_socket(self._socket, self._on_readable)

    def close(self) -> None:
        self._reactor.close_socket(self._socket)

    def _on_readable(self) -> None:
        self._on_messages(list(_drain(self._socket)))


# --------------------------------------------------------------------------- requests


class ReplyServer:
    """Answers requests at `endpoint`: `handle` gets a valid Request and returns its Reply.

    A repetition of a request gets the remembered reply. Bytes that are not a request get Refused, and
    `on_bad` a text. A request whose client has closed its connection meanwhile is not carried out: the
    client has given up, and said so to its user. Raises EndpointError.
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
        self._answerer = Answerer(handle, on_bad, limits)
        self._socket = _open(reactor.context, zmq.ROUTER, limits)
        self._socket.router_mandatory = True
        self.endpoint = _bind(reactor, self._socket, endpoint, keys)
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
            return self._answerer.refuse(f"a request of {len(frames)} frames; one is allowed")
        return self._answerer.answer(frames[0].bytes)

    def _still_waits(self, client: bytes, frame: zmq.Frame) -> bool:
        """Whether the client is still connected: the kernel knows that first, libzmq (EVENTS refreshes it)
        for longer, and alone of peers of an old protocol."""
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
    """Asks the server at `endpoint`: `request` waits for the reply, `post` needs a reactor and does not.

    On silence the connection is closed with all that it still holds, a new one repeats the request under
    the same id, and after the last attempt nothing of it is left that could be carried out later.
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
        self._frames = FrameMaker(limits)
        self._socket: Socket | None = None
        self._posted = PostedRequests(reactor.timers, self._send, self._disconnect) if reactor else None

    def request(self, request: Request, timeout_s: float = 1.0, attempts: int = 3) -> Reply:
        """The reply. Raises NobodyThere after `attempts` silences of `timeout_s`, in all at most MAX_WAIT_S;
        a server that is seen to take the request gets all of MAX_WAIT_S."""
        frame_id, data = self._frames.request_bytes(request)
        end_s = time.monotonic() + MAX_WAIT_S
        taken = False
        while (attempts > 0 or taken) and time.monotonic() < end_s:
            attempts -= 1
            wait_end_s = min(time.monotonic() + timeout_s, end_s)
            with contextlib.closing(self._connected(self._context)) as socket:
                _offer(socket, data)
                while socket.poll(max(0, math.ceil((wait_end_s - time.monotonic()) * 1000))):
                    answer = socket.recv()
                    taken = taken or answer == RECEIPT
                    frame = self._frames.reply_frame(answer) if answer != RECEIPT else None
                    if frame and frame.id == frame_id:
                        return frame.reply
        self._context.term()  # Returns when the connections are really closed: given up is given up.
        self._context = zmq.Context()
        raise NobodyThere(self.endpoint, MAX_WAIT_S if taken else None)

    def post(
        self,
        request: Request,
        on_reply: Callable[[Reply], None],
        on_silence: Callable[[], None],
        timeout_s: float = 1.0,
        attempts: int = 3,
    ) -> None:
        """Call `on_reply` with the reply, or `on_silence` after `attempts` silences of `timeout_s`."""
        assert self._posted is not None, "post needs a reactor"
        frame_id, data = self._frames.request_bytes(request)
        self._posted.post(frame_id, data, on_reply, on_silence, timeout_s, attempts)

    def close(self) -> None:
        """Forget what is not answered."""
        if self._posted:
            self._posted.forget()
            self._disconnect()
        self._context.destroy(linger=0)  # with a socket that a Ctrl-C may have left open

    def _connected(self, context: zmq.Context[Socket]) -> Socket:
        socket = _open(context, zmq.DEALER, self._limits)
        socket.linger = 0
        _connect(socket, self.endpoint, self._keys)
        return socket

    def _send(self, data: bytes) -> None:
        assert self._reactor is not None
        if self._socket is None:
            self._socket = self._connected(self._reactor.context)
            self._reactor.on_socket(self._socket, self._on_readable)
        _offer(self._socket, data)

    def _on_readable(self) -> None:
        assert self._socket is not None
        assert self._posted is not None
        for *_, answer in list(_drain(self._socket)):
            frame = self._frames.reply_frame(answer) if answer != RECEIPT else None
            if frame:
                self._posted.take(frame)

    def _disconnect(self) -> None:
        if self._socket is not None:
            assert self._reactor is not None
            self._reactor.close_socket(self._socket)
            self._socket = None
