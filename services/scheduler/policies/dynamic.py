"""dynamic: slots in equal shares, divided anew whenever a job comes or goes; the requested batch stays.

The division depends on nothing but the active jobs and the nodes, so between arrivals and finishes it
comes out the same, and a job that keeps its count keeps its placement: nothing moves.
"""

from typing import Any

from common.types import Allocation, JobConfig, JobSpec, batch_config, can_share, replicas_of
from services.scheduler.policies.interface import ClusterView, Decision, Policy
from services.scheduler.policies.placement import Board, describe, number_nodes, to_allocation, to_row


class DynamicPolicy(Policy):
    name = "dynamic"
    needs_profiles = False

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        slots = sum(node.slots for node in view.nodes)
        shares = equal_shares([usable_replicas(job.spec) for job in view.jobs], slots)
        counts = [shareable(job.spec, share) for job, share in zip(view.jobs, shares, strict=True)]
        board = Board([node.slots for node in view.nodes])
        numbers = number_nodes(view.nodes)
        placed: dict[int, Allocation] = {}
        for j, job in enumerate(view.jobs):
            row = to_row(job.allocation, numbers)
            if row and replicas_of(job.allocation) == counts[j] and board.fits(row):
                board.take(row)
                placed[j] = job.allocation
        movers = [j for j in range(len(counts)) if counts[j] and j not in placed]
        for j in sorted(movers, key=lambda j: -counts[j]):
            present = view.jobs[j].allocation
            packed = board.pack(counts[j], to_row(present, numbers))
            assert packed is not None, "shares never exceed the slots"
            board.take(packed)
            placed[j] = to_allocation(packed, view.nodes, present)

        allocations: dict[str, Allocation] = {}
        configs: dict[str, JobConfig] = {}
        reasons: dict[str, str] = {}
        why = f"equal shares of {slots} slots among {len(counts)} jobs"
        for j, job in enumerate(view.jobs):
            spec = job.spec
            allocations[spec.id] = placed.get(j, ())
            if not counts[j]:
                reasons[spec.id] = f"waits: {slots} slots, one each for the jobs before it"
                continue
            configs[spec.id] = batch_config(spec.batch_size, counts[j], spec)
            batch = configs[spec.id].total_batch(counts[j])
            reasons[spec.id] = f"{describe(placed[j])}, batch {batch}: {why}"
            if counts[j] == usable_replicas(spec):
                reasons[spec.id] += ", and no more than it can use"
        return Decision(allocations=allocations, configs=configs, reasons=reasons)


def usable_replicas(spec: JobSpec) -> int:
    """As many as the job may have and its requested batch can feed."""
    return max(min(spec.max_replicas, spec.batch_size // spec.min_atomic_batch), 1)


def shareable(spec: JobSpec, share: int) -> int:
    """The most replicas, up to the share, that have a batch within the job's bounds."""
    return next((n for n in range(share, 0, -1) if can_share(n, spec)), 0)


def equal_shares(limits: list[int], slots: int) -> list[int]:
    """Slots one by one to the jobs in turn, in order, until all are given or no job can use another."""
    shares = [0] * len(limits)
    while slots > 0:
        takers = [j for j, limit in enumerate(limits) if shares[j] < limit][:slots]
        if not takers:
            break
        for j in takers:
            shares[j] += 1
        slots -= len(takers)
    return shares
