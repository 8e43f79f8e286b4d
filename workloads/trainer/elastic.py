"""Process groups that come and go while the processes, and their training state, stay.

The ranks of a group agree on the step after which they switch to a newer order by two sums that travel with
the gradients (`Course`). The members of a new group meet in a TCPStore under the prefix (run, job, group), so
that a straggler of another group cannot get in, and connect to each other only when all of them are there.
Every wait is bounded, and given up for a newer order; a store that stands still breaks the group like one
that is gone.

Groups are torch's `ProcessGroupGloo` objects, made and dropped directly: `init_process_group` would make the
same object behind process-wide state. One gloo device (a listening socket and a thread) serves all groups of
a process, which halves the time that it takes to drop one.
"""

import select
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from common.codec import decode, encode
from common.protocol import ReplicaAlive, ReplicaMessage, ReplicaOrder
from workloads.trainer.bounded import BoundedCaller

POLL_S = 0.002
"""Between two looks at a store that cannot be waited for together with a pipe."""
GLOO_THREADS = 2
ALIVE_EVERY_S = 1.0
HAS_STATE, HAS_NONE = "state", "none"
GO, GIVE_UP = "go", "give up"

T = TypeVar("T")


class GroupBroken(Exception):
    """A peer has died, or did not come or answer within the bound; the text says which."""


class Superseded(Exception):
    """A newer order came while the group of an older one was forming."""


class AgentGone(Exception):
    """Nobody is at the other end of the pipe any more."""


class Mailbox:
    """The replica's end of its pipe. `newest` is the newest order that has come. Raises AgentGone, also when
    the agent has not read for `bound_s` and the pipe is full."""

    def __init__(self, connection: Connection, bound_s: float) -> None:
        self._connection, self._bound_s = connection, bound_s
        self._poll, self._room = select.poll(), select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        self._room.register(connection.fileno(), select.POLLOUT)
        self._said_alive_s = float("-inf")
        self.newest: ReplicaOrder | None = None

    def read(self, wait_s: float = 0.0) -> bool:
        """Take in what is there, or comes within `wait_s`; whether there was a newer order. Now and then the
        agent is told that its orders are read, which is how it knows that this replica does not hang."""
        if time.monotonic() - self._said_alive_s > ALIVE_EVERY_S:
            self._said_alive_s = time.monotonic()
            self.send(ReplicaAlive())
        newer = False
        while self._poll.poll(wait_s * 1000.0):
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError) as error:
                raise AgentGone from error
            order = decode(data, ReplicaOrder)
            if self.newest is None or order.generation > self.newest.generation:
                self.newest, newer = order, True
            wait_s = 0.0
        return newer

    def send(self, message: ReplicaMessage) -> None:
        # A writable pipe takes a whole message: it has more room than any of them needs.
        if not self._room.poll(self._bound_s * 1000.0):
            raise AgentGone
        try:
            self._connection.send_bytes(encode(message))
        except OSError as error:
            raise AgentGone from error


class Group:
    """Ranks that train together. With one rank there is nobody to talk to, and nothing is sent."""

    def __init__(self, rank: int, size: int, backend: Any) -> None:
        self.rank, self.size, self._backend = rank, size, backend

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks, in place. Raises GroupBroken."""
        self._run(lambda backend: backend.allreduce([tensor]))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill `tensor` with that of rank `root`. Raises GroupBroken."""
        self._run(lambda backend: backend.broadcast(tensor, root))

    def _run(self, start: Callable[[Any], Any]) -> None:
        if self._backend is None:
            if self.size > 1:
                raise GroupBroken("the group has been left")
            return
        try:
            start(self._backend).wait()
        except RuntimeError as error:
            raise GroupBroken(_short(error)) from error

    def leave(self) -> None:
        """The connections are closed in the background: gloo takes up to 10 ms for each of them."""
        backend, self._backend = [self._backend], None
        if backend[0] is not None:
            threading.Thread(target=backend.clear, daemon=True).start()


