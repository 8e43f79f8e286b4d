"""Sockets on loopback: requests, events, orders, keys, and the poll loop that they share.

Servers run in a thread with a reactor of its own; every port is chosen by the system.
"""

import os
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.codec import decode
from common.config import EndpointsConfig, LimitsConfig
from common.lifecycle import EndpointError, StopFlag, UserError
from common.messaging.curve_keys import load_keys, make_keys
from common.messaging.publish_subscribe import (
    EventPublisher,
    EventSubscriber,
    OrdersPublisher,
    OrdersSubscriber,
)
from common.messaging.reactor import Reactor
from common.messaging.request_reply import MAX_WAIT_S, ReplyServer, RequestClient, ServerUnavailable
from common.protocol import (
    Acknowledged,
    CancelJob,
    Done,
    GetJobs,
    GetProfiles,
    JobCancelled,
    JobFailed,
    Orders,
    Refused,
    ReplyFrame,
)

ANY_PORT = "tcp://127.0.0.1:*"
WAIT_S = 20
LIMITS = LimitsConfig()


@pytest.fixture
def reactor():
    stop = StopFlag()
    reactor = Reactor(stop)
    yield reactor
    reactor.close()
    stop.close()


@contextmanager
def serving(handle, endpoint=ANY_PORT, keys=None, limits=LIMITS):
    """A ReplyServer in a thread; gives the server, with what was bad in `server.bad`."""
    stop = StopFlag()
    reactor = Reactor(stop)
    bad = []
    server = ReplyServer(reactor, endpoint, handle, keys, bad.append, limits)
    server.bad = bad
    thread = threading.Thread(target=reactor.run)
    thread.start()
    try:
        yield server
    finally:
        stop.request()
        thread.join(WAIT_S)
        reactor.close()
        stop.close()
        assert not thread.is_alive()


@contextmanager
def client_of(endpoint, **options):
    client = RequestClient(endpoint, **options)
    try:
        yield client
    finally:
        client.close()


class Recorder:
    """Carries out requests by remembering them."""

    def __init__(self):
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        return Done()


@pytest.fixture
def recorder():
    return Recorder()


def free_endpoint():
    """An endpoint that the system chose and nobody listens at any more."""
    with serving(lambda request: Done()) as server:
        return server.endpoint


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

    def test_silence_is_a_clear_error_within_5_seconds(self):
        endpoint = free_endpoint()
        start_s = time.monotonic()
        with client_of(endpoint) as client, pytest.raises(ServerUnavailable) as caught:
            client.request(GetJobs())
        assert time.monotonic() - start_s < 5
        assert str(caught.value) == f"nobody answers at {endpoint}: is the stack running?"
        assert caught.value.exit_code == 3

    def test_more_attempts_do_not_wait_longer(self, monkeypatch):
        assert MAX_WAIT_S < 5
        monkeypatch.setattr("common.messaging.request_reply.MAX_WAIT_S", 0.5)
        start_s = time.monotonic()
        with client_of(free_endpoint()) as client, pytest.raises(ServerUnavailable):
            client.request(GetJobs(), timeout_s=10, attempts=10)
        assert time.monotonic() - start_s < 5

    def test_what_was_given_up_before_the_server_started_never_reaches_it(self, recorder):
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

    def test_what_was_given_up_while_the_server_was_busy_is_not_carried_out(self):
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
            waiter = threading.Thread(target=lambda: first.request(CancelJob(job_id="long")))
            waiter.start()
            assert busy.wait(WAIT_S)
            with pytest.raises(ServerUnavailable, match=r"nobody answers"):
                second.request(CancelJob(job_id="ghost"), timeout_s=0.2, attempts=2)
            free.set()
            waiter.join(WAIT_S)
            assert second.request(CancelJob(job_id="real")) == Done()
        assert seen == ["long", "real"]

    def test_a_server_that_hangs_with_the_request_is_told_from_one_that_is_not_there(self, monkeypatch):
        monkeypatch.setattr("common.messaging.request_reply.MAX_WAIT_S", 0.5)
        free = threading.Event()

        def hang(request):
            free.wait(WAIT_S)
            return Done()

        start_s = time.monotonic()
        with serving(hang) as server, client_of(server.endpoint) as client:
            with pytest.raises(ServerUnavailable, match=r"took the request .* may or may not"):
                client.request(GetJobs(), timeout_s=0.1)
            free.set()
        assert time.monotonic() - start_s < 5

    def test_a_slow_server_is_waited_for_once_it_has_taken_the_request(self, recorder):
        def slow(request):
            threading.Event().wait(0.5)
            return recorder(request)

        with serving(slow) as server, client_of(server.endpoint) as client:
            assert client.request(CancelJob(job_id="a"), timeout_s=0.2, attempts=1) == Done()
        assert recorder.requests == [CancelJob(job_id="a")]

    def test_posted_requests_are_answered_each(self, recorder, reactor):
        replies = []
        with serving(recorder) as server, client_of(server.endpoint, reactor=reactor) as client:
            for n in range(100):
                client.post(CancelJob(job_id=str(n)), replies.append, lambda: replies.append(None))
            assert reactor.run_until(lambda: len(replies) == 100, WAIT_S)
        assert replies == [Done()] * 100
        assert [r.job_id for r in recorder.requests] == [str(n) for n in range(100)]

    def test_silence_of_a_posted_request_is_told_once(self, reactor):
        heard = []
        with client_of(free_endpoint(), reactor=reactor) as client:
            client.post(GetJobs(), heard.append, lambda: heard.append("silence"), 0.05)
            assert reactor.run_until(lambda: heard, WAIT_S)
            assert not reactor.run_until(lambda: len(heard) > 1, 0.2)
        assert heard == ["silence"]

    def test_a_request_beyond_the_limit_is_refused_before_it_leaves(self, recorder):
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
        socket = client._connected(client._context)
        try:
            socket.send_multipart(frames)
            assert socket.poll(WAIT_S * 1000)
            assert socket.recv() == b""
            assert socket.poll(WAIT_S * 1000)
            return decode(socket.recv(), ReplyFrame)
        finally:
            socket.close()

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

    def test_a_peer_that_does_not_speak_zeromq_harms_nobody(self, recorder):
        import socket

        with serving(recorder) as server, client_of(server.endpoint) as client:
            host, port = server.endpoint.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
                assert client.request(GetJobs()) == Done()


