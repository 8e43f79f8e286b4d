"""The replica's end of the pipe to its agent: orders come in, facts and events go out."""

import select
import time
from multiprocessing.connection import Connection

from common.codec import decode, encode
from common.protocol import ReplicaAlive, ReplicaMessage, ReplicaOrder

ALIVE_EVERY_S = 1.0


class AgentGone(Exception):
    """The agent has closed its end of the pipe, or no longer reads from it."""


class Mailbox:
    """Reads orders and sends messages. `newest` is the newest order received so far.

    Every method raises AgentGone when the pipe is closed. `send` also raises it when the pipe stays full for
    `send_timeout_s`.
    """

    def __init__(self, connection: Connection, send_timeout_s: float) -> None:
        self._connection, self._send_timeout_s = connection, send_timeout_s
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection.fileno(), select.POLLIN)
        self._writable.register(connection.fileno(), select.POLLOUT)
        self._last_alive_s = float("-inf")
        self.newest: ReplicaOrder | None = None

    def read(self, wait_s: float = 0.0) -> bool:
        """Read all waiting orders, waiting at most `wait_s` for the first; True if a newer one arrived.

        About once a second this also tells the agent that the replica reads its orders and does not hang.
        """
        if time.monotonic() - self._last_alive_s > ALIVE_EVERY_S:
            self._last_alive_s = time.monotonic()
            self.send(ReplicaAlive())
        newer = False
        while self._readable.poll(wait_s * 1000.0):
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError) as error:
                raise AgentGone from error
            order = decode(data, ReplicaOrder)
            if self.newest is None or order.generation > self.newest.generation:
                self.newest, newer = order, True
            wait_s = 0.0
        return newer

    def send(self, message: ReplicaMessage) -> None:
        # A writable pipe has room for a whole message: every message is smaller than its buffer.
        if not self._writable.poll(self._send_timeout_s * 1000.0):
            raise AgentGone
        try:
            self._connection.send_bytes(encode(message))
        except OSError as error:
            raise AgentGone from error
