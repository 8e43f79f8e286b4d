"""How the members of a new process group find each other.

They meet in the TCPStore of the group's first node, under a prefix of run, job and group, so that a straggler
of another group cannot join. They connect to each other only when all of them are there. Every wait is
bounded and ends early when a newer order arrives. A store that stops answering breaks the group just like a
store that is gone.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import (  # type: ignore[attr-defined]  # documented, but not marked as exported
    PrefixStore,
    TCPStore,
)

from common.protocol import ReplicaOrder
from workloads.trainer.bounded_call import BoundedCaller
from workloads.trainer.mailbox import Mailbox
from workloads.trainer.process_group import (
    Group,
    GroupBroken,
    connect_group,
    first_sentence,
    single_member_group,
)

POLL_S = 0.002
"""Between two looks at the store: one cannot wait for a store and a pipe at the same time."""
HAS_STATE, HAS_NO_STATE = "state", "none"
GO, GIVE_UP = "go", "give up"

T = TypeVar("T")


class Superseded(Exception):
    """A newer order arrived while the group of an older one was forming."""


class Rendezvous:
    """The meeting place of one group. `job` is a name that no other job of any run has.

    Every method raises GroupBroken when the store cannot be reached or does not answer within `timeout_s`.
    """

    def __init__(self, job: str, order: ReplicaOrder, timeout_s: float) -> None:
        self.order = order
        self._timeout_s = timeout_s
        self._ranks = range(order.world_size)
        self._store_is_silent = False
        """The store failed to answer once; it is not asked again."""
        where = f"store at {order.store_host}:{order.store_port}"
        self._store = self._ask(lambda: self._open(job), f"{where} cannot be reached")

    def announce(self, *, has_state: bool) -> None:
        """Say that this member is ready to come as soon as the others are."""
        self._set(f"announced/{self.order.rank}", HAS_STATE if has_state else HAS_NO_STATE)

    def all_announced(self) -> bool:
        return self._all_have("announced")

    def any_member_has_state(self) -> bool:
        """Whether one of the members that have announced themselves has the job's state in memory."""
        announced = [key for rank in self._ranks if self._has(key := f"announced/{rank}")]
        if not announced:
            return False
        return HAS_STATE.encode() in self._ask(lambda: self._store.multi_get(announced))

    def gather(self, mailbox: Mailbox, wait_s: float, prepare: Callable[[], None]) -> Group:
        """Wait for all members and connect to them. Rank 0 calls `prepare` once all have arrived, before
        anyone connects. Raises Superseded, or GroupBroken after `wait_s`.

        A member that is called away before rank 0 says "go" gives the group up for everyone; after that
        nobody can. Otherwise some members would wait for one that already follows a newer order.
        """
        self._set(f"here/{self.order.rank}", "")
        try:
            if self.order.rank == 0:
                self._wait(lambda: self._all_have("here"), mailbox, wait_s)
                prepare()
                decision = self._decide(GO)
            else:
                self._wait(lambda: self._has("decision"), mailbox, wait_s)
                decision = self._decide(GIVE_UP)
            if decision == GIVE_UP:
                self._wait(lambda: False, mailbox, wait_s, "the group was given up, and no newer order came")
        except (Superseded, GroupBroken):
            if self._decide(GIVE_UP) != GO:
                raise
        if self.order.world_size == 1:
            return single_member_group()
        return self._ask(self._connect, f"group {self.order.group} did not connect")

    def _decide(self, proposal: str) -> str:
        """The first decision made about this group: `proposal`, if there was none before."""
        decided: bytes = self._ask(lambda: self._store.compare_set("decision", "", proposal))
        return decided.decode()

    def _open(self, job: str) -> PrefixStore:
        address = (self.order.store_host, self.order.store_port)
        if address not in _connections:
            _connections.clear()
            timeout = timedelta(seconds=self._timeout_s)
            _connections[address] = TCPStore(
                *address, is_master=False, wait_for_workers=False, timeout=timeout
            )
        return PrefixStore(f"{job}/{self.order.group}", _connections[address])

    def _connect(self) -> Group:
        order = self.order
        store = PrefixStore("gloo", self._store)
        return connect_group(
            store, order.rank, order.world_size, order.store_host, order.store_port, self._timeout_s
        )

    def _wait(
        self, done: Callable[[], bool], mailbox: Mailbox, wait_s: float, problem: str | None = None
    ) -> None:
        end_s = time.monotonic() + wait_s
        while not done():
            mailbox.read(POLL_S)
            check_newest(mailbox, self.order)
            if time.monotonic() > end_s:
                raise GroupBroken(f"{problem or self._missing_members()} in {wait_s:g} s")

    def _missing_members(self) -> str:
        """Which members the group is still waiting for, as the start of a sentence."""
        size = len(self._ranks)
        missing = [str(rank) for rank in self._ranks if not self._has(f"here/{rank}")]
        if not missing:
            return f"all {size} ranks came, but rank 0 did not let them begin"
        return f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {size} did not come"

    def _all_have(self, what: str) -> bool:
        return self._has(*(f"{what}/{rank}" for rank in self._ranks))

    def _has(self, *keys: str) -> bool:
        return self._ask(lambda: self._store.check(list(keys)))

    def _set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def _ask(self, question: Callable[[], T], problem: str = "the group's store does not answer") -> T:
        """Ask the store; GroupBroken starts with `problem`.

        torch's own timeout is not enough: most of its calls wait without any bound for a server that has been
        stopped or cut off.
        """
        if self._store_is_silent:
            raise GroupBroken(problem)
        try:
            return _caller.call(question, self._timeout_s)
        except (RuntimeError, OSError) as error:
            self._store_is_silent = isinstance(error, TimeoutError)
            _connections.clear()
            raise GroupBroken(f"{problem}: {first_sentence(error)}") from error


def check_newest(mailbox: Mailbox, order: ReplicaOrder) -> None:
    """Raises Superseded when the newest order is about another group than `order`."""
    if mailbox.newest is not None and mailbox.newest.group != order.group:
        raise Superseded


_caller = BoundedCaller()
_connections: dict[tuple[str, int], TCPStore] = {}
"""The connection to the last store, reused from group to group: torch looks up the name of the store's
address whenever it connects, which takes seconds where a name server does not answer."""