class TestEndpoints:
    def test_a_taken_port_is_an_error_that_says_so(self, reactor, recorder):
        with serving(recorder) as server, pytest.raises(EndpointError) as caught:
            ReplyServer(reactor, server.endpoint, recorder)
        assert str(caught.value) == f"{server.endpoint}: already taken: is another stack running?"

    def test_a_taken_ipc_path_is_not_stolen(self, reactor, recorder, tmp_path):
        endpoint = f"ipc://{tmp_path}/socket"
        with serving(recorder, endpoint), pytest.raises(EndpointError, match="already taken"):
            ReplyServer(reactor, endpoint, recorder)

    def test_ipc_carries_requests_and_a_path_without_listener_is_free(self, recorder, tmp_path):
        endpoint = f"ipc://{tmp_path}/socket"
        for _ in range(2):
            with serving(recorder, endpoint), client_of(endpoint) as client:
                assert client.request(GetJobs()) == Done()

    @pytest.mark.parametrize("endpoint", ["tcp://*:*", "tcp://0.0.0.0:*", "tcp://[::]:*", "inproc://x"])
    def test_an_address_that_others_can_reach_is_refused_without_keys(self, reactor, endpoint):
        with pytest.raises(
            EndpointError, match=r"not a loopback address .* CURVE keys: set endpoints.keys_dir"
        ):
            ReplyServer(reactor, endpoint, lambda request: Done())

    @pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:http", "tcp://127.0.0.1:x:1"])
    def test_an_endpoint_that_is_none_is_an_error_for_people(self, reactor, endpoint):
        with pytest.raises(EndpointError, match=r"cannot be bound|not a loopback"):
            ReplyServer(reactor, endpoint, lambda request: Done())

    @pytest.mark.parametrize("endpoint", ["", "tcp://", "127.0.0.1:7801", "tcp://127.0.0.1"])
    def test_nobody_can_connect_to_an_endpoint_that_is_none(self, endpoint):
        with client_of(endpoint) as client, pytest.raises(EndpointError, match=r"cannot be connected to"):
            client.request(GetJobs())


