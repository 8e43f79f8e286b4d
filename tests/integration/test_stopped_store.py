"""A stopped store, or a stopped replica that holds the lock of the state: others wait a limited time for
it."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from common.protocol import GenerationRunning, GenerationStarted, ReplicaLost, ReplicaOrder
from tests.fixtures.replica_fleet import (
    EVERY_STEP,
    TIMEOUT_S,
    Fleet,
    Store,
    context,
    running_store,
    tiny_spec,
)
from tests.fixtures.replica_orders import replica_order
from workloads.trainer import checkpoint
from workloads.trainer.checkpoint import StateLock
from workloads.trainer.mailbox import Mailbox
from workloads.trainer.process_group import GroupBroken
from workloads.trainer.rendezvous import Rendezvous

pytestmark = pytest.mark.timeout(120)
BOUND_S = 0.5
HANGS_S = 10.0
"""Without a limit, a call would wait as long as the store is stopped."""
M0 = 24


@pytest.fixture
def store() -> Iterator[Store]:
    with running_store() as running:
        yield running
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGKILL)


@pytest.fixture
def pipe() -> Iterator[Connection]:
    ours, theirs = context.Pipe()
    with ours, theirs:
        yield ours


def stop(pid: int) -> None:
    """Stop a process. Returns when all its threads are stopped."""
    os.kill(pid, signal.SIGSTOP)
    end_s = time.monotonic() + TIMEOUT_S
    while any(
        stat.read_text().rsplit(")", 1)[1].split()[0] != "T"
        for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < end_s


def order(store: Store, rank: int = 0) -> ReplicaOrder:
    return replica_order(rank=rank, world_size=2, atomic_batch=12, store_port=store.port)


@pytest.mark.parametrize(
    "ask",
    [
        lambda rendezvous, mailbox: rendezvous.all_announced(),
        lambda rendezvous, mailbox: rendezvous.any_member_has_state(),
        lambda rendezvous, mailbox: rendezvous.gather(mailbox, TIMEOUT_S, lambda: None),
    ],
    ids=["all_announced", "any_member_has_state", "gather"],
)
def test_no_call_to_a_stopped_store_takes_longer_than_the_limit(
    store: Store, pipe: Connection, ask: Callable[[Rendezvous, Mailbox], object]
) -> None:
    rendezvous = Rendezvous("job", order(store), BOUND_S)
    assert not rendezvous.all_announced()
    stop(store.pid)
    start_s = time.monotonic()
    # Only the first call waits. Later ones in the same rendezvous, or the same `gather`, fail at once.
    for text in ("does not answer(: no answer in 0.5 s)?$", "does not answer$"):
        with pytest.raises(GroupBroken, match=text):
            ask(rendezvous, Mailbox(pipe, TIMEOUT_S))
    assert time.monotonic() - start_s < HANGS_S
    with pytest.raises(GroupBroken, match=f"store at 127.0.0.1:{store.port} cannot be reached: no answer in"):
        Rendezvous("job", order(store, 1), BOUND_S)
    os.kill(store.pid, signal.SIGCONT)
    assert not Rendezvous("another job", order(store), TIMEOUT_S).any_member_has_state()


def test_a_store_that_dies_while_the_group_waits_for_a_member_breaks_the_group(
    store: Store, pipe: Connection
) -> None:
    rendezvous = Rendezvous("job", order(store), BOUND_S)
    os.kill(store.pid, signal.SIGKILL)
    with pytest.raises(GroupBroken, match="the group's store does not answer"):
        rendezvous.gather(Mailbox(pipe, TIMEOUT_S), TIMEOUT_S, lambda: None)


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (0, "rank 1 of 2 did not come in 0.1 s"),
        (1, "all 2 ranks came, but rank 0 did not let them begin in 0.1 s"),
    ],
)
def test_a_group_that_does_not_begin_names_the_missing_ranks(
    store: Store, pipe: Connection, rank: int, text: str
) -> None:
    rendezvous = Rendezvous("job", order(store, rank), TIMEOUT_S)
    if rank == 1:
        other = Rendezvous("job", order(store), TIMEOUT_S)
        other._set("here/0", "")
    with pytest.raises(GroupBroken, match=text):
        rendezvous.gather(Mailbox(pipe, TIMEOUT_S), 0.1, lambda: None)


def test_a_group_that_was_given_up_says_so_if_no_order_follows(store: Store, pipe: Connection) -> None:
    with pytest.raises(GroupBroken, match="rank 1 of 2 did not come"):
        Rendezvous("job", order(store), TIMEOUT_S).gather(Mailbox(pipe, TIMEOUT_S), 0.0, lambda: None)
    with pytest.raises(GroupBroken, match="the group was given up, and no newer order came in 0 s"):
        Rendezvous("job", order(store, 1), TIMEOUT_S).gather(Mailbox(pipe, TIMEOUT_S), 0.0, lambda: None)


def test_a_group_whose_next_store_is_stopped_is_reported_in_time_and_keeps_its_state(
    tmp_path: Path, store: Store
) -> None:
    config = msgspec.structs.replace(EVERY_STEP, collective_timeout_s=1.0)
    with running_store() as good:
        fleet = Fleet(tmp_path, tiny_spec(), good.port, config)
        try:
            fleet.order(2, M0 // 2)
            fleet.wait_for_step(20)
            stop(store.pid)
            fleet.store_port = store.port
            start_s = time.monotonic()
            fleet.order(2, M0 // 2)
            lost = fleet.wait_for(ReplicaLost)
            assert time.monotonic() - start_s < HANGS_S
            assert lost.generation == 2
            assert f"store at 127.0.0.1:{store.port} cannot be reached" in lost.reason
            fleet.store_port = good.port
            fleet.order(2, M0 // 2)
            started = fleet.wait_for(GenerationStarted, lambda event: event.generation == 3)
            assert (started.state_from, started.progress_lost) == ("survivor", 0.0)
            members = list(fleet.members)
            fleet.preempt()
            # They exit although the thread that called the stopped store still hangs.
            assert [fleet.wait_for_exit(name) for name in members] == [0, 0]
        finally:
            fleet.close()


def test_a_state_lock_held_by_another_replica_breaks_the_group_within_the_bound(
    tmp_path: Path, store: Store
) -> None:
    config = msgspec.structs.replace(EVERY_STEP, collective_timeout_s=1.0)
    fleet = Fleet(tmp_path, tiny_spec(), store.port, config)
    try:
        fleet.order(1, M0)
        fleet.wait_for_step(10)
        # With a new lock file, only the new replica needs the lock that is held here.
        (tmp_path / "state.lock").unlink()
        kept = StateLock(tmp_path)
        assert kept.try_alone()
        fleet.order(2, M0 // 2)
        fleet.wait_for(ReplicaLost, lambda fact: "holds the lock on the job's state" in fact.reason)
        kept.release()
        fleet.order(2, M0 // 2)
        fleet.wait_for(GenerationRunning, lambda fact: fact.generation == 3)
    finally:
        fleet.close()


def test_a_replica_stopped_while_saving_blocks_the_others_only_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "LOCK_TIMEOUT_S", 0.05)
    with checkpoint._locked(tmp_path / "saving.lock"), pytest.raises(BlockingIOError):
        checkpoint.save(tmp_path, 1, b"state")
    assert checkpoint.save(tmp_path, 1, b"state").path.exists()
