"""What policies share that give jobs the replicas or the batch size they requested."""

from collections.abc import Iterable, Sequence
from typing import Any

from common.types import Allocation, JobConfig, JobSpec, batch_config, replicas_of
from services.scheduler.policies.interface import ClusterView, Decision, JobView
from services.scheduler.policies.placement import describe


def usable_replicas(spec: JobSpec) -> int:
    """The most replicas that the job may have and that its requested batch is large enough for."""
    return max(min(spec.max_replicas, spec.batch_size // spec.min_atomic_batch), 1)


def admit_in_order(jobs: Sequence[JobView], order: Iterable[int], slots: int) -> tuple[list[int], list[str]]:
    """Give each job in `order` the replicas it requested, if that many slots are left. Later jobs may
    overtake one that does not fit.

    Returns, per job: its replicas, 0 if it waits; and the reason why it waits, "" if it does not.
    """
    counts, waits = [0] * len(jobs), [""] * len(jobs)
    left = slots
    for j in order:
        requested = jobs[j].spec.replicas
        if requested <= left:
            counts[j] = requested
            left -= requested
        elif requested > slots:
            waits[j] = f"requests {requested} replicas, but the cluster has {slots} slots"
        else:
            waits[j] = f"requests {requested} replicas, but the jobs before it leave {left} slots"
    return counts, waits


def train_requested_batches(
    view: ClusterView, allocations: Iterable[Allocation], reasons: Iterable[str], memory: Any = None
) -> Decision:
    """The decision in which every job with slots trains with the total batch it requested.

    `allocations` and `reasons` have one entry per job of the view. The allocation and the batch are put in
    front of the reason of a job with slots.
    """
    by_id: dict[str, Allocation] = {}
    configs: dict[str, JobConfig] = {}
    texts: dict[str, str] = {}
    for job, allocation, reason in zip(view.jobs, allocations, reasons, strict=True):
        spec, replicas = job.spec, replicas_of(allocation)
        by_id[spec.id], texts[spec.id] = allocation, reason
        if allocation:
            config = configs[spec.id] = batch_config(spec.batch_size, replicas, spec)
            texts[spec.id] = f"{describe(allocation)}, batch {config.total_batch(replicas)}: {reason}"
    return Decision(allocations=by_id, configs=configs, reasons=texts, memory=memory)
