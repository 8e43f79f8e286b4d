"""What the scheduler's core knows: immutable records, and the views made from them."""

from itertools import islice

import msgspec

from common.job_states import HOLDS_SLOTS
from common.protocol import JobOrder, JobRow, JobTable, Orders, VerifyOrder
from common.types import (
    Allocation,
    JobConfig,
    JobProfile,
    JobSpec,
    JobState,
    Node,
    Struct,
    replicas_of,
)
from services.scheduler.policies.interface import ClusterView, JobView, Oracle


class JobRecord(Struct, frozen=True):
    """A job. `generation` counts its orders; `group` is the generation of the newest order for which its
    processes had to form a new group."""

    spec: JobSpec
    submitted_s: float
    state: JobState = JobState.PENDING
    allocation: Allocation = ()
    config: JobConfig | None = None
    generation: int = 0
    group: int = 0
    leaving: Allocation = ()
    """Where the replicas of a preempting job still run."""
    checkpoint: str = ""
    metric: float | None = None
    progress: float = 0.0
    changed_s: float = 0.0
    """When its state or its orders last changed."""
    failures: int = 0
    restarts: int = 0
    run_s: float = 0.0
    attained_slot_s: float = 0.0
    accounted_s: float = 0.0
    """`run_s` and `attained_slot_s` are counted up to this time."""
    ended_s: float | None = None
    reason: str = ""

    def accounted(self, now_s: float) -> "JobRecord":
        """The record with `run_s` and `attained_slot_s` counted up to now."""
        elapsed_s = now_s - self.accounted_s
        if self.state not in HOLDS_SLOTS or not self.allocation:
            return msgspec.structs.replace(self, accounted_s=now_s)
        return msgspec.structs.replace(
            self,
            accounted_s=now_s,
            run_s=self.run_s + elapsed_s,
            attained_slot_s=self.attained_slot_s + elapsed_s * replicas_of(self.allocation),
        )


class AgentRecord(Struct, frozen=True):
    node: Node
    incarnation: str
    reports: int = 0
    """Number of the last report that was handled."""


class State(Struct, frozen=True):
    """`jobs` are the active jobs in order of submission, `ended` the others in the order in which they
    ended."""

    run_id: str
    jobs: dict[str, JobRecord] = msgspec.field(default_factory=dict)
    ended: dict[str, JobRecord] = msgspec.field(default_factory=dict)
    agents: dict[str, AgentRecord] = msgspec.field(default_factory=dict)
    profiles: dict[str, JobProfile] = msgspec.field(default_factory=dict)
    orders_version: int = 0
    rounds: int = 0
    memory: object = None
    """The memory of the policy."""
    most_slots: int = 0
    """Slots of the largest cluster seen in this run. A job that needs more is refused."""


def orders_of(state: State) -> Orders:
    """The orders for all agents: every job that holds slots or has replicas that must save and leave."""
    jobs, verifications = [], []
    for job in state.jobs.values():
        if job.state is JobState.VERIFYING:
            if job.allocation:
                verifications.append(
                    VerifyOrder(
                        spec=job.spec,
                        node=job.allocation[0].node,
                        checkpoint=job.checkpoint,
                        metric=job.metric or 0.0,
                        progress=job.progress,
                    )
                )
        elif job.state is not JobState.PENDING and job.config:
            first = state.agents[job.allocation[0].node].node if job.allocation else None
            jobs.append(
                JobOrder(
                    spec=job.spec,
                    generation=job.generation,
                    group=job.group,
                    allocation=job.allocation,
                    config=job.config,
                    store_host=first.store_host if first else "",
                    store_port=first.store_port if first else 0,
                    checkpoint=job.checkpoint,
                    leaving=job.leaving,
                )
            )
    return Orders(
        run_id=state.run_id,
        version=state.orders_version,
        jobs=tuple(jobs),
        verifications=tuple(verifications),
    )


def free_nodes(state: State, *, taken_by: frozenset[JobState]) -> tuple[Node, ...]:
    """The nodes without the slots held by jobs in the states `taken_by`. They are sorted by name, so that no
    decision depends on the order in which agents registered."""
    taken: dict[str, int] = {}
    for job in state.jobs.values():
        if job.state in taken_by:
            for placement in job.allocation:
                taken[placement.node] = taken.get(placement.node, 0) + placement.replicas
    return tuple(
        msgspec.structs.replace(agent.node, slots=max(agent.node.slots - taken.get(name, 0), 0))
        for name, agent in sorted(state.agents.items())
    )


def cluster_view(
    state: State,
    now_s: float,
    restart_penalty_s: float,
    oracle: Oracle | None = None,
    *,
    accumulates_alone: bool = False,
) -> ClusterView:
    """What the policy sees: all active jobs except those that are saving or being verified."""
    views = []
    for record in state.jobs.values():
        if record.state in (JobState.PENDING, JobState.STARTING, JobState.RUNNING):
            job = record.accounted(now_s)
            views.append(
                JobView(
                    spec=job.spec,
                    state=job.state,
                    submitted_s=job.submitted_s,
                    allocation=job.allocation,
                    config=job.config,
                    restarts=job.restarts,
                    run_s=job.run_s,
                    attained_slot_s=job.attained_slot_s,
                    profile=state.profiles.get(job.spec.id),
                )
            )
    return ClusterView(
        now_s=now_s,
        nodes=free_nodes(state, taken_by=frozenset({JobState.VERIFYING})),
        jobs=tuple(views),
        restart_penalty_s=restart_penalty_s,
        oracle=oracle,
        accumulates_alone=accumulates_alone,
    )


def job_table(state: State, now_s: float, policy: str, ended: int) -> JobTable:
    """What clients see: the last `ended` jobs that ended, in the order in which they ended, then the active
    jobs in order of submission."""
    left_out = max(len(state.ended) - max(ended, 0), 0)
    rows = tuple(
        JobRow(
            id=job.spec.id,
            application=job.spec.application,
            state=job.state,
            allocation=job.allocation,
            config=job.config if job.state in (JobState.STARTING, JobState.RUNNING) else None,
            submitted_s=job.submitted_s,
            ended_s=job.ended_s,
            progress=max(job.progress, _profiled_progress(state, job.spec.id)),
            max_progress=job.spec.max_progress,
            metric=job.metric,
            target=job.spec.target,
            restarts=job.restarts,
            reason=job.reason,
        )
        for job in (*islice(state.ended.values(), left_out, None), *state.jobs.values())
    )
    return JobTable(
        run_id=state.run_id,
        policy=policy,
        now_s=now_s,
        rounds=state.rounds,
        nodes=tuple(agent.node for _, agent in sorted(state.agents.items())),
        jobs=rows,
        left_out=left_out,
    )


def _profiled_progress(state: State, job_id: str) -> float:
    profile = state.profiles.get(job_id)
    return profile.progress if profile else 0.0
