"""Hand-made and generated views for the tests of policies."""

import random
from typing import Any

from common.goodput.model import step_time
from common.types import (
    Allocation,
    GradientStatistics,
    JobConfig,
    JobProfile,
    JobSpec,
    JobState,
    Node,
    Placement,
    ThroughputParameters,
    batch_config,
    can_share,
)
from services.scheduler.policies.interface import ClusterView, Decision, JobView

FAST_NETWORK = ThroughputParameters(
    alpha_c=0.01, beta_c=0.002, alpha_n=0.02, beta_n=0.001, alpha_r=0.005, beta_r=0.0005, gamma=1.5
)
NOISY = GradientStatistics(sqr=1.0, var=50.0)
CLEAN = GradientStatistics(sqr=1.0, var=0.05)


def spec(name: str = "a", **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "id": name,
        "application": "digits-cnn",
        "seed": 0,
        "target": 0.9,
        "max_progress": 1000.0,
        "replicas": 2,
        "batch_size": 64,
        "min_batch_size": 16,
        "max_batch_size": 512,
        "min_atomic_batch": 4,
        "max_atomic_batch": 128,
        "max_replicas": 8,
    }
    return JobSpec(**{**fields, **changes})


def nodes(*slots: int) -> tuple[Node, ...]:
    return tuple(Node(name=f"node-{n}", slots=s, slot_speed=0.2) for n, s in enumerate(slots, start=1))


def at(*places: tuple[int, int]) -> Allocation:
    """at((1, 2), (3, 1)): 2 replicas on node-1 and 1 on node-3."""
    return tuple(Placement(node=f"node-{n}", replicas=r) for n, r in places)


def profile(
    name: str = "a",
    profiled: int = 4,
    statistics: GradientStatistics | None = NOISY,
    parameters: ThroughputParameters | None = FAST_NETWORK,
    restart_s: float = 0.1,
    progress: float = 0.0,
) -> JobProfile:
    return JobProfile(
        job_id=name,
        parameters=parameters,
        statistics=statistics,
        max_profiled_replicas=profiled,
        restart_s=restart_s,
        progress=progress,
    )


def job(name: str = "a", allocation: Allocation = (), **changes: Any) -> JobView:
    own = {key: changes.pop(key) for key in tuple(changes) if key in JobSpec.__struct_fields__}
    fields: dict[str, Any] = {
        "spec": spec(name, **own),
        "state": JobState.RUNNING if allocation else JobState.PENDING,
        "submitted_s": 0.0,
        "allocation": allocation,
        "config": JobConfig(atomic_batch=16) if allocation else None,
    }
    return JobView(**{**fields, **changes})


def view(*jobs: JobView, on: tuple[Node, ...] = (), now_s: float = 100.0) -> ClusterView:
    return ClusterView(now_s=now_s, nodes=on or nodes(4, 4), jobs=jobs, restart_penalty_s=1.0)


class Truth:
    """The oracle of a view: what the fast network's model says of the requested batch, and the progress that
    is left as steps."""

    def __init__(self, given: ClusterView) -> None:
        self.jobs = {job.spec.id: job for job in given.jobs}
        self.node_slots = max((node.slots for node in given.nodes), default=1)

    def step_time_s(self, job_id: str, replicas: int) -> float:
        spec = self.jobs[job_id].spec
        config = batch_config(spec.batch_size, replicas, spec)
        nodes = -(-replicas // self.node_slots)
        return float(step_time(FAST_NETWORK, nodes, replicas, config.atomic_batch, config.accumulation))

    def remaining_steps(self, job_id: str) -> float:
        job = self.jobs[job_id]
        return job.spec.max_progress - (job.profile.progress if job.profile else 0.0)


def random_view(seed: int) -> ClusterView:
    """Jobs of all kinds on a small cluster, some of them running on what they may run on."""
    rng = random.Random(seed)
    cluster = nodes(*(rng.randint(1, 5) for _ in range(rng.randint(1, 5))))
    free = {node.name: node.slots for node in cluster}
    jobs = []
    for number in range(rng.randint(0, 8)):
        name = f"job-{number}"
        known = None
        if rng.random() < 0.7:
            statistics = GradientStatistics(sqr=1.0, var=10 ** rng.uniform(-2, 3), trusted=rng.random() < 0.8)
            known = profile(name, rng.randint(1, 6), rng.choice([None, statistics, statistics]))
        initial = rng.choice([8, 16, 30])
        limits = {
            "min_batch_size": initial,
            "max_batch_size": initial * rng.randint(1, 20),
            "max_replicas": rng.randint(1, 8),
        }
        allocation: list[Placement] = []
        for node, slots in free.items():
            if slots and rng.random() < 0.3 and sum(p.replicas for p in allocation) < limits["max_replicas"]:
                allocation.append(Placement(node=node, replicas=1))
                free[node] -= 1
        limits["max_batch_size"] = max(limits["max_batch_size"], initial * max(len(allocation), 1))
        limits["batch_size"] = limits["max_batch_size"]
        probe = spec(name, **limits)
        splits = (n for n in range(limits["max_replicas"], 0, -1) if can_share(n, probe))
        jobs.append(
            job(
                name,
                tuple(allocation),
                config=JobConfig(atomic_batch=initial) if allocation else None,
                submitted_s=rng.uniform(0, 100),
                restarts=rng.randint(0, 3),
                attained_slot_s=rng.uniform(0, 50),
                profile=known,
                replicas=next(splits),
                **limits,
            )
        )
    return view(*jobs, on=cluster)


def apply(decision: Decision, given: ClusterView, **changes: Any) -> ClusterView:
    """The view after a decision was carried out."""
    jobs = []
    for old in given.jobs:
        name = old.spec.id
        fields = {field: getattr(old, field) for field in JobView.__struct_fields__}
        fields |= {"allocation": decision.allocations[name], "config": decision.configs.get(name)}
        jobs.append(JobView(**fields))
    fields = {field: getattr(given, field) for field in ClusterView.__struct_fields__}
    return ClusterView(**{**fields, "jobs": tuple(jobs), **changes})
