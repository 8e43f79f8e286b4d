"""tiresias: least attained service first, in two queues (Gu et al., NSDI'19; two-dimensional, discretised).

A job starts in the first queue. Once it has used `threshold_slot_s` slot-seconds it moves to the end of the
second queue and stays in it. Every round goes through the first queue and then the second, in order. A job
runs on the replicas it requested if that many slots are left. Otherwise it waits and loses the slots it had.
Short jobs thus finish before long ones, although the length of a job is not known in advance.

The published threshold is 16 hours on one GPU. Jobs of a few minutes never reach it, which makes the policy
first come, first served with overtaking. A useful threshold for them is about the total number of
slot-seconds that the smaller half of the jobs needs (`tiresias:threshold_slot_s=120`).
"""

import math
from typing import Any

from services.scheduler.policies.interface import ClusterView, Decision, JobView, Policy
from services.scheduler.policies.placement import keep_or_take_freest
from services.scheduler.policies.requested import admit_in_order, train_requested_batches

PUBLISHED_THRESHOLD_SLOT_S = 57_600.0
FORGET_S = 3600.0
"""A job that saves before it leaves is not in the view. It keeps its place in the second queue this long."""


class TiresiasPolicy(Policy):
    name = "tiresias"
    needs_profiles = False

    def __init__(self, threshold_slot_s: float = PUBLISHED_THRESHOLD_SLOT_S) -> None:
        """Raises ValueError unless the threshold is finite and above 0."""
        if not 0 < threshold_slot_s < math.inf:
            raise ValueError(f"threshold_slot_s {threshold_slot_s}: allowed: finite slot-seconds above 0")
        self.threshold_slot_s = threshold_slot_s

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """`memory` is the second queue in order: pairs of a job id and the time it was last seen."""
        jobs = view.jobs
        number = {job.spec.id: j for j, job in enumerate(jobs)}
        second_queue = {
            job_id: view.now_s if job_id in number else last_seen_s
            for job_id, last_seen_s in memory or ()
            if job_id in number or view.now_s - last_seen_s < FORGET_S
        }
        for job in jobs:
            if job.attained_slot_s >= self.threshold_slot_s:
                second_queue.setdefault(job.spec.id, view.now_s)
        first = [j for j, job in enumerate(jobs) if job.spec.id not in second_queue]
        order = first + [number[job_id] for job_id in second_queue if job_id in number]

        counts, waits = admit_in_order(jobs, order, view.slots)
        placed = keep_or_take_freest(counts, [job.allocation for job in jobs], view.nodes, order)
        reasons = []
        for job, wait in zip(jobs, waits, strict=True):
            queue = self._describe_queue(job, job.spec.id in second_queue)
            reasons.append(f"waits: {queue}; {wait}" if wait else queue)
        return train_requested_batches(
            view, placed, reasons, memory=[list(entry) for entry in second_queue.items()]
        )

    def _describe_queue(self, job: JobView, in_second: bool) -> str:
        if in_second:
            return f"second queue, used more than {self.threshold_slot_s:.0f} slot-seconds"
        return f"first queue, used {job.attained_slot_s:.0f} of {self.threshold_slot_s:.0f} slot-seconds"
