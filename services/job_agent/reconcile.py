"""From what is ordered and what runs on this node to what has to be done. Pure: processes are `replicas.py`.

The function is level-triggered: it looks at the newest orders and at the processes as they are, so that a
lost, repeated or late order changes nothing. Four rules carry the rest:

- A rank belongs to a process for as long as its group lives. Survivors take the first ranks of their node in
  their old order, newcomers the ranks after them. The rank of a process that ended is not given away in the
  same group: the group is broken or finished, and the scheduler will form a new one or drop the job.
- A replica that was told to leave never comes back, but hears of every newer generation until it has left,
  because the ranks leave a group only when all of them know the same newest generation.
- Processes count against the slots until they have exited; what does not fit is started later.
- A verifier that was lost is not tried again before newer orders ask for it: how often, is the scheduler's.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence

from common.protocol import JobOrder, Orders, ReplicaOrder, VerifyOrder
from common.types import Struct, replicas_of

LEAVES = -1


class Phase(enum.StrEnum):
    ACTIVE = "active"
    """Starting or at work."""
    LEAVING = "leaving"
    """Was told to leave by an order."""
    KILLED = "killed"
    """Was sent a signal to end."""
    GONE = "gone"
    """Ended by itself, or died; remembered as long as it is ordered."""


class ReplicaRecord(Struct, frozen=True):
    """A replica process of this node; `order` is the newest one that it was sent. `serial` counts starts."""

    name: str
    job_id: str
    serial: int
    phase: Phase
    order: ReplicaOrder


class VerifierRecord(Struct, frozen=True):
    """A verifier process of this node, and the checkpoint that it looks at."""

    name: str
    job_id: str
    checkpoint: str
    phase: Phase
    lost_at: int | None = None
    """Version of the orders under which it was lost, without a verdict."""


class Kill(Struct, frozen=True):
    name: str


class Forget(Struct, frozen=True):
    """A process that has ended is no longer ordered: its record has no more use."""

    name: str


class SendOrder(Struct, frozen=True):
    """`order.rank` is LEAVES for a replica that has to go."""

    name: str
    order: ReplicaOrder


class StartReplica(Struct, frozen=True):
    """Start a replica and send it its first order."""

    job: JobOrder
    order: ReplicaOrder


class StartVerifier(Struct, frozen=True):
    order: VerifyOrder


Action = Kill | Forget | SendOrder | StartVerifier | StartReplica


def reconcile(
    orders: Orders,
    node: str,
    slots: int,
    replicas: Sequence[ReplicaRecord],
    verifiers: Sequence[VerifierRecord],
) -> list[Action]:
    """What brings this node nearer to `orders`; empty when it is there, or waits for processes to exit.

    Kills come before orders, orders before starts, and starts never exceed the free slots. The caller carries
    the actions out in this order and calls again when a process has exited or newer orders have come.
    """
    jobs = {job.spec.id: job for job in orders.jobs}
    wanted = [order for order in orders.verifications if order.node == node]
    claims = {(order.spec.id, order.checkpoint) for order in wanted}
    ends: list[Action] = []
    seen = set()
    for verifier in verifiers:
        claim = (verifier.job_id, verifier.checkpoint)
        may_try = verifier.lost_at is not None and verifier.lost_at < orders.version
        if claim not in claims or may_try:
            ends.extend(_end(verifier))
        elif verifier.phase is not Phase.KILLED or verifier.lost_at is not None:
            seen.add(claim)
    for replica in replicas:
        job = jobs.get(replica.job_id)
        if job is None or (replica.phase is Phase.GONE and replica.order.group != job.group):
            ends.extend(_end(replica))

    starts: list[Action] = [StartVerifier(order=o) for o in wanted if (o.spec.id, o.checkpoint) not in seen]
    sends: list[Action] = []
    for job in orders.jobs:
        mine = [replica for replica in replicas if replica.job_id == job.spec.id]
        ranks = _open_ranks(job, node, mine)
        sends.extend(_sends(job, mine, ranks))
        starts.extend(StartReplica(job=job, order=replica_order(job, rank)) for rank in ranks)
    living = sum(
        phase is not Phase.GONE for phase in (*(r.phase for r in replicas), *(v.phase for v in verifiers))
    )
    return [*ends, *sends, *starts[: max(slots - living, 0)]]


def replica_order(job: JobOrder, rank: int) -> ReplicaOrder:
    """One replica's part of a job's order."""
    return ReplicaOrder(
        generation=job.generation,
        group=job.group,
        rank=rank,
        world_size=replicas_of(job.allocation),
        nodes=sum(placement.replicas > 0 for placement in job.allocation),
        config=job.config,
        store_host=job.store_host,
        store_port=job.store_port,
        allocation=job.allocation,
    )


def ranks_on(job: JobOrder, node: str) -> Iterator[int]:
    """Ranks count through the allocation, node after node."""
    first = 0
    for placement in job.allocation:
        if placement.node == node:
            yield from range(first, first + placement.replicas)
        first += placement.replicas


def _open_ranks(job: JobOrder, node: str, mine: Iterable[ReplicaRecord]) -> list[int]:
    """Ranks of this node that no process has, or had, in the ordered group."""
    taken = {
        replica.order.rank
        for replica in mine
        if replica.order.group == job.group and replica.phase in (Phase.ACTIVE, Phase.GONE)
    }
    return [rank for rank in ranks_on(job, node) if rank not in taken]


def _sends(job: JobOrder, mine: Iterable[ReplicaRecord], ranks: list[int]) -> Iterator[Action]:
    """Orders for the processes that are there; takes the ranks of survivors from the front of `ranks`."""
    for replica in sorted(mine, key=lambda r: (r.order.rank, r.serial)):
        if replica.phase in (Phase.KILLED, Phase.GONE) or replica.order.generation >= job.generation:
            continue
        if replica.phase is Phase.LEAVING:
            rank = LEAVES
        elif replica.order.group == job.group:
            rank = replica.order.rank
        else:
            rank = ranks.pop(0) if ranks else LEAVES
        yield SendOrder(name=replica.name, order=replica_order(job, rank))


def _end(process: ReplicaRecord | VerifierRecord) -> Iterator[Action]:
    if process.phase is Phase.GONE:
        yield Forget(name=process.name)
    elif process.phase is not Phase.KILLED:
        yield Kill(name=process.name)