class TestKeys:
    @pytest.fixture
    def folders(self, tmp_path):
        """Keys of a stack, and those of a stranger who knows the server's public key."""
        ours, theirs = tmp_path / "ours", tmp_path / "theirs"
        make_keys(ours)
        make_keys(theirs)
        (theirs / "server.key").write_bytes((ours / "server.key").read_bytes())
        return ours, theirs

    def test_a_known_key_is_served_also_beyond_loopback(self, folders, recorder):
        keys = load_keys(str(folders[0]))
        with serving(recorder, "tcp://0.0.0.0:*", keys) as server:
            client = RequestClient(server.endpoint.replace("0.0.0.0", "127.0.0.1"), keys)
            assert client.request(GetJobs()) == Done()
            client.close()

    def test_an_unknown_key_is_refused_and_logged(self, folders, recorder, capfd):
        ours, theirs = (load_keys(str(folder)) for folder in folders)
        with serving(recorder, keys=ours) as server, client_of(server.endpoint, keys=theirs) as client:
            with pytest.raises(ServerUnavailable):
                client.request(GetJobs(), timeout_s=0.5, attempts=2)
            with client_of(server.endpoint, keys=ours) as known:
                assert known.request(CancelJob(job_id="a")) == Done()
        assert recorder.requests == [CancelJob(job_id="a")]
        assert capfd.readouterr().err.count("refused an unknown key address=127.0.0.1") == 1

    def test_nobody_is_served_without_a_key(self, folders, recorder):
        keys = load_keys(str(folders[0]))
        nobody = pytest.raises(ServerUnavailable)
        with serving(recorder, keys=keys) as server, client_of(server.endpoint) as client, nobody:
            client.request(GetJobs(), timeout_s=0.3, attempts=1)
        assert recorder.requests == []

    def test_a_client_does_not_talk_to_a_server_with_another_key(self, folders, recorder):
        ours, theirs = folders
        (theirs / "server.key").unlink()
        (theirs / "server.key_secret").unlink()
        make_keys(theirs)
        ours, theirs = load_keys(str(ours)), load_keys(str(theirs))
        nobody = pytest.raises(ServerUnavailable)
        with (
            serving(recorder, keys=ours) as server,
            client_of(server.endpoint, keys=theirs) as client,
            nobody,
        ):
            client.request(GetJobs(), timeout_s=0.3, attempts=1)
        assert recorder.requests == []

    def test_an_agent_needs_no_secret_of_the_server(self, folders, recorder, reactor):
        (folders[0] / "server.key_secret").unlink()
        keys = load_keys(str(folders[0]))
        with pytest.raises(EndpointError, match=r"binding needs server\.key_secret"):
            ReplyServer(reactor, ANY_PORT, recorder, keys)

    def test_secrets_are_readable_by_their_owner_alone_and_never_made_twice(self, tmp_path):
        made = make_keys(tmp_path, ["one", "two"])
        assert sorted(p.name for p in made) == [
            f"{name}.{kind}" for name in ("one", "server", "two") for kind in ("key", "key_secret")
        ]
        assert {p.stat().st_mode & 0o777 for p in made if p.suffix == ".key_secret"} == {0o600}
        before = [p.read_bytes() for p in made]
        assert make_keys(tmp_path, ["one"]) == []
        assert [p.read_bytes() for p in made] == before

    def test_without_a_folder_there_are_no_keys(self):
        assert load_keys("") is None

    @pytest.mark.parametrize("missing", ["server.key", "client.key_secret"])
    def test_a_missing_key_is_named(self, folders, missing):
        (folders[0] / missing).unlink()
        with pytest.raises(
            UserError, match=r"endpoints\.keys_dir.*(server\.key cannot be read|no NAME\.key_secret)"
        ):
            load_keys(str(folders[0]))

    def test_a_key_file_that_is_none_is_an_error_for_people(self, folders):
        (folders[0] / "server.key").write_text("rubbish")
        with pytest.raises(UserError, match=r"server\.key holds no key"):
            load_keys(str(folders[0]))


