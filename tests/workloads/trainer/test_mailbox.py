"""The replica's end of its pipe, without processes."""

import itertools
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from common.codec import decode, encode
from common.protocol import JobRaised, ReplicaAlive, ReplicaMessage
from tests.fixtures.replica_orders import replica_order
from workloads.trainer.mailbox import AgentGone, Mailbox

Pipe = tuple[Connection, Connection]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """The replica's end and the agent's end."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        yield ours, theirs


def test_old_orders_change_nothing(pipe: Pipe) -> None:
    ours, theirs = pipe
    mailbox = Mailbox(ours, 5.0)
    for generation in (3, 2, 3):
        theirs.send_bytes(encode(replica_order(generation)))
    assert mailbox.read()
    assert mailbox.newest == replica_order(3)
    theirs.send_bytes(encode(replica_order(3, rank=2)))
    assert not mailbox.read()


def test_reading_orders_tells_the_agent_now_and_then_that_the_replica_is_alive(pipe: Pipe) -> None:
    ours, theirs = pipe
    mailbox = Mailbox(ours, 5.0)
    assert not theirs.poll()
    for _ in range(100):
        mailbox.read()
    assert decode(theirs.recv_bytes(), ReplicaMessage) == ReplicaAlive()  # type: ignore[arg-type]
    assert not theirs.poll()


def test_sending_to_an_agent_that_no_longer_reads_ends_within_the_timeout(pipe: Pipe) -> None:
    mailbox = Mailbox(pipe[0], 0.1)
    message = JobRaised(job_id="job", generation=1, reason="", output_tail=2_000 * "x")
    many = iter(lambda: mailbox.send(message), "never")
    with pytest.raises(AgentGone):
        list(itertools.islice(many, 10_000))


def test_a_closed_pipe_means_that_the_agent_is_gone(pipe: Pipe) -> None:
    ours, theirs = pipe
    theirs.close()
    with pytest.raises(AgentGone):
        Mailbox(ours, 5.0).read()
