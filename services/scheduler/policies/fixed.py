"""fixed: first come, first served; every job gets the replicas and the batch that it asked for, or waits.

Strictly in order of submission: a job that does not fit makes all later ones wait, even those that would fit
(no overtaking, so nobody starves). A running job keeps its placement until it ends.
"""

from typing import Any

from common.types import Allocation, JobConfig, batch_config, replicas_of
from services.scheduler.policies.interface import ClusterView, Decision, Policy
from services.scheduler.policies.placement import Board, describe, number_nodes, to_allocation, to_row


class FixedPolicy(Policy):
    name = "fixed"
    needs_profiles = False

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        allocations, reasons = first_come(view)
        configs: dict[str, JobConfig] = {}
        for job in view.jobs:
            spec = job.spec
            if allocation := allocations[spec.id]:
                configs[spec.id] = config = batch_config(spec.batch_size, spec.replicas, spec)
                what = f"{describe(allocation)}, batch {config.total_batch(spec.replicas)}"
                stays = allocation == job.allocation
                reasons[spec.id] = f"keeps {what}, until it ends" if stays else f"{what}, as requested"
        return Decision(allocations=allocations, configs=configs, reasons=reasons)


def first_come(view: ClusterView) -> tuple[dict[str, Allocation], dict[str, str]]:
    """Every job's slots, and of those that wait the reason; an empty one of the others."""
    board = Board([node.slots for node in view.nodes])
    numbers = number_nodes(view.nodes)
    allocations: dict[str, Allocation] = {}
    for job in view.jobs:
        row = to_row(job.allocation, numbers)
        if row and replicas_of(job.allocation) == job.spec.replicas and board.fits(row):
            board.take(row)
            allocations[job.spec.id] = job.allocation
    reasons: dict[str, str] = {}
    first_waiting = None
    for place, job in enumerate(view.jobs):
        spec = job.spec
        reasons[spec.id] = ""
        if spec.id in allocations:
            continue
        allocations[spec.id] = ()
        if first_waiting is not None:
            ahead = place - first_waiting
            reasons[spec.id] = (
                f"waits: {ahead} {'job' if ahead == 1 else 'jobs'} before it in order of submission"
            )
        elif packed := board.pack(spec.replicas, to_row(job.allocation, numbers)):
            board.take(packed)
            allocations[spec.id] = to_allocation(packed, view.nodes, job.allocation)
        else:
            first_waiting = place
            reasons[spec.id] = f"waits: {spec.replicas} replicas asked for, slots free: {sum(board.free)}"
    return allocations, reasons
