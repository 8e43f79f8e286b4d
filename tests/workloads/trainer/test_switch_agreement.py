"""The agreement on the step after which ranks switch, without processes: the test adds up the sums."""

import multiprocessing
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from common.codec import encode
from tests.fixtures.replica_orders import replica_order
from workloads.trainer.mailbox import Mailbox
from workloads.trainer.rendezvous import Rendezvous
from workloads.trainer.switch_agreement import SwitchAgreement

LONG_S = 1000.0


@given(st.lists(st.lists(st.integers(2, 6), max_size=3), min_size=3, max_size=3))
def test_ranks_switch_together_to_an_order_that_all_have(known: list[list[int]]) -> None:
    """`known`: the generations, in order of arrival, that each rank has received."""
    with ExitStack() as pipes:
        ranks = []
        for generations in known:
            ours, theirs = map(pipes.enter_context, multiprocessing.Pipe())
            ranks.append(SwitchAgreement(Mailbox(ours, 5.0), "job", 1.0, LONG_S))
            for generation in generations:
                theirs.send_bytes(encode(replica_order(generation, world_size=3)))
        offers = [
            agreement.offer(replica_order(1, rank=rank, world_size=3)) for rank, agreement in enumerate(ranks)
        ]
        ahead, ahead_sqr = sum(offers), sum(offer**2 for offer in offers)
        agreed = [agreement.agreed(3, ahead, ahead_sqr) for agreement in ranks]
    newest = {max(generations, default=1) for generations in known}
    if len(newest) == 1 and newest != {1}:
        assert [order and order.generation for order in agreed] == [newest.pop()] * 3
    else:
        assert agreed == [None] * 3


def test_an_order_to_leave_asks_no_store() -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        agreement = SwitchAgreement(Mailbox(ours, 5.0), "job", 1.0, LONG_S)
        # No store listens at port 1: asking it would raise GroupBroken.
        theirs.send_bytes(encode(replica_order(2, rank=-1, group=2, world_size=0, store_port=1)))
        assert agreement.offer(replica_order(1)) == 1


@pytest.mark.parametrize(("newcomers_timeout_s", "offered"), [(LONG_S, 0), (0.0, 1)])
def test_newcomers_are_waited_for_but_not_for_ever(newcomers_timeout_s: float, offered: int) -> None:
    """They may themselves wait for the slots of a job that waits for the slots of this one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        agreement = SwitchAgreement(Mailbox(ours, 5.0), "job", 5.0, newcomers_timeout_s)
        theirs.send_bytes(encode(replica_order(2, group=2, world_size=2, store_port=store.port)))
        current = replica_order(1)
        assert agreement.offer(current) == offered
        newcomer = replica_order(2, rank=1, group=2, world_size=2, store_port=store.port)
        Rendezvous("job", newcomer, 5.0).announce(has_state=False)
        assert agreement.offer(current) == 1
