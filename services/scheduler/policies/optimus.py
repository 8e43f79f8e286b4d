"""optimus: a slot where it saves the most time (Peng et al., EuroSys'18), told the truth by an oracle.

As in the Pollux comparison the step times and the remaining steps are the true ones, so it is the strongest
Optimus that could be, and runs in simulation only. Every job gets one replica, in order of submission; then,
one by one, the job whose remaining time shrinks most by it gets another, as long as any gains. The requested
batch stays.
"""

import heapq
from typing import Any

from common.types import Allocation, JobConfig, batch_config, can_share
from services.scheduler.policies.dynamic import usable_replicas
from services.scheduler.policies.interface import ClusterView, Decision, JobView, Oracle, Policy
from services.scheduler.policies.placement import describe, keep_or_take_freest


class OptimusPolicy(Policy):
    name = "optimus"
    needs_profiles = False
    needs_oracle = True

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        """Neither `memory` nor `seed` matters. Raises ValueError without an oracle."""
        if view.oracle is None:
            raise ValueError("optimus needs the oracle of a simulator")
        slots = sum(node.slots for node in view.nodes)
        counts = divide(view.jobs, slots, view.oracle)
        order = sorted(range(len(counts)), key=lambda j: counts[j])
        placed = keep_or_take_freest(counts, [job.allocation for job in view.jobs], view.nodes, order)

        allocations: dict[str, Allocation] = {}
        configs: dict[str, JobConfig] = {}
        reasons: dict[str, str] = {}
        for job, allocation, replicas in zip(view.jobs, placed, counts, strict=True):
            spec = job.spec
            allocations[spec.id] = allocation
            if not allocation:
                reasons[spec.id] = f"waits: {slots} slots, one each for the jobs before it"
                continue
            configs[spec.id] = batch_config(spec.batch_size, replicas, spec)
            left_s = view.oracle.remaining_steps(spec.id) * view.oracle.step_time_s(spec.id, replicas)
            reasons[spec.id] = (
                f"{describe(allocation)}, batch {configs[spec.id].total_batch(replicas)}: {left_s:.0f} s of "
                "training left on them"
            )
        return Decision(allocations=allocations, configs=configs, reasons=reasons)


def divide(jobs: tuple[JobView, ...], slots: int, oracle: Oracle) -> list[int]:
    """Replicas of each job: one each in order, the rest where they gain most, the first job on ties."""
    counts = [1 if j < slots and can_share(1, job.spec) else 0 for j, job in enumerate(jobs)]
    left = slots - sum(counts)
    remaining = [oracle.remaining_steps(job.spec.id) if counts[j] else 0.0 for j, job in enumerate(jobs)]

    def gain_s(j: int) -> float:
        """Seconds that one replica more saves."""
        spec, more = jobs[j].spec, counts[j] + 1
        if not counts[j] or more > usable_replicas(spec) or not can_share(more, spec):
            return 0.0
        return (oracle.step_time_s(spec.id, counts[j]) - oracle.step_time_s(spec.id, more)) * remaining[j]

    gains = [(-gain_s(j), j) for j in range(len(jobs))]
    heapq.heapify(gains)
    while left > 0 and gains and gains[0][0] < 0:
        j = gains[0][1]
        counts[j] += 1
        left -= 1
        heapq.heapreplace(gains, (-gain_s(j), j))
    return counts
