"""dynamic: equal shares of the slots, recomputed when a job comes or goes; the requested batch stays.

The shares depend only on the active jobs and the nodes. Between arrivals and finishes they stay the same, and
a job whose share stays the same keeps its placement, so nothing moves.
"""

from typing import Any

from common.types import JobSpec, can_share
from services.scheduler.policies.interface import ClusterView, Decision, Policy
from services.scheduler.policies.placement import keep_or_pack
from services.scheduler.policies.requested import train_requested_batches, usable_replicas


class DynamicPolicy(Policy):
    name = "dynamic"
    needs_profiles = False

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """`memory` and `seed` are not used."""
        slots = view.slots
        limits = [usable_replicas(job.spec) for job in view.jobs]
        shares = equal_shares(limits, slots)
        counts = [shareable(job.spec, share) for job, share in zip(view.jobs, shares, strict=True)]
        present = [job.allocation for job in view.jobs]
        reasons = []
        for count, limit in zip(counts, limits, strict=True):
            reason = f"an equal share of {slots} slots among {len(counts)} jobs"
            if not count:
                reason = f"waits: the {slots} slots go to the jobs before it, one each"
            elif count == limit:
                reason += ", limited to what it can use"
            reasons.append(reason)
        placed = keep_or_pack(counts, present, view.nodes, range(len(counts)))
        return train_requested_batches(view, placed, reasons)


def shareable(spec: JobSpec, share: int) -> int:
    """The most replicas, up to the share, for which there is a batch within the job's bounds."""
    return next((n for n in range(share, 0, -1) if can_share(n, spec)), 0)


def equal_shares(limits: list[int], slots: int) -> list[int]:
    """Give slots one by one to the jobs in turn, until none is left or no job can use another one."""
    shares = [0] * len(limits)
    while slots > 0:
        takers = [j for j, limit in enumerate(limits) if shares[j] < limit][:slots]
        if not takers:
            break
        for j in takers:
            shares[j] += 1
        slots -= len(takers)
    return shares
