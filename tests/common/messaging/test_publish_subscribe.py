"""Events and orders: publisher and subscriber in one loop. Tests with a real logger are integration tests."""

import random
import time

import pytest

from common.config import EndpointsConfig
from common.messaging.publish_subscribe import (
    EventPublisher,
    EventSubscriber,
    OrdersPublisher,
    OrdersSubscriber,
)
from common.messaging.request_reply import ReplyServer
from common.protocol import Acknowledged, JobCancelled, JobFailed, Orders
from tests.fixtures.messaging_servers import ANY_PORT, WAIT_S, free_endpoint


class TestEvents:
    """Publisher and subscriber in one loop."""

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

    def test_a_subscriber_receives_only_events_of_its_topics(self, reactor, parts):
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

    def test_bytes_that_are_not_a_record_are_reported_and_ignored(self, reactor, parts):
        self.publish_until(reactor, parts, lambda: self.records)
        chance = random.Random(3)
        for _ in range(200):
            parts._socket.send(b"JobFailed", chance.randbytes(chance.randint(0, 60)))
        parts._socket.send(b"\xc1")
        assert reactor.run_until(lambda: len(self.bad) == 201, WAIT_S)
        count = len(self.records)
        parts.publish(JobCancelled(job_id="b"))
        assert reactor.run_until(lambda: len(self.records) > count, WAIT_S)

    def test_an_event_that_is_too_large_is_an_error_and_uses_no_number(self, reactor, parts):
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

    def test_closing_with_a_logger_leaves_no_file(self, reactor, parts, tmp_path):
        self.publish_until(reactor, parts, lambda: self.records)
        assert parts.close(timeout_s=WAIT_S)
        assert list(tmp_path.iterdir()) == []


class TestOrders:
    def orders(self, version):
        return Orders(run_id="run", version=version, jobs=())

    def test_a_subscriber_gets_orders_and_only_the_newest_of_a_backlog(self, reactor):
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

    def test_bad_orders_are_reported_and_ignored(self, reactor):
        publisher = OrdersPublisher(reactor, ANY_PORT)
        got, bad = [], []
        OrdersSubscriber(reactor, publisher.endpoint, got.append, bad.append)
        reactor.every(0.02, lambda: publisher._socket.send(b"Orders", b"\xc1"))
        assert reactor.run_until(lambda: bad, WAIT_S)
        reactor.every(0.03, lambda: publisher.publish(self.orders(1)))
        assert reactor.run_until(lambda: got, WAIT_S)
