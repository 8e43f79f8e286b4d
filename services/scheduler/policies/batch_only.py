"""pollux-batch-only (`pollux:adapt_replicas=false`): pollux chooses the batch size but not the replicas.

Next to `pollux` and `pollux:adapt_batch=false` it shows what choosing both together gains over either one
alone. It needs no search, since no job is ever resized.
"""

from typing import Any

from common.types import Allocation, JobConfig
from services.scheduler.policies.fixed import first_come_first_served
from services.scheduler.policies.interface import ClusterView, Decision, Policy
from services.scheduler.policies.placement import Row, describe, number_nodes, row_size, to_row
from services.scheduler.policies.pollux import JobModel


class BatchOnlyPolicy(Policy):
    """First come, first served with the requested replicas, as `fixed`, and the batch that `pollux` would
    choose for these replicas: M0 until the step times are known, then the best by goodput."""

    name = "pollux-batch-only"
    adapts_batch = True

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """`memory` and `seed` are not used."""
        slots, numbers = view.slots, number_nodes(view.nodes)
        placed, why = first_come_first_served(view)
        configs: dict[str, JobConfig] = {}
        reasons: dict[str, str] = {}
        for job, allocation, reason in zip(view.jobs, placed, why, strict=True):
            reasons[job.spec.id] = reason
            if row := to_row(allocation, numbers):
                model = JobModel(
                    job,
                    row,
                    slots,
                    fair=job.spec.replicas,
                    scale=1.0,
                    accumulates_alone=view.accumulates_alone,
                )
                config = configs[job.spec.id] = model.config(row)
                reasons[job.spec.id] = _reason(model, allocation, config, row)
        allocations = {job.spec.id: allocation for job, allocation in zip(view.jobs, placed, strict=True)}
        return Decision(allocations=allocations, configs=configs, reasons=reasons)


def _reason(model: JobModel, allocation: Allocation, config: JobConfig, row: Row) -> str:
    if model.knows(row):
        return f"{model.reason(row, allocation, config)}, with the requested replicas"
    batch = config.total_batch(row_size(row))
    return (
        f"{describe(allocation)}, batch {batch}: the requested replicas; its step times are not measured yet"
    )
