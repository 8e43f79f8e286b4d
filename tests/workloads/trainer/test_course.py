"""The agreement on the step after which ranks switch, without processes: sums are added up here."""

import itertools
import multiprocessing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from common.codec import decode, encode
from common.protocol import JobRaised, ReplicaAlive, ReplicaMessage, ReplicaOrder
from common.types import JobConfig
from workloads.trainer.elastic import AgentGone, Course, GroupBroken, Mailbox, Meeting, Superseded

PATIENCE_S = 1000.0


def order(
    generation: int, rank: int = 0, group: int = 1, world_size: int = 3, store_port: int = 1
) -> ReplicaOrder:
    return ReplicaOrder(
        generation=generation,
        group=group,
        rank=rank,
        world_size=world_size,
        nodes=1,
        config=JobConfig(atomic_batch=8),
        store_host="127.0.0.1",
        store_port=store_port,
    )


@given(st.lists(st.lists(st.integers(2, 6), max_size=3), min_size=3, max_size=3))
def test_ranks_switch_together_to_an_order_that_all_have(known: list[list[int]]) -> None:
    """`known`: the generations, in order of arrival, that each rank has heard of."""
    pipes = [multiprocessing.Pipe() for _ in known]
    try:
        courses = [Course(Mailbox(ours, 5.0), "job", 1.0, PATIENCE_S) for ours, _ in pipes]
        for (_, theirs), generations in zip(pipes, known, strict=True):
            for generation in generations:
                theirs.send_bytes(encode(order(generation)))
        offers = [course.offer(order(1, rank)) for rank, course in enumerate(courses)]
        ahead, ahead_sqr = sum(offers), sum(offer**2 for offer in offers)
        agreed = [course.agreed(3, ahead, ahead_sqr) for course in courses]
    finally:
        for ours, theirs in pipes:
            ours.close()
            theirs.close()
    newest = {max(generations, default=1) for generations in known}
    if len(newest) == 1 and newest != {1}:
        assert [a and a.generation for a in agreed] == [newest.pop()] * 3
    else:
        assert agreed == [None] * 3


def test_an_order_to_leave_needs_no_meeting() -> None:
    ours, theirs = multiprocessing.Pipe()
    course = Course(Mailbox(ours, 5.0), "job", 1.0, PATIENCE_S)
    theirs.send_bytes(encode(order(2, rank=-1, group=2, world_size=0)))
    assert course.offer(order(1)) == 1
    assert course.meeting is None
    ours.close()
    theirs.close()


@pytest.mark.parametrize(("patience_s", "offered"), [(PATIENCE_S, 0), (0.0, 1)])
def test_newcomers_are_waited_for_but_not_for_ever(patience_s: float, offered: int) -> None:
    """They may themselves wait for the slots of a job that waits for the slots of this one."""
    ours, theirs = multiprocessing.Pipe()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    course = Course(Mailbox(ours, 5.0), "job", 5.0, patience_s)
    theirs.send_bytes(encode(order(2, group=2, world_size=2, store_port=store.port)))
    present = order(1, world_size=1)
    assert course.offer(present) == offered
    newcomer = order(2, rank=1, group=2, world_size=2, store_port=store.port)
    Meeting("job", newcomer, 5.0).announce(has_state=False)
    assert course.offer(present) == 1
    ours.close()
    theirs.close()


def test_a_group_that_one_member_has_given_up_is_given_up_by_all() -> None:
    """Rank 0 would otherwise connect, and wait in vain for a member that follows a newer order."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    newer = order(3, group=3, world_size=2, store_port=store.port)
    called_away, first = multiprocessing.Pipe(), multiprocessing.Pipe()
    called_away[1].send_bytes(encode(newer))
    member = Meeting("job", order(2, rank=1, group=2, world_size=2, store_port=store.port), 5.0)
    with pytest.raises(Superseded):
        member.gather(Mailbox(called_away[0], 5.0), 5.0, lambda: None)
    rank_0 = Meeting("job", order(2, group=2, world_size=2, store_port=store.port), 5.0)
    all_were_there: list[bool] = []

    def prepare() -> None:
        all_were_there.append(True)
        first[1].send_bytes(encode(newer))

    with pytest.raises(Superseded):
        rank_0.gather(Mailbox(first[0], 5.0), 5.0, prepare)
    assert all_were_there
    for end in (*called_away, *first):
        end.close()


def test_a_straggler_of_a_former_group_cannot_join_the_next() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = multiprocessing.Pipe()
    straggler = Meeting("job", order(2, rank=1, group=2, world_size=2, store_port=store.port), 5.0)
    straggler.announce(has_state=True)
    with pytest.raises(GroupBroken, match="rank 0 of 2 did not come"):
        straggler.gather(Mailbox(ours, 5.0), 0.0, lambda: None)
    rank_0 = Meeting("job", order(3, group=3, world_size=2, store_port=store.port), 5.0)
    rank_0.announce(has_state=True)
    assert not rank_0.all_announced()
    with pytest.raises(GroupBroken, match="rank 1 of 2 did not come"):
        rank_0.gather(Mailbox(ours, 5.0), 0.0, lambda: None)
    ours.close()
    theirs.close()


def test_the_state_of_a_group_can_be_asked_for_before_all_are_announced() -> None:
    """By a leaver whose group has waited long enough for newcomers; it must not wait for them itself."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meetings = [Meeting("job", order(2, rank=r, group=2, store_port=store.port), 60.0) for r in range(3)]
    assert not meetings[0].somebody_has_state()
    meetings[1].announce(has_state=False)
    assert not meetings[0].somebody_has_state()
    meetings[2].announce(has_state=True)
    assert meetings[0].somebody_has_state()


def test_old_orders_change_nothing() -> None:
    ours, theirs = multiprocessing.Pipe()
    mailbox = Mailbox(ours, 5.0)
    for generation in (3, 2, 3):
        theirs.send_bytes(encode(order(generation)))
    assert mailbox.read()
    assert mailbox.newest == order(3)
    theirs.send_bytes(encode(msgspec.structs.replace(order(3), rank=2)))
    assert not mailbox.read()
    ours.close()
    theirs.close()


def test_whoever_reads_its_orders_says_so_but_not_each_time() -> None:
    ours, theirs = multiprocessing.Pipe()
    mailbox = Mailbox(ours, 5.0)
    assert not theirs.poll()
    for _ in range(100):
        mailbox.read()
    assert decode(theirs.recv_bytes(), ReplicaMessage) == ReplicaAlive()  # type: ignore[arg-type]
    assert not theirs.poll()
    ours.close()
    theirs.close()


def test_an_agent_that_has_stopped_reading_is_not_waited_for_longer_than_agreed() -> None:
    ours, theirs = multiprocessing.Pipe()
    mailbox = Mailbox(ours, 0.1)
    message = JobRaised(job_id="job", generation=1, reason="", output_tail=2_000 * "x")
    many = iter(lambda: mailbox.send(message), "never")
    with pytest.raises(AgentGone):
        list(itertools.islice(many, 10_000))
    ours.close()
    theirs.close()


def test_a_closed_pipe_means_that_the_agent_is_gone() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(AgentGone):
        Mailbox(ours, 5.0).read()
    ours.close()