class TestEvents:
    """Publisher and subscriber in one loop; what a real logger makes of it is an integration test."""

    @pytest.fixture
    def parts(self, reactor, tmp_path):
        self.records, self.bad, self.acknowledged = [], [], 0
        subscribers = [EventSubscriber(reactor, ANY_PORT, (), self.records.append, self.bad.append)]
        subscribers.append(EventSubscriber(reactor, ANY_PORT, ("JobFailed",), self.collected.append))
        server = ReplyServer(reactor, ANY_PORT, self.answer)
        endpoints = EndpointsConfig(
            logger_events=subscribers[0].endpoint,
            collector_events=subscribers[1].endpoint,
            logger_requests=server.endpoint,
        )
        return EventPublisher(
            reactor, "run", "scheduler", "one", endpoints, tmp_path, lambda: 12.5, lambda: 1700000000.25
        )

    @pytest.fixture(autouse=True)
    def collect(self):
        self.collected = []

    def answer(self, request):
        self.acknowledged = max(self.acknowledged, *(r.seq for r in self.records), 0)
        return Acknowledged(seq=self.acknowledged)

    def publish_until(self, reactor, publisher, arrived):
        """The first events of a new connection may be lost, so publish until some arrive."""
        end_s = time.monotonic() + WAIT_S
        while not arrived() and time.monotonic() < end_s:
            publisher.publish(JobFailed(job_id="a", reason="x"))
            reactor.run_until(arrived, 0.05)
        assert arrived()

    def test_a_record_says_who_when_and_which_number(self, reactor, parts):
        self.publish_until(reactor, parts, lambda: self.records)
        record = self.records[-1]
        assert (record.run_id, record.source, record.incarnation) == ("run", "scheduler", "one")
        assert (record.t_s, record.wall_s) == (12.5, 1700000000.25)
        assert record.seq >= 1
        assert record.event == JobFailed(job_id="a", reason="x")

    def test_a_topic_keeps_other_events_away(self, reactor, parts):
        self.publish_until(reactor, parts, lambda: self.collected and self.records)
        self.records.clear()
        count = len(self.collected)
        parts.publish(JobCancelled(job_id="b"))
        parts.publish(JobFailed(job_id="c", reason="y"))
        assert reactor.run_until(lambda: len(self.records) >= 2 and len(self.collected) > count, WAIT_S)
        assert {type(r.event) for r in self.collected} == {JobFailed}

    def test_pending_falls_to_zero_as_events_are_acknowledged(self, reactor, parts):
        self.publish_until(reactor, parts, lambda: self.records)
        assert reactor.run_until(lambda: parts.pending == 0, WAIT_S)

    def test_bytes_that_are_no_record_are_told_and_passed_over(self, reactor, parts):
        self.publish_until(reactor, parts, lambda: self.records)
        chance = random.Random(3)
        for _ in range(200):
            parts._socket.send(b"JobFailed", chance.randbytes(chance.randint(0, 60)))
        parts._socket.send(b"\xc1")
        assert reactor.run_until(lambda: len(self.bad) == 201, WAIT_S)
        count = len(self.records)
        parts.publish(JobCancelled(job_id="b"))
        assert reactor.run_until(lambda: len(self.records) > count, WAIT_S)

    def test_an_event_too_large_to_be_taken_is_an_error_and_costs_no_number(self, reactor, parts):
        with pytest.raises(ValueError, match="JobFailed of 3000"):
            parts.publish(JobFailed(job_id="a", reason="", output_tail="x" * 3_000_000))
        self.publish_until(reactor, parts, lambda: self.records)
        assert self.records[0].seq + len(self.records) - 1 == self.records[-1].seq

    def test_closing_without_a_logger_is_bounded_and_keeps_the_events(self, reactor, tmp_path):
        names = ("logger_requests", "logger_events", "collector_events")
        endpoints = EndpointsConfig(**{name: free_endpoint() for name in names})
        publisher = EventPublisher(reactor, "run", "scheduler", "one", endpoints, tmp_path)
        publisher.publish(JobCancelled(job_id="a"))
        start_s = time.monotonic()
        assert not publisher.close(timeout_s=0.3)
        assert time.monotonic() - start_s < 2
        assert (tmp_path / "scheduler-one.msgpack").stat().st_size > 0

    def test_closing_says_good_bye_and_leaves_no_file(self, reactor, parts, tmp_path):
        self.publish_until(reactor, parts, lambda: self.records)
        assert parts.close(timeout_s=WAIT_S)
        assert list(tmp_path.iterdir()) == []


