"""fixed: first come, first served; every job gets the replicas and the batch that it asked for, or waits.

Strictly in order of submission: a job that does not fit makes all later ones wait, even those that would fit
(no overtaking, so nobody starves). A running job keeps its placement until it ends.
"""

from typing import Any

from common.types import Allocation, JobConfig, batch_config, replicas_of
from services.scheduler.policies.interface import ClusterView, Decision
from services.scheduler.policies.placement import Board, describe, number_nodes, to_allocation, to_row


class FixedPolicy:
    name = "fixed"
    uses_profiles = False

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        board = Board([node.slots for node in view.nodes])
        allocations: dict[str, Allocation] = {}
        configs: dict[str, JobConfig] = {}
        reasons: dict[str, str] = {}
        numbers = number_nodes(view.nodes)
        for job in view.jobs:
            row = to_row(job.allocation, numbers)
            if row and replicas_of(job.allocation) == job.spec.replicas and board.fits(row):
                board.take(row)
                allocations[job.spec.id] = job.allocation
        first_waiting = None
        for place, job in enumerate(view.jobs):
            spec = job.spec
            config = batch_config(spec.batch_size, spec.replicas, spec)
            batch = config.total_batch(spec.replicas)
            if spec.id in allocations:
                reasons[spec.id] = f"keeps {describe(job.allocation)}, batch {batch}, until it ends"
            elif first_waiting is not None:
                allocations[spec.id] = ()
                ahead = place - first_waiting
                reasons[spec.id] = (
                    f"waits: {ahead} {'job' if ahead == 1 else 'jobs'} before it in order of submission"
                )
            elif packed := board.pack(spec.replicas, to_row(job.allocation, numbers)):
                board.take(packed)
                allocations[spec.id] = to_allocation(packed, view.nodes, job.allocation)
                reasons[spec.id] = f"{describe(allocations[spec.id])}, batch {batch}, as requested"
            else:
                first_waiting = place
                allocations[spec.id] = ()
                free = sum(board.free)
                reasons[spec.id] = f"waits: {spec.replicas} replicas asked for, slots free: {free}"
            if allocations[spec.id]:
                configs[spec.id] = config
        return Decision(allocations=allocations, configs=configs, reasons=reasons)
