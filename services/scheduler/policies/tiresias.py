"""tiresias: least attained service first, in two queues (Gu et al., NSDI'19; two-dimensional, discretised).

A job starts in the first queue. When it has used `threshold_slot_s` slot-seconds it goes to the end of the
second one, for good. Every round the first queue and then the second are gone through in order: a job runs on
the replicas that it asked for where these are left, else it waits, and loses the slots it had. Short jobs so
finish before long ones without anybody knowing in advance which these are.

The published threshold is 16 hours of one GPU. On jobs of minutes it never binds, and what remains is first
come, first served with overtaking; it pays at about the slot-seconds that the smaller half of the jobs needs
in all (`tiresias:threshold_slot_s=120`).
"""

import math
from typing import Any

from common.types import Allocation, JobConfig, batch_config
from services.scheduler.policies.interface import ClusterView, Decision, JobView, Policy
from services.scheduler.policies.placement import describe, keep_or_take_freest

PUBLISHED_THRESHOLD_SLOT_S = 57_600.0
FORGET_S = 3600.0
"""A job that is saving on its way out is not in the view; its place in the second queue waits for it."""


class TiresiasPolicy(Policy):
    name = "tiresias"
    needs_profiles = False

    def __init__(self, threshold_slot_s: float = PUBLISHED_THRESHOLD_SLOT_S) -> None:
        """Raises ValueError for a threshold that is not a number of slot-seconds."""
        if not 0 < threshold_slot_s < math.inf:
            raise ValueError(f"threshold_slot_s {threshold_slot_s}: allowed: finite slot-seconds above 0")
        self.threshold_slot_s = threshold_slot_s

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """`memory` is the second queue in order: pairs of a job id and when it was last seen."""
        jobs = view.jobs
        number = {job.spec.id: j for j, job in enumerate(jobs)}
        seen_s = {
            job_id: view.now_s if job_id in number else last_s
            for job_id, last_s in memory or ()
            if job_id in number or view.now_s - last_s < FORGET_S
        }
        for job in jobs:
            if job.attained_slot_s >= self.threshold_slot_s:
                seen_s.setdefault(job.spec.id, view.now_s)
        first = [j for j, job in enumerate(jobs) if job.spec.id not in seen_s]
        order = first + [number[job_id] for job_id in seen_s if job_id in number]

        slots = left = sum(node.slots for node in view.nodes)
        counts = [0] * len(jobs)
        reasons: dict[str, str] = {}
        for j in order:
            asked = jobs[j].spec.replicas
            if asked <= left:
                counts[j] = asked
                left -= asked
            elif asked > slots:
                reasons[jobs[j].spec.id] = f"waits: {asked} replicas asked for, the cluster has {slots} slots"
            else:
                queue = "second" if jobs[j].spec.id in seen_s else "first"
                reasons[jobs[j].spec.id] = (
                    f"waits in the {queue} queue: {asked} replicas asked for, {left} slots left by those "
                    "before it"
                )
        present = [job.allocation for job in jobs]
        placed = keep_or_take_freest(counts, present, view.nodes, order)

        allocations: dict[str, Allocation] = {}
        configs: dict[str, JobConfig] = {}
        for job, allocation in zip(jobs, placed, strict=True):
            spec = job.spec
            allocations[spec.id] = allocation
            if allocation:
                configs[spec.id] = batch_config(spec.batch_size, spec.replicas, spec)
                reasons[spec.id] = self._reason(job, allocation, configs[spec.id], spec.id in seen_s)
        return Decision(
            allocations=allocations,
            configs=configs,
            reasons=reasons,
            memory=[[job_id, last_s] for job_id, last_s in seen_s.items()],
        )

    def _reason(self, job: JobView, allocation: Allocation, config: JobConfig, second: bool) -> str:
        used, threshold = job.attained_slot_s, self.threshold_slot_s
        verdict = (
            f"second queue, past {threshold:.0f} slot-seconds"
            if second
            else f"first queue, {used:.0f} of {threshold:.0f} slot-seconds used"
        )
        return f"{describe(allocation)}, batch {config.total_batch(job.spec.replicas)}: {verdict}"
