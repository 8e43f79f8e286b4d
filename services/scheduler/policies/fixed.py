"""fixed: first come, first served. Every job gets the replicas and the batch it requested, or waits.

The order of submission is strict: when a job does not fit, all later ones wait, even those that would fit, so
no job starves. A running job keeps its placement until it ends.
"""

from typing import Any

from common.types import Allocation
from services.scheduler.policies.interface import ClusterView, Decision, Policy
from services.scheduler.policies.placement import Board, keep_unchanged, number_nodes, to_allocation, to_row
from services.scheduler.policies.requested import train_requested_batches


class FixedPolicy(Policy):
    name = "fixed"
    needs_profiles = False

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """`memory` and `seed` are not used."""
        allocations, reasons = first_come_first_served(view)
        return train_requested_batches(view, allocations, reasons)


def first_come_first_served(view: ClusterView) -> tuple[list[Allocation], list[str]]:
    """The allocation of each job, and why it has it or waits."""
    board = Board([node.slots for node in view.nodes])
    numbers = number_nodes(view.nodes)
    requested = [job.spec.replicas for job in view.jobs]
    present = [job.allocation for job in view.jobs]
    allocations = keep_unchanged(board, requested, present, numbers, range(len(requested)))
    reasons = ["keeps the requested replicas until it ends" if kept else "" for kept in allocations]
    first_waiting = None
    for j, replicas in enumerate(requested):
        if allocations[j]:
            continue
        if first_waiting is not None:
            ahead = j - first_waiting
            reasons[j] = f"waits: {ahead} {'job' if ahead == 1 else 'jobs'} before it in order of submission"
        elif packed := board.pack(replicas, to_row(present[j], numbers)):
            board.take(packed)
            allocations[j] = to_allocation(packed, view.nodes, present[j])
            reasons[j] = "the requested replicas"
        else:
            first_waiting = j
            reasons[j] = f"waits: requests {replicas} replicas, but only {sum(board.free)} slots are free"
    return allocations, reasons
