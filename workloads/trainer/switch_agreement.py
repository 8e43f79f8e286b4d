"""How the ranks of a group agree, without extra messages, on the step after which they follow a newer
order."""

import time

from common.protocol import ReplicaOrder
from workloads.trainer.mailbox import Mailbox
from workloads.trainer.rendezvous import Rendezvous


class SwitchAgreement:
    """One rank's part in the agreement. Two sums that travel with the gradients are enough.

    Each rank contributes d = (generation it is ready for) - (current generation), 0 for none, and d^2. Since
    n sum(d^2) = sum(d)^2 holds only when all d are equal, every rank sees after the same step that all ranks
    are ready for the same generation.

    A rank is ready once all newcomers are, or after `newcomers_timeout_s`: in a full cluster two jobs may
    each wait for slots that the other one is about to free.
    """

    def __init__(
        self, mailbox: Mailbox, job: str, store_timeout_s: float, newcomers_timeout_s: float
    ) -> None:
        self._mailbox = mailbox
        self._rendezvous: Rendezvous | None = None
        """Of the newest order, if that order needs a new group."""
        self._job, self._store_timeout_s = job, store_timeout_s
        self._newcomers_timeout_s = newcomers_timeout_s
        self._seen_generation = -1
        self._waiting_since_s = 0.0
        self._offered: ReplicaOrder | None = None

    def offer(self, current: ReplicaOrder) -> int:
        """d of this rank. Raises GroupBroken when the newer order's store cannot be reached."""
        self._mailbox.read()
        newest = self._mailbox.newest
        self._offered = None
        if newest is None or newest.generation <= current.generation:
            return 0
        if newest.generation > self._seen_generation:
            self._seen_generation = newest.generation
            self._prepare_rendezvous(newest, current)
        # It is enough that rank 0 waits for the newcomers: the others cannot agree without it.
        waiting = time.monotonic() - self._waiting_since_s < self._newcomers_timeout_s
        if self._rendezvous and current.rank == 0 and waiting and not self._rendezvous.all_announced():
            return 0
        self._offered = newest
        return newest.generation - current.generation

    def agreed(self, ranks: int, ahead: float, ahead_sqr: float) -> ReplicaOrder | None:
        """The order to switch to, given sum(d) and sum(d^2) over all `ranks`; None to go on."""
        return self._offered if ahead > 0 and ranks * ahead_sqr == ahead * ahead else None

    def rendezvous_for(self, order: ReplicaOrder) -> Rendezvous:
        """Where the group of `order` meets. Raises GroupBroken."""
        if self._rendezvous is None or self._rendezvous.order.group != order.group:
            self._rendezvous = Rendezvous(self._job, order, self._store_timeout_s)
        return self._rendezvous

    def _prepare_rendezvous(self, newest: ReplicaOrder, current: ReplicaOrder) -> None:
        if self._rendezvous is not None and self._rendezvous.order.group == newest.group:
            return
        self._rendezvous = None
        joins = newest.rank >= 0
        if newest.world_size and newest.group != current.group and (joins or current.rank == 0):
            self._rendezvous = Rendezvous(self._job, newest, self._store_timeout_s)
            self._waiting_since_s = time.monotonic()
            if joins:
                self._rendezvous.announce(has_state=True)
