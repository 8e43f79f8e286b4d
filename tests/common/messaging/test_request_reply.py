"""Both ends of request/reply without sockets: bytes in, bytes out, time as an argument."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.codec import decode, encode
from common.config import LimitsConfig
from common.lifecycle import Timers, UserError
from common.messaging.request_reply import (
    REMEMBER_BYTES,
    REMEMBER_S,
    Answerer,
    FrameMaker,
    PostedRequests,
    RememberedReplies,
)
from common.protocol import (
    PROTOCOL_VERSION,
    CancelJob,
    Done,
    GetJobs,
    GetProfiles,
    Refused,
    ReplyFrame,
    RequestFrame,
)

LIMITS = LimitsConfig()


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Served:
    """An Answerer, what it carried out, and what it was told was bad."""

    def __init__(self):
        self.requests, self.bad = [], []
        self.answerer = Answerer(self.carry_out, self.bad.append, LIMITS)

    def carry_out(self, request):
        self.requests.append(request)
        return Done()

    def answer(self, data):
        return decode(self.answerer.answer(data), ReplyFrame)


@pytest.fixture
def served():
    return Served()


class TestAnswerer:
    def test_a_reply_repeats_the_id_of_its_request(self, served):
        assert served.answer(encode(RequestFrame(id="x-1", request=GetJobs()))) == ReplyFrame(
            id="x-1", reply=Done()
        )
        assert served.requests == [GetJobs()]

    def test_a_repetition_is_answered_again_and_carried_out_once(self, served):
        data = encode(RequestFrame(id="x-1", request=CancelJob(job_id="a")))
        assert served.answer(data) == served.answer(data)
        assert served.requests == [CancelJob(job_id="a")]

    def test_the_same_request_under_another_id_is_carried_out_again(self, served):
        for frame_id in ("x-1", "x-2"):
            served.answer(encode(RequestFrame(id=frame_id, request=CancelJob(job_id="a"))))
        assert len(served.requests) == 2

    def test_a_bad_request_is_refused_under_its_id_and_told(self, served):
        data = msgspec.msgpack.encode({"id": "x-7", "request": {"type": "Explode"}})
        frame = served.answer(data)
        assert frame.id == "x-7"
        assert isinstance(frame.reply, Refused)
        assert "Explode" in frame.reply.reason
        assert served.bad == [frame.reply.reason]
        assert served.requests == []

    def test_another_protocol_version_is_refused_with_both_numbers(self, served):
        data = encode(RequestFrame(id="x-1", request=GetJobs(), version=PROTOCOL_VERSION + 1))
        reason = f"protocol version {PROTOCOL_VERSION + 1}; this side speaks {PROTOCOL_VERSION}"
        assert served.answer(data) == ReplyFrame(id="x-1", reply=Refused(reason=reason))

    def test_an_endless_id_is_refused_and_not_repeated_whole(self, served):
        frame = served.answer(encode(RequestFrame(id="x" * 10_000, request=GetJobs())))
        assert len(frame.id) == 100
        assert isinstance(frame.reply, Refused)
        assert served.requests == []

    @given(st.binary(max_size=100))
    def test_random_bytes_get_an_error_reply(self, data):
        served = Served()
        assert isinstance(served.answer(data).reply, Refused)
        assert len(served.bad) == 1


class TestRememberedReplies:
    def test_a_reply_is_forgotten_after_its_time(self):
        clock = Clock()
        remembered = RememberedReplies(clock)
        remembered.put(b"old", b"1")
        clock.now_s = REMEMBER_S / 2
        remembered.put(b"new", b"2")
        assert (remembered.get(b"old"), remembered.get(b"new")) == (b"1", b"2")
        clock.now_s = REMEMBER_S + 1
        remembered.put(b"newer", b"3")
        assert (remembered.get(b"old"), remembered.get(b"new")) == (None, b"2")

    def test_their_memory_is_bounded(self):
        remembered = RememberedReplies(Clock())
        reply = bytes(REMEMBER_BYTES // 4)
        for n in range(10):
            remembered.put(b"%d" % n, reply)
        kept = [n for n in range(10) if remembered.get(b"%d" % n)]
        assert kept == [7, 8, 9]

    def test_a_reply_beyond_all_bounds_is_not_kept(self):
        remembered = RememberedReplies(Clock())
        remembered.put(b"x", bytes(REMEMBER_BYTES + 1))
        assert remembered.get(b"x") is None


class TestFrameMaker:
    def test_no_two_requests_share_an_id(self):
        makers = [FrameMaker(LIMITS) for _ in range(3)]
        ids = {maker.request_bytes(GetJobs())[0] for maker in makers for _ in range(100)}
        assert len(ids) == 300

    def test_a_request_that_its_server_would_refuse_is_an_error_for_people(self):
        maker = FrameMaker(LimitsConfig(message_bytes=1000))
        with pytest.raises(UserError, match=r"GetProfiles of 1\d\d\d bytes; .*message_bytes = 1000"):
            maker.request_bytes(GetProfiles(job_ids=("x" * 1000,)))

    def test_a_reply_that_is_none_is_passed_over(self):
        assert FrameMaker(LIMITS).reply_frame(b"\xc1") is None


class TestPostedRequests:
    """`wire` is what the present connection was given; a reopening empties it."""

    @pytest.fixture(autouse=True)
    def parts(self):
        self.clock = Clock()
        self.timers = Timers(self.clock)
        self.wire, self.reopened, self.heard = [], 0, []
        self.posted = PostedRequests(self.timers, lambda data: self.wire.append(data), self.reopen)

    def reopen(self):
        self.wire.clear()
        self.reopened += 1

    def post(self, frame_id, timeout_s=1.0, attempts=3):
        self.posted.post(
            frame_id,
            frame_id.encode(),
            lambda reply: self.heard.append((frame_id, reply)),
            lambda: self.heard.append((frame_id, "silence")),
            timeout_s,
            attempts,
        )

    def pass_seconds(self, seconds):
        for _ in range(round(seconds * 10)):
            self.clock.now_s += 0.1
            self.timers.run_due()

    def test_a_reply_reaches_its_request(self):
        self.post("a")
        self.post("b")
        self.posted.take(ReplyFrame(id="b", reply=Done()))
        self.pass_seconds(0.5)
        assert self.heard == [("b", Done())]

    def test_a_late_or_repeated_reply_finds_nobody(self):
        self.post("a")
        self.posted.take(ReplyFrame(id="a", reply=Done()))
        self.posted.take(ReplyFrame(id="a", reply=Done()))
        self.posted.take(ReplyFrame(id="z", reply=Done()))
        self.pass_seconds(5)
        assert self.heard == [("a", Done())]

    def test_silence_repeats_the_same_bytes_on_a_new_connection(self):
        self.post("a")
        self.pass_seconds(1.2)
        assert (self.wire, self.reopened) == ([b"a"], 1)
        self.posted.take(ReplyFrame(id="a", reply=Done()))
        assert self.heard == [("a", Done())]

    def test_after_the_last_attempt_nothing_is_left_on_the_wire(self):
        self.post("a")
        self.pass_seconds(3.2)
        assert self.heard == [("a", "silence")]
        assert (self.wire, self.reopened) == ([], 3)

    def test_the_silence_of_one_costs_another_its_connection_and_no_attempt(self):
        self.post("a", timeout_s=0.5, attempts=1)
        self.post("b", timeout_s=2.0, attempts=1)
        self.pass_seconds(0.6)
        assert self.heard == [("a", "silence")]
        assert self.wire == [b"b"]
        self.pass_seconds(2.0)
        assert self.heard == [("a", "silence"), ("b", "silence")]

    def test_what_is_forgotten_is_never_heard_of(self):
        self.post("a")
        self.posted.forget()
        self.posted.take(ReplyFrame(id="a", reply=Done()))
        self.pass_seconds(5)
        assert self.heard == []
