"""Decides which agent reports that a preempted job has left no newer state behind.

The scheduler waits for JobSaved. That never comes if no process of the job is running any more, or ever was,
or if the state could not be written. Exactly one agent must report this, and all agents have to agree on
which one: the node of rank 0 in the allocation that the order takes away. Earlier orders must not matter for
this, since an agent may have missed them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.protocol import Fact, JobOrder, JobRaised, JobSaved, Orders, ReplicaLost, TargetReached


@dataclass
class RankZero:
    """Where rank 0 of a job is, or was when the job was ordered to leave."""

    node: str
    moved: bool
    """Rank 0 was on another node before, which may still be saving the state."""
    generation: int
    """Generation of the order."""
    leaves_since_s: float = float("inf")
    answered: bool = False
    """This agent has reported what happened to the state."""


class UnsavedJobs:
    """`save_s`: how long the node that rank 0 has moved away from may take to save."""

    def __init__(self, node: str, save_s: float) -> None:
        self._node = node
        self._save_s = save_s
        self._jobs: dict[str, RankZero] = {}

    def follow(self, orders: Orders | None, now_s: float) -> None:
        """Take newer orders; None if the agent takes part in no run."""
        self._jobs = {job.spec.id: self._rank_zero(job, now_s) for job in orders.jobs} if orders else {}

    def _rank_zero(self, job: JobOrder, now_s: float) -> RankZero:
        known = self._jobs.get(job.spec.id)
        leaves = not job.allocation
        if leaves and known and known.generation == job.generation:
            return known
        placements = job.leaving if leaves else job.allocation
        node = placements[0].node if placements else ""
        moved = known is not None and (known.moved or known.node != node)
        return RankZero(node, moved, job.generation, leaves_since_s=now_s if leaves else float("inf"))

    def note(self, fact: Fact) -> None:
        """Notice a fact that is reported. Only facts that end the scheduler's wait count as an answer."""
        job = self._jobs.get(fact.job_id)
        match fact:
            case TargetReached() | JobRaised() if job:
                job.answered = True
            case JobSaved() | ReplicaLost() if job and fact.generation >= job.generation:
                job.answered = True

    def answers(self, lives: Callable[[str], bool], now_s: float) -> list[ReplicaLost]:
        """The facts that this node has to report now. `lives(job_id)`: whether the job has processes here."""
        reason = "it had no running replica when it was preempted"
        return [
            ReplicaLost(job_id=job_id, generation=job.generation, reason=reason)
            for job_id, job in self._jobs.items()
            if job.node == self._node
            and not job.answered
            and not lives(job_id)
            and now_s >= job.leaves_since_s + (self._save_s if job.moved else 0.0)
        ]