class Meeting:
    """One group's place in its store. Raises GroupBroken wherever the store cannot be reached, or does not
    answer within `timeout_s`. `job` is a name that no other job of any run has."""

    def __init__(self, job: str, order: ReplicaOrder, timeout_s: float) -> None:
        self.order = order
        self._timeout_s = timeout_s
        self._ranks = range(order.world_size)
        self._silent = False
        """A store that has not answered once is not asked again."""
        where = f"store at {order.store_host}:{order.store_port}"
        self._store = self._ask(lambda: self._open(job), f"{where} cannot be reached")

    def announce(self, *, has_state: bool) -> None:
        """This member can come as soon as the others can."""
        self._set(f"announced/{self.order.rank}", HAS_STATE if has_state else HAS_NONE)

    def all_announced(self) -> bool:
        return self._have("announced")

    def somebody_has_state(self) -> bool:
        """Among those that have announced themselves."""
        there = [key for rank in self._ranks if self._has(key := f"announced/{rank}")]
        return bool(there) and HAS_STATE.encode() in self._ask(lambda: self._store.multi_get(there))

    def gather(self, mailbox: Mailbox, bound_s: float, prepare: Callable[[], None]) -> Group:
        """Wait for all members, and connect to them. Rank 0 calls `prepare` when all are there, before
        anybody connects. Raises Superseded, or GroupBroken after `bound_s`.

        Whoever is called away before all are there gives the group up for everybody; once rank 0 has said go,
        nobody can. Else some would wait in vain for one that follows a newer order already.
        """
        self._set(f"here/{self.order.rank}", "")
        try:
            if self.order.rank == 0:
                self._wait(lambda: self._have("here"), mailbox, bound_s)
                prepare()
                decision = self._decide(GO)
            else:
                self._wait(lambda: self._has("decision"), mailbox, bound_s)
                decision = self._decide(GIVE_UP)
            if decision == GIVE_UP:
                self._wait(lambda: False, mailbox, bound_s, "the group was given up, and no newer order came")
        except (Superseded, GroupBroken):
            if self._decide(GIVE_UP) != GO:
                raise
        if self.order.world_size == 1:
            return Group(0, 1, None)
        backend = self._ask(self._connect, f"group {self.order.group} did not connect")
        return Group(self.order.rank, self.order.world_size, backend)

    def _decide(self, proposal: str) -> str:
        """The first decision about this group, which is `proposal` if there was none."""
        decided: bytes = self._ask(lambda: self._store.compare_set("decision", "", proposal))
        return decided.decode()

    def _open(self, job: str) -> PrefixStore:
        address = (self.order.store_host, self.order.store_port)
        if address not in _connections:
            _connections.clear()
            bound = timedelta(seconds=self._timeout_s)
            _connections[address] = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=bound)
        return PrefixStore(f"{job}/{self.order.group}", _connections[address])

    def _connect(self) -> Any:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        options._threads = GLOO_THREADS
        options._devices = [_device(_local_address(self.order.store_host, self.order.store_port))]
        store = PrefixStore("gloo", self._store)
        return gloo(store, self.order.rank, self.order.world_size, options)

    def _wait(
        self, done: Callable[[], bool], mailbox: Mailbox, bound_s: float, otherwise: str | None = None
    ) -> None:
        end_s = time.monotonic() + bound_s
        while not done():
            mailbox.read(POLL_S)
            check_newest(mailbox, self.order)
            if time.monotonic() > end_s:
                raise GroupBroken(f"{otherwise or self._lacking()} in {bound_s:g} s")

    def _lacking(self) -> str:
        """What the group could not begin without."""
        size = len(self._ranks)
        missing = [str(rank) for rank in self._ranks if not self._has(f"here/{rank}")]
        if not missing:
            return f"all {size} ranks came, but rank 0 did not let them begin"
        return f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {size} did not come"

    def _have(self, what: str) -> bool:
        return self._has(*(f"{what}/{rank}" for rank in self._ranks))

    def _has(self, *keys: str) -> bool:
        return self._ask(lambda: self._store.check(list(keys)))

    def _set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def _ask(self, question: Callable[[], T], otherwise: str = "the group's store does not answer") -> T:
        """`otherwise` begins the text of GroupBroken. torch's own timeout is no bound: most of its calls wait
        without one for a server that stands still or has been cut off."""
        if self._silent:
            raise GroupBroken(otherwise)
        try:
            return _caller.call(question, self._timeout_s)
        except (RuntimeError, OSError) as error:
            self._silent = isinstance(error, TimeoutError)
            _connections.clear()
            raise GroupBroken(f"{otherwise}: {_short(error)}") from error


