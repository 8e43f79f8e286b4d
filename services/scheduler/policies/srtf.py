"""srtf: shortest estimated remaining time first, with the replicas and the batch that jobs requested.

Remaining time = (declared max_progress - progress) x M0 / modelled goodput. A job that does not hold its
slots also pays for a restart, so two nearly equal jobs do not take turns. Goodput is always that of the
requested replicas on as few nodes as can hold them. With the goodput of the actual placement, a spread-out
job would fall behind an equal job that waits; that one would be spread out in turn, and they would swap
forever.

A job without a fitted model cannot be estimated. It goes first, until its step times are known. In this order
every job that fits into the remaining slots runs. Long jobs may wait as long as shorter ones keep coming.
"""

from typing import Any

from common.types import batch_config, replicas_of
from services.scheduler.policies.interface import ClusterView, Decision, JobView, Policy
from services.scheduler.policies.placement import keep_or_pack
from services.scheduler.policies.pollux import NO_GAIN, modelled_goodput, trusted_statistics
from services.scheduler.policies.requested import admit_in_order, train_requested_batches


class SrtfPolicy(Policy):
    name = "srtf"

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """`memory` and `seed` are not used."""
        largest_node = max((node.slots for node in view.nodes), default=0)
        estimates_s = [remaining_s(job, largest_node, view.restart_penalty_s) for job in view.jobs]

        def shortest_first(j: int) -> float:
            estimate_s = estimates_s[j]
            return -1.0 if estimate_s is None else estimate_s

        order = sorted(range(len(view.jobs)), key=shortest_first)
        counts, waits = admit_in_order(view.jobs, order, view.slots)
        placed = keep_or_pack(counts, [job.allocation for job in view.jobs], view.nodes, order)
        reasons = []
        for job, estimate_s, wait in zip(view.jobs, estimates_s, waits, strict=True):
            estimate = _describe_estimate(job, estimate_s)
            reasons.append(f"waits: {estimate}; {wait}" if wait else estimate)
        return train_requested_batches(view, placed, reasons)


def remaining_s(job: JobView, largest_node: int, restart_penalty_s: float) -> float | None:
    """Seconds until the job has made its declared progress with the replicas and batch it requested, on as
    few nodes of `largest_node` slots as can hold them; None without a model."""
    spec, profile = job.spec, job.profile
    if profile is None or profile.parameters is None:
        return None
    several_nodes = spec.replicas > largest_node
    config = batch_config(spec.batch_size, spec.replicas, spec)
    rate = modelled_goodput(
        profile.parameters, trusted_statistics(job), spec.min_batch_size, several_nodes, spec.replicas, config
    )
    left_s = max(spec.max_progress - profile.progress, 0.0) * spec.min_batch_size / rate
    holds_its_slots = replicas_of(job.allocation) == spec.replicas
    return left_s if holds_its_slots else left_s + (profile.restart_s or restart_penalty_s)


def _describe_estimate(job: JobView, estimate_s: float | None) -> str:
    if estimate_s is None:
        return "its remaining time is unknown until its step times are measured, so it goes first"
    text = f"an estimated {estimate_s:.0f} s to its declared progress"
    if trusted_statistics(job) is NO_GAIN and job.spec.batch_size > job.spec.min_batch_size:
        text += " at most: its gradient statistics do not show yet what its larger batch gains"
    return text
