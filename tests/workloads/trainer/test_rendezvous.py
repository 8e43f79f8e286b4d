"""How members of a group meet in a real store, without processes."""

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import pytest
from torch.distributed import TCPStore

from common.codec import encode
from tests.fixtures.replica_orders import replica_order
from workloads.trainer.mailbox import Mailbox
from workloads.trainer.process_group import GroupBroken
from workloads.trainer.rendezvous import Rendezvous, Superseded


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def member(store: TCPStore, rank: int, group: int = 2, world_size: int = 2) -> Rendezvous:
    order = replica_order(group, rank=rank, group=group, world_size=world_size, store_port=store.port)
    return Rendezvous("job", order, 60.0)


@contextmanager
def mailbox_and_agent() -> Iterator[tuple[Mailbox, Connection]]:
    with ExitStack() as pipe:
        ours, theirs = map(pipe.enter_context, multiprocessing.Pipe())
        yield Mailbox(ours, 5.0), theirs


def test_a_group_that_one_member_has_given_up_is_given_up_by_all(store: TCPStore) -> None:
    """Rank 0 would otherwise connect, and wait in vain for a member that follows a newer order."""
    newer = encode(replica_order(3, group=3, world_size=2, store_port=store.port))
    all_were_there: list[bool] = []
    with mailbox_and_agent() as (called_away, its_agent), mailbox_and_agent() as (first, agent_of_first):
        its_agent.send_bytes(newer)
        with pytest.raises(Superseded):
            member(store, 1).gather(called_away, 5.0, lambda: None)

        def prepare() -> None:
            all_were_there.append(True)
            agent_of_first.send_bytes(newer)

        with pytest.raises(Superseded):
            member(store, 0).gather(first, 5.0, prepare)
    assert all_were_there


def test_a_straggler_of_an_old_group_cannot_join_the_next(store: TCPStore) -> None:
    straggler, rank_0 = member(store, 1, group=2), member(store, 0, group=3)
    with mailbox_and_agent() as (mailbox, _):
        straggler.announce(has_state=True)
        with pytest.raises(GroupBroken, match="rank 0 of 2 did not come"):
            straggler.gather(mailbox, 0.0, lambda: None)
        rank_0.announce(has_state=True)
        assert not rank_0.all_announced()
        with pytest.raises(GroupBroken, match="rank 1 of 2 did not come"):
            rank_0.gather(mailbox, 0.0, lambda: None)


def test_a_member_learns_who_has_state_before_all_are_announced(store: TCPStore) -> None:
    """A leaver asks this when its group has waited long enough for newcomers; it must not wait for them."""
    members = [member(store, rank, world_size=3) for rank in range(3)]
    assert not members[0].any_member_has_state()
    members[1].announce(has_state=False)
    assert not members[0].any_member_has_state()
    members[2].announce(has_state=True)
    assert members[0].any_member_has_state()
