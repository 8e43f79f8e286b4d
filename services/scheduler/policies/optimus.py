"""optimus: each slot goes where it saves the most time (Peng et al., EuroSys'18), with perfect estimates.

As in the comparison that the Pollux paper makes, an oracle supplies the true step times and remaining steps.
This is therefore the strongest possible Optimus, and it runs in simulation only. Every job gets one replica,
in order of submission. Then, slot by slot, the job whose remaining time shrinks most gets one more replica,
as long as any job gains. The requested batch stays.
"""

import heapq
from typing import Any

from common.types import can_share, replicas_of
from services.scheduler.policies.interface import ClusterView, Decision, JobView, Oracle, Policy
from services.scheduler.policies.placement import keep_or_take_freest
from services.scheduler.policies.requested import train_requested_batches, usable_replicas


class OptimusPolicy(Policy):
    name = "optimus"
    needs_profiles = False
    needs_oracle = True

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """`memory` and `seed` are not used. Raises ValueError without an oracle."""
        if view.oracle is None:
            raise ValueError("optimus needs the oracle of a simulator")
        slots = view.slots
        counts = divide(view.jobs, slots, view.oracle)
        order = sorted(range(len(counts)), key=lambda j: counts[j])
        placed = keep_or_take_freest(counts, [job.allocation for job in view.jobs], view.nodes, order)
        reasons = []
        for job, allocation in zip(view.jobs, placed, strict=True):
            if allocation:
                step_s = view.oracle.step_time_s(job.spec.id, replicas_of(allocation))
                left_s = view.oracle.remaining_steps(job.spec.id) * step_s
                reasons.append(f"{left_s:.0f} s of training left with these replicas")
            else:
                reasons.append(f"waits: the {slots} slots go to the jobs before it, one each")
        return train_requested_batches(view, placed, reasons)


def divide(jobs: tuple[JobView, ...], slots: int, oracle: Oracle) -> list[int]:
    """Replicas of each job: one each in order, then the rest where they save most; the first job on ties."""
    counts = [1 if j < slots and can_share(1, job.spec) else 0 for j, job in enumerate(jobs)]
    left = slots - sum(counts)
    remaining = [oracle.remaining_steps(job.spec.id) if counts[j] else 0.0 for j, job in enumerate(jobs)]

    def saved_s(j: int) -> float:
        """Seconds that one more replica saves."""
        spec, more = jobs[j].spec, counts[j] + 1
        if not counts[j] or more > usable_replicas(spec) or not can_share(more, spec):
            return 0.0
        return (oracle.step_time_s(spec.id, counts[j]) - oracle.step_time_s(spec.id, more)) * remaining[j]

    heap = [(-saved_s(j), j) for j in range(len(jobs))]
    heapq.heapify(heap)
    while left > 0 and heap and heap[0][0] < 0:
        j = heap[0][1]
        counts[j] += 1
        left -= 1
        heapq.heapreplace(heap, (-saved_s(j), j))
    return counts
