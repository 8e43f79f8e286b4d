"""Who tells the scheduler that a job which had to save and leave has left no newer state behind.

The scheduler waits for JobSaved, which does not come where nothing of the job runs any more, or ever did, or
where its state could not be written. Exactly one node answers then, and all agents have to agree on which:
the node of rank 0 of the allocation that the order takes away. What an agent has seen before does not decide
it, since newer orders replace older ones that it may never have seen.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.protocol import Fact, JobOrder, JobRaised, JobSaved, Orders, ReplicaLost, TargetReached


@dataclass
class RankZero:
    """Where rank 0 of a job is, or was when the job was told to leave."""

    node: str
    moved: bool
    """It has been on another node before, where the state may still be."""
    generation: int
    """Of the order."""
    leaves_since_s: float = float("inf")
    answered: bool = False
    """The scheduler has been told what became of the state."""


class Unsaved:
    """`save_s`: so long the node from which rank 0 has moved may take to save."""

    def __init__(self, node: str, save_s: float) -> None:
        self._node = node
        self._save_s = save_s
        self._jobs: dict[str, RankZero] = {}

    def follow(self, orders: Orders | None, now_s: float) -> None:
        """Newer orders; None for none."""
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
        """What the scheduler is told; only what ends its waiting is an answer."""
        job = self._jobs.get(fact.job_id)
        match fact:
            case TargetReached() | JobRaised() if job:
                job.answered = True
            case JobSaved() | ReplicaLost() if job and fact.generation >= job.generation:
                job.answered = True

    def answers(self, lives: Callable[[str], bool], now_s: float) -> list[ReplicaLost]:
        """What this node has to say now, given which jobs have living processes here."""
        reason = "nothing of it was running when it had to leave"
        return [
            ReplicaLost(job_id=job_id, generation=job.generation, reason=reason)
            for job_id, job in self._jobs.items()
            if job.node == self._node
            and not job.answered
            and not lives(job_id)
            and now_s >= job.leaves_since_s + (self._save_s if job.moved else 0.0)
        ]
