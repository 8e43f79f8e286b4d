"""ZeroMQ sockets: how they are opened, bound and connected, and the pair for publish/subscribe."""

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence

import zmq

from common.config import LimitsConfig
from common.lifecycle import EndpointError
from common.messaging.curve_keys import SERVER, Keys
from common.messaging.endpoints import check_bindable
from common.messaging.reactor import LINGER_MS, Reactor, Socket

DRAIN_MESSAGES = 500
"""After this many messages from one socket, the other sockets get their turn."""
QUEUE_MESSAGES = 10_000
"""High-water mark of PUB and SUB sockets, in messages per peer. ZeroMQ drops messages beyond it."""


def open_socket(context: zmq.Context[Socket], kind: int, limits: LimitsConfig) -> Socket:
    """A new socket of this kind, with the project's settings."""
    socket = context.socket(kind)
    socket.linger = LINGER_MS
    # A message that is somewhat too large gets an error reply; for a far larger one libzmq disconnects the
    # peer.
    socket.maxmsgsize = 4 * limits.message_bytes
    socket.tcp_keepalive = 1
    socket.reconnect_ivl_max = 500
    return socket


def bind_socket(reactor: Reactor, socket: Socket, endpoint: str, keys: Keys | None) -> str:
    """Bind the socket and return the actual endpoint. Raises EndpointError if the port is taken, or the
    address is not allowed or does not exist."""
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


def connect_socket(socket: Socket, endpoint: str, keys: Keys | None) -> None:
    """Connect the socket; closes it and raises EndpointError if `endpoint` is not an endpoint."""
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


def send_if_possible(socket: Socket, data: bytes) -> None:
    """Send without waiting. If the peer has refused our key there is no queue, and nothing is sent."""
    with contextlib.suppress(zmq.Again):
        socket.send(data, zmq.DONTWAIT)


def drain(socket: Socket) -> Iterator[list[bytes]]:
    """The frames of each message that waits, at most DRAIN_MESSAGES of them."""
    for _ in range(DRAIN_MESSAGES):
        try:
            yield socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return


class PubSocket:
    """Sends messages to all subscribers of their first frame."""

    def __init__(self, reactor: Reactor, limits: LimitsConfig) -> None:
        self._reactor = reactor
        self._socket = open_socket(reactor.context, zmq.PUB, limits)
        self._socket.sndhwm = QUEUE_MESSAGES

    def bind(self, endpoint: str, keys: Keys | None) -> str:
        return bind_socket(self._reactor, self._socket, endpoint, keys)

    def connect(self, endpoint: str, keys: Keys | None) -> None:
        connect_socket(self._socket, endpoint, keys)

    def send(self, *frames: bytes) -> None:
        """Send one message without blocking. A subscriber that does not keep up misses some."""
        self._socket.send_multipart(frames, zmq.DONTWAIT)

    def close(self) -> None:
        self._socket.close()


class SubSocket:
    """Calls `on_messages` with the frames of all messages that wait, at most DRAIN_MESSAGES of them. `topics`
    are the first frames to subscribe to; empty: all."""

    def __init__(
        self,
        reactor: Reactor,
        topics: Sequence[str],
        on_messages: Callable[[list[list[bytes]]], None],
        limits: LimitsConfig,
    ) -> None:
        self._reactor = reactor
        self._socket = open_socket(reactor.context, zmq.SUB, limits)
        self._socket.rcvhwm = QUEUE_MESSAGES
        for topic in topics or ("",):
            self._socket.subscribe(topic)
        self._on_messages = on_messages

    def bind(self, endpoint: str, keys: Keys | None) -> str:
        actual = bind_socket(self._reactor, self._socket, endpoint, keys)
        self._reactor.on_socket(self._socket, self._on_readable)
        return actual

    def connect(self, endpoint: str, keys: Keys | None) -> None:
        connect_socket(self._socket, endpoint, keys)
        self._reactor.on_socket(self._socket, self._on_readable)

    def close(self) -> None:
        self._reactor.close_socket(self._socket)

    def _on_readable(self) -> None:
        self._on_messages(list(drain(self._socket)))
