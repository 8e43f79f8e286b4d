"""Both ends of request/reply, bytes in and bytes out; `common/transport.py` has the sockets around them."""

import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.codec import DecodeError, convert, decode, encode, unpack
from common.config import LimitsConfig
from common.lifecycle import EXIT_NOBODY_THERE, Timer, Timers, UserError, get_logger
from common.protocol import PROTOCOL_VERSION, Refused, Reply, ReplyFrame, Request, RequestFrame

REMEMBER_S = 30.0
REMEMBER_BYTES = 4_000_000
"""Remembered requests and replies of one server, all together."""
MAX_ID_CHARS = 100

log = get_logger()


def log_bad(text: str) -> None:
    """What a service does about a bad message that says nothing else."""
    log.warning("bad message", error=text)


class NobodyThere(UserError):
    """A request without an answer: nobody took it, or who took it did not answer within `waited_s`."""

    exit_code = EXIT_NOBODY_THERE

    def __init__(self, endpoint: str, waited_s: float | None = None) -> None:
        if waited_s is None:
            super().__init__(f"nobody answers at {endpoint}: is the stack running?")
        else:
            super().__init__(
                f"{endpoint} took the request but did not answer in {waited_s:g} s: "
                "it may or may not have been carried out"
            )


class RememberedReplies:
    """Replies by the bytes of their request, so that a repetition is answered and not carried out again."""

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


class Answerer:
    """Turns the bytes of a request into those of its reply, whatever they are.

    `handle` gets valid requests only, each once. Others are answered with Refused and told to `on_bad`.
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
    """The id of a request that is bad otherwise (too large, say); "" where even that cannot be told."""
    try:
        tree = unpack(data, LimitsConfig(message_bytes=max(1, len(data))))
    except DecodeError:
        return ""
    found = tree.get("id") if isinstance(tree, dict) else None
    return found[:MAX_ID_CHARS] if isinstance(found, str) else ""


class FrameMaker:
    """Gives every request of one client an id that no other request has."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._name = os.urandom(16).hex()
        self._numbers = itertools.count(1)

    def request_bytes(self, request: Request) -> tuple[str, bytes]:
        """(id, bytes). Raises UserError for one beyond the limits, which its server would refuse."""
        frame_id = f"{self._name}-{next(self._numbers)}"
        data = encode(RequestFrame(id=frame_id, request=request))
        if len(data) > self._limits.message_bytes:
            raise UserError(
                f"{type(request).__name__} of {len(data)} bytes; "
                f"at most limits.message_bytes = {self._limits.message_bytes} are allowed"
            )
        return frame_id, data

    def reply_frame(self, data: bytes) -> ReplyFrame | None:
        """None, and a line in the log, for bytes that are not a reply."""
        try:
            return decode(data, ReplyFrame, self._limits)
        except DecodeError as error:
            log.warning("bad reply", error=str(error))
            return None


@dataclass
class _Posted:
    """One request that waits for its reply."""

    data: bytes
    on_reply: Callable[[Reply], None]
    on_silence: Callable[[], None]
    timeout_s: float
    attempts: int
    timer: Timer | None = None


class PostedRequests:
    """Requests that wait for their replies, each with its own time and number of attempts.

    A silence costs the connection (`reopen`): what it still held is gone, and all that wait are sent again.
    """

    def __init__(self, timers: Timers, send: Callable[[bytes], None], reopen: Callable[[], None]) -> None:
        self._timers = timers
        self._send = send
        self._reopen = reopen
        self._posted: dict[str, _Posted] = {}

    def post(
        self,
        frame_id: str,
        data: bytes,
        on_reply: Callable[[Reply], None],
        on_silence: Callable[[], None],
        timeout_s: float,
        attempts: int,
    ) -> None:
        self._posted[frame_id] = posted = _Posted(data, on_reply, on_silence, timeout_s, attempts)
        self._send(data)
        self._wait(frame_id, posted)

    def take(self, frame: ReplyFrame) -> None:
        """A reply has come; late and repeated ones find nobody."""
        posted = self._posted.pop(frame.id, None)
        if posted:
            if posted.timer:
                posted.timer.cancel()
            posted.on_reply(frame.reply)

    def forget(self) -> None:
        for posted in self._posted.values():
            if posted.timer:
                posted.timer.cancel()
        self._posted.clear()

    def _wait(self, frame_id: str, posted: _Posted) -> None:
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
