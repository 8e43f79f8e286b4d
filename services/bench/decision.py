"""`coadapt bench decision`: how long a policy thinks, and how near to the best possible it comes.

Synthetic jobs, with step times and bounds in the ranges of the Pollux paper's six applications and gradient
noise over orders of magnitude, share a cluster. Every round the policy decides, the decision is checked and
carried out, some jobs end and as many new ones come: so there are always jobs without a model, jobs that
explore, and jobs that run. Nothing is trained; `coadapt simulate` does that.

Wall and CPU time stand side by side: the latter is what the decision costs where others use the machine too.
"""

import random
import time
from typing import Annotated, Any

import typer
from msgspec import structs

from common.lifecycle import UserError
from common.types import (
    GradientStatistics,
    JobProfile,
    JobSpec,
    JobState,
    Node,
    ThroughputParameters,
    can_share,
    replicas_of,
)
from services.bench.measure import Progress, quantile, report, table
from services.cli.options import whole
from services.scheduler.decisions import NoDecision, decided
from services.scheduler.policies import UnknownPolicy, make_policy
from services.scheduler.policies.interface import ClusterView, Decision, JobView
from workloads.files.workload_file import MAX_SEED

ROUND_S = 60.0
RESTART_S = 30.0
DEPARTURES = 0.04
"""Of the jobs, a round."""
AGE_S = 4 * 3600.0
"""Jobs that are there at the start came within so long before it."""
MAX_JOBS = 100_000
MAX_NODES = 16_384
MAX_SLOTS = 64
MAX_ROUNDS = 10_000


