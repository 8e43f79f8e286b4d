"""Compares the orders with the processes of this node and returns the actions that are needed. Pure.

`reconcile` looks only at the newest orders and at the present processes, so lost, repeated and late orders do
no harm. Four more rules:

- A process keeps its rank as long as its group exists. In a new group, survivors take the first ranks of
  their node in their old order, and new processes the ranks after them. The rank of a process that ended is
  not given to another process in the same group: that group has failed or finished, and the scheduler will
  form a new one or drop the job.
- A replica that was ordered to leave never returns. It still receives every newer generation until it has
  left, because ranks leave a group only when all of them know the same newest generation.
- A process takes up a slot until it has exited. What does not fit is started later.
- A lost verifier is started again only when newer orders ask for it. The scheduler decides how often.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence

from common.protocol import JobOrder, Orders, ReplicaOrder, VerifyOrder
from common.types import Struct, replicas_of

LEAVES = -1
"""The rank in an order to leave."""


class Phase(enum.StrEnum):
    ACTIVE = "active"
    """Starting or working."""
    LEAVING = "leaving"
    """Has received an order to leave."""
    KILLED = "killed"
    """The agent is ending it."""
    GONE = "gone"
    """Has ended by itself; remembered as long as the orders ask for it."""


class ReplicaRecord(Struct, frozen=True):
    """A replica process of this node. `order` is the newest one it was sent; `serial` counts starts."""

    name: str
    job_id: str
    serial: int
    phase: Phase
    order: ReplicaOrder


class VerifierRecord(Struct, frozen=True):
    """A verifier process of this node, and the checkpoint it evaluates."""

    name: str
    job_id: str
    checkpoint: str
    phase: Phase
    lost_at: int | None = None
    """Version of the orders when it was lost without a verdict."""


class Kill(Struct, frozen=True):
    name: str


class Forget(Struct, frozen=True):
    """Drop the record of a process that has ended and is no longer ordered."""

    name: str


class SendOrder(Struct, frozen=True):
    """`order.rank` is LEAVES for a replica that has to leave."""

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
    """The actions that bring this node closer to `orders`. Empty if nothing is left to do, or if processes
    have to exit first.

    Kills come before orders and orders before starts. Starts never exceed the free slots. The caller carries
    out the actions in this order, and calls again when a process has exited or newer orders have arrived.
    """
    jobs = {job.spec.id: job for job in orders.jobs}
    wanted = [order for order in orders.verifications if order.node == node]
    claims = {(order.spec.id, order.checkpoint) for order in wanted}
    ends: list[Action] = []
    seen = set()
    for verifier in verifiers:
        claim = (verifier.job_id, verifier.checkpoint)
        may_retry = verifier.lost_at is not None and verifier.lost_at < orders.version
        if claim not in claims or may_retry:
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
    """The ranks of a job on this node. Ranks are numbered through the allocation, node after node."""
    first = 0
    for placement in job.allocation:
        if placement.node == node:
            yield from range(first, first + placement.replicas)
        first += placement.replicas


def _open_ranks(job: JobOrder, node: str, mine: Iterable[ReplicaRecord]) -> list[int]:
    """Ranks of this node that no process has or had in the ordered group."""
    taken = {
        replica.order.rank
        for replica in mine
        if replica.order.group == job.group and replica.phase in (Phase.ACTIVE, Phase.GONE)
    }
    return [rank for rank in ranks_on(job, node) if rank not in taken]


def _sends(job: JobOrder, mine: Iterable[ReplicaRecord], ranks: list[int]) -> Iterator[Action]:
    """Orders for the existing processes. Removes the ranks of survivors from the front of `ranks`."""
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