class TestOrders:
    def orders(self, version):
        return Orders(run_id="run", version=version, jobs=())

    def test_a_subscriber_gets_orders_and_of_a_backlog_the_newest_alone(self, reactor):
        publisher = OrdersPublisher(reactor, ANY_PORT)
        got = []
        OrdersSubscriber(reactor, publisher.endpoint, got.append)
        repeat = reactor.every(0.02, lambda: publisher.publish(self.orders(1)))
        assert reactor.run_until(lambda: got, WAIT_S)
        repeat.cancel()
        for version in range(2, 100):
            publisher.publish(self.orders(version))
        assert reactor.run_until(lambda: got[-1] == self.orders(99), WAIT_S)
        assert len(got) < 98

    def test_a_late_subscriber_gets_the_next_repetition(self, reactor):
        publisher = OrdersPublisher(reactor, ANY_PORT)
        publisher.publish(self.orders(1))
        got = []
        OrdersSubscriber(reactor, publisher.endpoint, got.append)
        reactor.every(0.02, lambda: publisher.publish(self.orders(1)))
        assert reactor.run_until(lambda: got, WAIT_S)

    def test_bad_orders_are_told_and_passed_over(self, reactor):
        publisher = OrdersPublisher(reactor, ANY_PORT)
        got, bad = [], []
        OrdersSubscriber(reactor, publisher.endpoint, got.append, bad.append)
        reactor.every(0.02, lambda: publisher._socket.send(b"Orders", b"\xc1"))
        assert reactor.run_until(lambda: bad, WAIT_S)
        reactor.every(0.03, lambda: publisher.publish(self.orders(1)))
        assert reactor.run_until(lambda: got, WAIT_S)


class TestReactor:
    def test_a_file_descriptor_calls_its_handler(self, reactor):
        read_fd, write_fd = os.pipe()
        got = []
        reactor.on_fd(read_fd, lambda: got.append(os.read(read_fd, 10)))
        os.write(write_fd, b"hello")
        assert reactor.run_until(lambda: got, WAIT_S)
        assert got == [b"hello"]
        reactor.remove_fd(read_fd)
        os.write(write_fd, b"again")
        assert not reactor.run_until(lambda: len(got) > 1, 0.05)
        os.close(read_fd)
        os.close(write_fd)

    def test_the_end_of_a_pipe_calls_its_handler_too(self, reactor):
        read_fd, write_fd = os.pipe()
        ended = []
        reactor.on_fd(read_fd, lambda: [ended.append(True), reactor.remove_fd(read_fd)])
        os.close(write_fd)
        assert reactor.run_until(lambda: ended, WAIT_S)
        os.close(read_fd)

    def test_a_handler_may_remove_one_that_was_ready_as_well(self, reactor):
        pipes = [os.pipe() for _ in range(2)]
        called = []
        for mine, other in ((0, 1), (1, 0)):
            reactor.on_fd(
                pipes[mine][0],
                lambda mine=mine, other=other: [called.append(mine), reactor.remove_fd(pipes[other][0])],
            )
            os.write(pipes[mine][1], b"x")
        reactor.run_until(lambda: called, WAIT_S)
        assert len(called) == 1
        for pair in pipes:
            for fd in pair:
                os.close(fd)

    def test_it_runs_until_the_flag_is_set(self, reactor):
        calls = []
        reactor.every(0.01, lambda: [calls.append(1), len(calls) == 3 and reactor.stop.request()])
        reactor.run()
        assert len(calls) == 3

    def test_the_flag_set_in_another_thread_wakes_it_at_once(self, reactor):
        threading.Timer(0.05, reactor.stop.request).start()
        start_s = time.monotonic()
        reactor.run()
        assert time.monotonic() - start_s < 5

    def test_run_until_goes_on_after_the_flag_and_ends_in_time(self, reactor):
        reactor.stop.request()
        assert not reactor.run_until(lambda: False, 0.05)
        done = []
        reactor.call_later(0.01, lambda: done.append(True))
        assert reactor.run_until(lambda: done, WAIT_S)

    def test_waiting_costs_no_processor_time(self, reactor):
        reactor.every(0.01, lambda: None)
        reactor.run_until(lambda: False, 0.1)
        before_s = time.thread_time()
        reactor.run_until(lambda: False, 1.0)
        assert time.thread_time() - before_s < 0.1


def test_importing_transport_loads_nothing_heavy():
    code = "import sys, common.messaging.reactor; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["numpy", "torch", "rich", "structlog", "asyncio", "hashlib", "zmq.auth"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, timeout=30)
    assert done.stdout == "[]\n"
