"""pollux with one half of its adaptation: `pollux:adapt_replicas=false` and `pollux:adapt_batch=false`.

What is won by choosing batch and replicas together shows beside either alone. Replicas alone is the search
of `pollux` at the requested batches; batches alone needs no search, since nobody is ever resized.
"""

from typing import Any

from common.types import Allocation, JobConfig
from services.scheduler.policies.fixed import first_come
from services.scheduler.policies.interface import ClusterView, Decision, Policy
from services.scheduler.policies.placement import Row, describe, number_nodes, row_size, to_row
from services.scheduler.policies.pollux import GoodputPolicy, JobModel


def make_pollux(
    power: float = -1.0,
    avoid_interference: bool = True,
    by_goodput: bool = True,
    adapt_replicas: bool = True,
    adapt_batch: bool = True,
) -> Policy:
    """pollux, or an ablation of it. Raises ValueError where nothing is left of it, and as GoodputPolicy."""
    search = GoodputPolicy(
        "pollux" if adapt_batch else "pollux-replicas-only",
        power=power,
        avoid_interference=avoid_interference,
        by_goodput=by_goodput,
        adapt_batch=adapt_batch,
    )
    if adapt_replicas:
        return search
    if not search.adapts_batch:
        raise ValueError("adapt_replicas false: needs adapt_batch and by_goodput; without them it is `fixed`")
    return BatchOnlyPolicy()


class BatchOnlyPolicy(Policy):
    """First come, first served at the requested replicas as `fixed`, and the batch that `pollux` would
    choose for these replicas: M0 until the step times are known, then by goodput."""

    name = "pollux-batch-only"
    adapts_batch = True

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        numbers = number_nodes(view.nodes)
        slots = sum(node.slots for node in view.nodes)
        allocations, reasons = first_come(view)
        configs: dict[str, JobConfig] = {}
        for job in view.jobs:
            job_id = job.spec.id
            if row := to_row(allocations[job_id], numbers):
                model = JobModel(
                    job,
                    row,
                    slots,
                    fair=job.spec.replicas,
                    scale=1.0,
                    accumulates_alone=view.accumulates_alone,
                )
                configs[job_id] = model.config(row)
                reasons[job_id] = self._reason(model, allocations[job_id], configs[job_id], row)
        return Decision(allocations=allocations, configs=configs, reasons=reasons)

    @staticmethod
    def _reason(model: JobModel, allocation: Allocation, config: JobConfig, row: Row) -> str:
        if model.knows(row):
            return f"{model.reason(row, allocation, config)}, the requested replicas"
        batch = config.total_batch(row_size(row))
        return (
            f"{describe(allocation)}, batch {batch}: the requested replicas; its step times are not known yet"
        )
