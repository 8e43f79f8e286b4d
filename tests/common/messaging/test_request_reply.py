"""Both ends of request/reply: first their parts without sockets or clocks, then over real sockets."""

import random
import socket
import threading
import time
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.codec import decode, encode
from common.config import LimitsConfig
from common.lifecycle import Timers, UserError
from common.messaging.request_reply import (
    MAX_WAIT_S,
    REMEMBER_BYTES,
    REMEMBER_S,
    PostedRequests,
    RememberedReplies,
    ReplyServer,
    RequestEncoder,
    RequestHandler,
    ServerUnavailable,
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
from tests.fixtures.messaging_servers import ANY_PORT, LIMITS, WAIT_S, client_of, free_endpoint, serving


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Served:
    """A RequestHandler, the requests that it carried out, and the problems that it reported."""

    def __init__(self):
        self.requests, self.bad = [], []
        self.handler = RequestHandler(self.carry_out, self.bad.append, LIMITS)

    def carry_out(self, request):
        self.requests.append(request)
        return Done()

    def answer(self, data):
        return decode(self.handler.answer(data), ReplyFrame)


@pytest.fixture
def served():
    return Served()


class TestRequestHandler:
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

    def test_a_bad_request_is_refused_under_its_id_and_reported(self, served):
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

    def test_a_very_long_id_is_refused_and_not_repeated_whole(self, served):
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

    def test_the_memory_of_remembered_replies_is_bounded(self):
        remembered = RememberedReplies(Clock())
        reply = bytes(REMEMBER_BYTES // 4)
        for n in range(10):
            remembered.put(b"%d" % n, reply)
        kept = [n for n in range(10) if remembered.get(b"%d" % n)]
        assert kept == [7, 8, 9]

    def test_a_reply_larger_than_the_memory_is_not_kept(self):
        remembered = RememberedReplies(Clock())
        remembered.put(b"x", bytes(REMEMBER_BYTES + 1))
        assert remembered.get(b"x") is None


class TestRequestEncoder:
    def test_no_two_requests_share_an_id(self):
        encoders = [RequestEncoder(LIMITS) for _ in range(3)]
        ids = {encoder.request_bytes(GetJobs())[0] for encoder in encoders for _ in range(100)}
        assert len(ids) == 300

    def test_a_request_that_its_server_would_refuse_is_an_error_for_people(self):
        encoder = RequestEncoder(LimitsConfig(message_bytes=1000))
        with pytest.raises(UserError, match=r"GetProfiles of 1\d\d\d bytes; .*message_bytes = 1000"):
            encoder.request_bytes(GetProfiles(job_ids=("x" * 1000,)))

    def test_bytes_that_are_not_a_reply_are_ignored(self):
        assert RequestEncoder(LIMITS).reply_frame(b"\xc1") is None


class TestPostedRequests:
    """`wire` is what was sent on the current connection; reopening empties it."""

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

    def test_a_late_or_repeated_reply_is_ignored(self):
        self.post("a")
        self.posted.take(ReplyFrame(id="a", reply=Done()))
        self.posted.take(ReplyFrame(id="a", reply=Done()))
        self.posted.take(ReplyFrame(id="z", reply=Done()))
        self.pass_seconds(5)
        assert self.heard == [("a", Done())]

    def test_a_timeout_repeats_the_same_bytes_on_a_new_connection(self):
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

    def test_the_timeout_of_one_request_costs_the_others_no_attempt(self):
        self.post("a", timeout_s=0.5, attempts=1)
        self.post("b", timeout_s=2.0, attempts=1)
        self.pass_seconds(0.6)
        assert self.heard == [("a", "silence")]
        assert self.wire == [b"b"]
        self.pass_seconds(2.0)
        assert self.heard == [("a", "silence"), ("b", "silence")]

    def test_a_forgotten_request_gets_no_callback(self):
        self.post("a")
        self.posted.forget()
        self.posted.take(ReplyFrame(id="a", reply=Done()))
        self.pass_seconds(5)
        assert self.heard == []


class TestRequests:
    def test_a_request_gets_the_reply_of_its_server(self, recorder):
        with serving(recorder) as server, client_of(server.endpoint) as client:
            assert client.request(CancelJob(job_id="a")) == Done()
            assert client.request(CancelJob(job_id="b")) == Done()
        assert recorder.requests == [CancelJob(job_id="a"), CancelJob(job_id="b")]

    def test_a_request_whose_reply_was_lost_is_carried_out_once(self, recorder):
        with serving(recorder) as server, client_of(server.endpoint) as client:
            frame_id, data = client._frames.request_bytes(CancelJob(job_id="a"))
            for _ in range(3):
                connection = client._connected(client._context)
                connection.send(data)
                assert connection.recv() == b""
                assert decode(connection.recv(), ReplyFrame) == ReplyFrame(id=frame_id, reply=Done())
                connection.close()
        assert recorder.requests == [CancelJob(job_id="a")]

    def test_a_peer_of_an_old_protocol_stops_nothing(self, recorder):
        """Its messages carry no connection to look at (ZMTP 1: an empty identity, then a frame)."""
        with serving(recorder) as server, client_of(server.endpoint) as client:
            address = urlsplit(server.endpoint)
            with socket.create_connection((address.hostname, address.port), timeout=WAIT_S) as old:
                old.sendall(b"\x01\x00" + b"\x06\x00hello")
                assert old.recv(1), "the greeting"
                assert client.request(GetJobs()) == Done()
        assert recorder.requests == [GetJobs()]

    def test_a_missing_server_is_a_clear_error_within_5_seconds(self):
        endpoint = free_endpoint()
        start_s = time.monotonic()
        with client_of(endpoint) as client, pytest.raises(ServerUnavailable) as caught:
            client.request(GetJobs())
        assert time.monotonic() - start_s < 5
        assert str(caught.value) == f"the server at {endpoint} does not answer: is the stack running?"
        assert caught.value.exit_code == 3

    def test_more_attempts_do_not_wait_longer(self, monkeypatch):
        assert MAX_WAIT_S < 5
        monkeypatch.setattr("common.messaging.request_reply.MAX_WAIT_S", 0.5)
        start_s = time.monotonic()
        with client_of(free_endpoint()) as client, pytest.raises(ServerUnavailable):
            client.request(GetJobs(), timeout_s=10, attempts=10)
        assert time.monotonic() - start_s < 5

    def test_a_request_given_up_before_the_server_started_never_reaches_it(self, recorder):
        endpoint = free_endpoint()
        with client_of(endpoint) as client:
            with pytest.raises(ServerUnavailable):
                client.request(CancelJob(job_id="ghost"), timeout_s=0.1)
            with serving(recorder, endpoint):
                assert client.request(CancelJob(job_id="real")) == Done()
        assert recorder.requests == [CancelJob(job_id="real")]

    def test_a_server_that_starts_late_is_reached_by_a_later_attempt(self, recorder, reactor):
        endpoint = free_endpoint()
        replies = []
        with client_of(endpoint, reactor=reactor) as client:
            client.post(CancelJob(job_id="a"), replies.append, lambda: replies.append(None), 0.2, attempts=50)
            assert not reactor.run_until(lambda: replies, 0.3)
            with serving(recorder, endpoint):
                assert reactor.run_until(lambda: replies, WAIT_S)
        assert replies == [Done()]
        assert recorder.requests == [CancelJob(job_id="a")]

    def test_a_request_given_up_while_the_server_was_busy_is_not_carried_out(self):
        seen, busy, free = [], threading.Event(), threading.Event()

        def handle(request):
            seen.append(request.job_id)
            if request.job_id == "long":
                busy.set()
                free.wait(WAIT_S)
            return Done()

        with (
            serving(handle) as server,
            client_of(server.endpoint) as first,
            client_of(server.endpoint) as second,
        ):
            waiting_client = threading.Thread(target=lambda: first.request(CancelJob(job_id="long")))
            waiting_client.start()
            assert busy.wait(WAIT_S)
            with pytest.raises(ServerUnavailable, match="does not answer"):
                second.request(CancelJob(job_id="ghost"), timeout_s=0.2, attempts=2)
            free.set()
            waiting_client.join(WAIT_S)
            assert second.request(CancelJob(job_id="real")) == Done()
        assert seen == ["long", "real"]

    def test_the_error_distinguishes_a_hanging_server_from_a_missing_one(self, monkeypatch):
        monkeypatch.setattr("common.messaging.request_reply.MAX_WAIT_S", 0.5)
        free = threading.Event()

        def hang(request):
            free.wait(WAIT_S)
            return Done()

        start_s = time.monotonic()
        with serving(hang) as server, client_of(server.endpoint) as client:
            with pytest.raises(ServerUnavailable, match=r"received the request .* may or may not"):
                client.request(GetJobs(), timeout_s=0.1)
            free.set()
        assert time.monotonic() - start_s < 5

    def test_a_client_waits_for_a_slow_server_that_has_received_the_request(self, recorder):
        def slow(request):
            threading.Event().wait(0.5)
            return recorder(request)

        with serving(slow) as server, client_of(server.endpoint) as client:
            assert client.request(CancelJob(job_id="a"), timeout_s=0.2, attempts=1) == Done()
        assert recorder.requests == [CancelJob(job_id="a")]

    def test_every_posted_request_is_answered(self, recorder, reactor):
        replies = []
        with serving(recorder) as server, client_of(server.endpoint, reactor=reactor) as client:
            for n in range(100):
                client.post(CancelJob(job_id=str(n)), replies.append, lambda: replies.append(None))
            assert reactor.run_until(lambda: len(replies) == 100, WAIT_S)
        assert replies == [Done()] * 100
        assert [r.job_id for r in recorder.requests] == [str(n) for n in range(100)]

    def test_the_timeout_of_a_posted_request_is_reported_once(self, reactor):
        heard = []
        with client_of(free_endpoint(), reactor=reactor) as client:
            client.post(GetJobs(), heard.append, lambda: heard.append("silence"), 0.05)
            assert reactor.run_until(lambda: heard, WAIT_S)
            assert not reactor.run_until(lambda: len(heard) > 1, 0.2)
        assert heard == ["silence"]

    def test_a_request_beyond_the_limit_is_not_sent(self, recorder):
        too_large = pytest.raises(UserError, match=r"at most limits.message_bytes = 1000000")
        with serving(recorder) as server, client_of(server.endpoint) as client, too_large:
            client.request(GetProfiles(job_ids=("x" * 1_000_001,)))
        assert recorder.requests == []

    def test_a_request_beyond_the_limit_of_its_server_gets_an_error_reply(self, recorder):
        small = LimitsConfig(message_bytes=1000)
        with serving(recorder, limits=small) as server, client_of(server.endpoint) as client:
            reply = client.request(GetProfiles(job_ids=("x" * 2000,)))
            assert isinstance(reply, Refused)
            assert "at most 1000 are allowed" in reply.reason
            assert client.request(GetJobs()) == Done()
        assert len(server.bad) == 1

    def test_a_handler_that_raises_ends_the_loop(self, reactor):
        def broken(request):
            raise ZeroDivisionError

        server = ReplyServer(reactor, ANY_PORT, broken)
        with client_of(server.endpoint, reactor=reactor) as client:
            client.post(GetJobs(), lambda reply: None, lambda: None)
            with pytest.raises(ZeroDivisionError):
                reactor.run_until(lambda: False, WAIT_S)


class TestBadBytes:
    def exchange(self, client, *frames):
        """Send frames as they are, and give the bytes of the answer."""
        connection = client._connected(client._context)
        try:
            connection.send_multipart(frames)
            assert connection.poll(WAIT_S * 1000)
            assert connection.recv() == b""
            assert connection.poll(WAIT_S * 1000)
            return decode(connection.recv(), ReplyFrame)
        finally:
            connection.close()

    def test_random_bytes_get_an_error_reply_and_the_server_goes_on(self, recorder):
        with serving(recorder) as server, client_of(server.endpoint) as client:

            @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
            @given(st.binary(min_size=1, max_size=300))
            def check(data):
                assert isinstance(self.exchange(client, data).reply, Refused)

            check()
            assert client.request(GetJobs()) == Done()
            assert len(server.bad) >= 150
        assert recorder.requests == [GetJobs()]

    def test_a_valid_request_with_bytes_changed_never_stops_the_server(self, recorder):
        chance = random.Random(7)
        with serving(recorder) as server, client_of(server.endpoint) as client:
            for _ in range(300):
                data = bytearray(client._frames.request_bytes(CancelJob(job_id="a"))[1])
                for _ in range(chance.randint(1, 4)):
                    data[chance.randrange(len(data))] = chance.randrange(256)
                self.exchange(client, bytes(data))
            assert client.request(GetJobs()) == Done()

    def test_more_frames_than_one_get_an_error_reply(self, recorder):
        with serving(recorder) as server, client_of(server.endpoint) as client:
            data = client._frames.request_bytes(GetJobs())[1]
            reply = self.exchange(client, b"", b"x", data).reply
            assert reply == Refused(reason="a request of 3 frames; one is allowed")
        assert recorder.requests == []

    def test_a_peer_that_does_not_speak_zeromq_disturbs_no_client(self, recorder):
        with serving(recorder) as server, client_of(server.endpoint) as client:
            host, port = server.endpoint.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
                assert client.request(GetJobs()) == Done()