def run(jobs: int, nodes: int, slots: int, rounds: int, policy_name: str, seed: int) -> dict[str, Any]:
    """Raises UserError where the policy is not known, cannot run outside of a simulation, or fails."""
    try:
        policy = make_policy(policy_name)
    except UnknownPolicy as error:
        raise UserError(str(error)) from error
    if policy.needs_oracle:
        raise UserError(f"policy {policy_name!r}: needs what only a simulator knows; see `coadapt simulate`")
    rng = random.Random(seed)
    view = first_view(rng, jobs, nodes, slots)
    memory = None
    wall_ms, cpu_ms, shares, used = [], [], [], []

    def timed(view: ClusterView, memory: Any, seed: int) -> Decision:
        """Without the check of the decision, which is not the policy's."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        decision = policy.decide(view, memory, seed)
        wall_ms.append(1e3 * (time.perf_counter() - wall_s))
        cpu_ms.append(1e3 * (time.process_time() - cpu_s))
        return decision

    progress = Progress("decision", rounds)
    for number in range(rounds):
        try:
            decision = decided(timed, view, memory, number)
        except NoDecision as error:
            raise UserError(
                f"policy {policy_name!r} gave no valid decision in round {number + 1}: {error}"
            ) from error
        memory = decision.memory
        if decision.value is not None and decision.bound:
            shares.append(decision.value / decision.bound)
        used.append(sum(map(replicas_of, decision.allocations.values())) / (nodes * slots))
        view = next_view(rng, view, decision, number)
        progress.step(f"{wall_ms[-1]:.1f} ms")
    return {
        "benchmark": "decision",
        "policy": policy_name,
        "jobs": jobs,
        "nodes": nodes,
        "slots": slots,
        "rounds": rounds,
        "seed": seed,
        "decision_ms": _spread(wall_ms),
        "decision_cpu_ms": _spread(cpu_ms),
        "value_over_bound": sum(shares) / len(shares) if shares else None,
        "value_over_bound_least": min(shares, default=None),
        "proven_best": sum(share > 1 - 1e-7 for share in shares) / len(shares) if shares else None,
        "slots_used": sum(used) / rounds,
    }


def _spread(values_ms: list[float]) -> dict[str, float]:
    """The first decision, whose caches are empty, stands by itself as well as among the others."""
    return {
        "mean": sum(values_ms) / len(values_ms),
        "p50": quantile(values_ms, 0.5),
        "p99": quantile(values_ms, 0.99),
        "max": max(values_ms),
        "first": values_ms[0],
    }


def first_view(rng: random.Random, jobs: int, nodes: int, slots: int) -> ClusterView:
    """Jobs that came over the last hours and have shown different much of themselves, none with slots."""
    came = sorted(rng.uniform(-AGE_S, 0.0) for _ in range(jobs))
    views = []
    for number, submitted_s in enumerate(came):
        job = new_job(rng, f"job-{number}", submitted_s)
        if rng.random() < 0.9:
            job = structs.replace(job, profile=shown(rng, job, 2 ** rng.randrange(5)))
        views.append(job)
    width = len(str(nodes))
    cluster = tuple(Node(name=f"node-{n:0{width}}", slots=slots, slot_speed=1.0) for n in range(1, nodes + 1))
    return ClusterView(now_s=0.0, nodes=cluster, jobs=tuple(views), restart_penalty_s=RESTART_S)


def next_view(rng: random.Random, view: ClusterView, decision: Decision, number: int) -> ClusterView:
    """A round later: the decision was carried out, some jobs have ended, as many have come."""
    now_s = view.now_s + ROUND_S
    staying = [carried_out(rng, job, decision) for job in view.jobs if rng.random() >= DEPARTURES]
    coming = [
        new_job(rng, f"job-{number}-{n}", rng.uniform(view.now_s, now_s))
        for n in range(len(view.jobs) - len(staying))
    ]
    coming.sort(key=lambda job: job.submitted_s)
    return structs.replace(view, now_s=now_s, jobs=(*staying, *coming))


def carried_out(rng: random.Random, job: JobView, decision: Decision) -> JobView:
    allocation = decision.allocations[job.spec.id]
    if not allocation:
        return structs.replace(job, allocation=(), config=None, state=JobState.PENDING)
    replicas = replicas_of(allocation)
    moved = allocation != job.allocation and job.run_s > 0
    return structs.replace(
        job,
        state=JobState.RUNNING,
        allocation=allocation,
        config=decision.configs[job.spec.id],
        restarts=job.restarts + moved,
        run_s=job.run_s + ROUND_S,
        attained_slot_s=job.attained_slot_s + ROUND_S * replicas,
        profile=shown(rng, job, replicas),
    )


def new_job(rng: random.Random, job_id: str, submitted_s: float) -> JobView:
    initial = 2 ** rng.randint(3, 8)
    most = initial * 2 ** rng.randint(4, 6)
    atomic = max(initial // 2 ** rng.randint(1, 4), 4)
    spec = JobSpec(
        id=job_id,
        application="synthetic",
        seed=0,
        target=1.0,
        max_progress=10 ** rng.uniform(3, 6),
        replicas=2 ** rng.randint(0, 4),
        batch_size=initial,
        min_batch_size=initial,
        max_batch_size=most,
        min_atomic_batch=atomic,
        max_atomic_batch=max(initial // 2, 2 * atomic),
        max_replicas=min(64, most // atomic),
    )
    asked = next(n for n in range(spec.replicas, 0, -1) if can_share(n, spec))
    return JobView(
        spec=structs.replace(spec, replicas=asked), state=JobState.PENDING, submitted_s=submitted_s
    )


def shown(rng: random.Random, job: JobView, replicas: int) -> JobProfile:
    """The profile of a job that has now run on so many replicas as well. Its noise grows over its life."""
    former = job.profile
    if former and former.parameters and former.statistics:
        grown = structs.replace(former.statistics, var=former.statistics.var * rng.uniform(1.0, 1.02))
        most = max(former.max_profiled_replicas, replicas)
        return structs.replace(
            former, statistics=grown, max_profiled_replicas=most, progress=former.progress + ROUND_S
        )
    # One pass over M0 takes 50 ms to 1 s; synchronising costs a tenth of that to as much again.
    pass_s = 0.05 * 20 ** rng.random()
    fixed = rng.uniform(0.1, 0.5)
    within_s = pass_s * 10 ** rng.uniform(-1.0, 0.0)
    across_s = within_s * rng.uniform(1.1, 5.0)
    parameters = ThroughputParameters(
        alpha_c=pass_s * fixed,
        beta_c=pass_s * (1.0 - fixed) / job.spec.min_batch_size,
        alpha_n=across_s,
        beta_n=across_s * 10 ** rng.uniform(-2.0, -1.0),
        alpha_r=within_s,
        beta_r=within_s * 10 ** rng.uniform(-2.0, -1.0),
        gamma=rng.uniform(1.0, 2.5),
    )
    return JobProfile(
        job_id=job.spec.id,
        parameters=parameters,
        statistics=GradientStatistics(sqr=1.0, var=10 ** rng.uniform(-1.0, 2.5)),
        max_profiled_replicas=replicas,
    )


def text(result: dict[str, Any]) -> str:
    head = (
        f"{result['policy']}: {result['jobs']} jobs on {result['nodes']} nodes x {result['slots']} slots, "
        f"{result['rounds']} rounds, {result['slots_used']:.0%} of the slots used"
    )
    columns = ("mean", "p50", "p99", "max", "first")
    rows = [
        [name, *(f"{result[key][column]:.2f}" for column in columns)]
        for name, key in (("wall", "decision_ms"), ("CPU", "decision_cpu_ms"))
    ]
    lines = [head, "", table(["ms a decision", *columns], rows)]
    if result["value_over_bound"] is not None:
        lines += [
            "",
            f"value / bound: mean {result['value_over_bound']:.5f}, "
            f"least {result['value_over_bound_least']:.5f}; "
            f"{result['proven_best']:.0%} of the decisions proven best",
        ]
    return "\n".join(lines)


def command(
    jobs: Annotated[int, typer.Option(parser=whole(1, MAX_JOBS), metavar="N", help="Active jobs.")] = 31,
    nodes: Annotated[
        int, typer.Option(parser=whole(1, MAX_NODES), metavar="N", help="Nodes of the cluster.")
    ] = 16,
    slots: Annotated[int, typer.Option(parser=whole(1, MAX_SLOTS), metavar="M", help="Slots of a node.")] = 4,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Which policy decides.")] = "pollux",
    rounds: Annotated[
        int, typer.Option(parser=whole(1, MAX_ROUNDS), metavar="N", help="Decisions that are measured.")
    ] = 30,
    seed: Annotated[int, typer.Option(parser=whole(0, MAX_SEED), metavar="N", help="Of the jobs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how long a policy takes to decide, and how near to the bound it comes."""
    result = run(jobs, nodes, slots, rounds, policy, seed)
    report(result, text(result), as_json=as_json)