class Course:
    """Which order a rank follows, which newer one it is ready for, and what all ranks have agreed on.

    Each rank contributes d = (generation that it is ready for) - (present one), 0 for none, and d^2. Since
    n sum(d^2) = sum(d)^2 holds only when all d are equal, everybody sees after the same step that everybody
    is ready for the same generation.

    A rank is ready when all newcomers are, or after `patience_s`: two jobs of a full cluster may each wait
    for slots that the other one leaves.
    """

    def __init__(self, mailbox: Mailbox, job: str, timeout_s: float, patience_s: float) -> None:
        self.mailbox = mailbox
        self.meeting: Meeting | None = None
        """Of the newest order, where that needs a new group."""
        self._job, self._timeout_s, self._patience_s = job, timeout_s, patience_s
        self._seen = -1
        """Newest generation that has been looked at."""
        self._waits_since_s = 0.0
        """Since when the members of the present meeting are waited for."""
        self._offered: ReplicaOrder | None = None

    def offer(self, present: ReplicaOrder) -> int:
        """d of this rank. Raises GroupBroken when the newer order's store cannot be reached."""
        self.mailbox.read()
        newest = self.mailbox.newest
        self._offered = None
        if newest is None or newest.generation <= present.generation:
            return 0
        if newest.generation > self._seen:
            self._seen = newest.generation
            self._go_to_meeting(newest, present)
        # One rank that waits for the newcomers is enough: nothing is agreed on without it.
        patient = time.monotonic() - self._waits_since_s < self._patience_s
        if self.meeting and present.rank == 0 and patient and not self.meeting.all_announced():
            return 0
        self._offered = newest
        return newest.generation - present.generation

    def agreed(self, ranks: int, ahead: float, ahead_sqr: float) -> ReplicaOrder | None:
        """The order to switch to, given the sums over `ranks`."""
        return self._offered if ahead > 0 and ranks * ahead_sqr == ahead * ahead else None

    def meeting_for(self, order: ReplicaOrder) -> Meeting:
        """Where the group of `order` meets; announced, by one that has state."""
        if self.meeting is None or self.meeting.order.group != order.group:
            self.meeting = Meeting(self._job, order, self._timeout_s)
        return self.meeting

    def _go_to_meeting(self, newest: ReplicaOrder, present: ReplicaOrder) -> None:
        if self.meeting is not None and self.meeting.order.group == newest.group:
            return
        self.meeting = None
        joins = newest.rank >= 0
        if newest.world_size and newest.group != present.group and (joins or present.rank == 0):
            self.meeting = Meeting(self._job, newest, self._timeout_s)
            self._waits_since_s = time.monotonic()
            if joins:
                self.meeting.announce(has_state=True)


def check_newest(mailbox: Mailbox, order: ReplicaOrder) -> None:
    """Raises Superseded when the newest order is about another group than `order`."""
    if mailbox.newest is not None and mailbox.newest.group != order.group:
        raise Superseded


_caller = BoundedCaller()
_devices: dict[str, object] = {}
_connections: dict[tuple[str, int], TCPStore] = {}
"""The last store's, kept from group to group: torch asks the network for the name of the store's address
whenever it connects, which takes seconds where a name server does not answer."""


def _device(address: str) -> object:
    if address not in _devices:
        _devices[address] = ProcessGroupGloo.create_device(hostname=address)
    return _devices[address]


def _local_address(host: str, port: int) -> str:
    """Address of this machine from which `host` is reached; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _short(error: BaseException) -> str:
    """The first sentence of an error of torch's, without the place in its source."""
    text = str(error).split("\n", 1)[0]
    if text.startswith("[/"):
        text = text.split("] ", 1)[-1]
    return text.split(". ", 1)[0][:200]
