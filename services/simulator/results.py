"""What a simulated run comes to."""

from collections.abc import Iterable

import numpy as np

from common.types import JobState, Struct
from services.scheduler.state import State
from services.simulator.engine import SimulatedRun


class Milliseconds(Struct, frozen=True):
    mean: float
    p99: float
    max: float


class Rho(Struct, frozen=True):
    """Finish-time fairness over the completed jobs: JCT over what it had been alone on the job's share.
    `unfair_fraction`: of jobs above 1."""

    worst: float
    mean: float
    unfair_fraction: float


class Result(Struct, frozen=True):
    """What `--json` prints of a run. Job completion times run from submission to verified completion, in
    virtual seconds, of the jobs that completed; the makespan from the first submission to the last end.
    None: cannot be had."""

    run_id: str
    workload: str
    label: str
    """A short name of the workload."""
    policy: str
    world: str
    seed: int
    mean_jct_s: float | None
    p99_jct_s: float | None
    makespan_s: float | None
    goodput: float | None
    """Useful examples a second: M0 x progress of the completed jobs, over the makespan."""
    rho: Rho | None
    jcts_s: dict[str, float]
    rhos: dict[str, float] | None
    """By completed job, where they were asked for."""
    rounds: int
    decision_ms: Milliseconds | None
    """CPU time, of everything that the scheduler's core does in a round."""
    value_over_bound: float | None
    """Mean over the decisions of a policy that knows a bound of its objective."""
    refused: dict[str, str]
    """Why, by job."""
    failed: dict[str, str]
    undecided: str
    """In how many rounds the policy gave no valid decision, and why in the first of them; empty: in none."""
    stalled: str
    """Why the run was given up with jobs under way; empty: it was not."""
    idle: str
    """Says that no job ran, each having been refused; empty: one did."""
    wall_s: float
    cpu_s: float


def summed_up(
    run: SimulatedRun,
    *,
    run_id: str,
    workload: str,
    label: str,
    policy: str,
    world: str,
    seed: int,
    rhos: dict[str, float] | None,
    wall_s: float,
    cpu_s: float,
) -> Result:
    ended = run.state.ended.values()
    completed = [job for job in ended if job.state is JobState.COMPLETED]
    jcts_s = {job.spec.id: job.ended_s - job.submitted_s for job in completed if job.ended_s is not None}
    makespan_s = _makespan_s(run.state)
    useful = sum(job.progress * job.spec.min_batch_size for job in completed)
    times_s = np.array(list(jcts_s.values()))
    decisions_ms = 1000 * np.array(run.decisions_s)
    return Result(
        run_id=run_id,
        workload=workload,
        label=label,
        policy=policy,
        world=world,
        seed=seed,
        mean_jct_s=float(times_s.mean()) if jcts_s else None,
        p99_jct_s=float(np.percentile(times_s, 99)) if jcts_s else None,
        makespan_s=makespan_s,
        goodput=useful / makespan_s if makespan_s else None,
        rho=_rho(rhos),
        jcts_s=dict(sorted(jcts_s.items())),
        rhos=dict(sorted(rhos.items())) if rhos is not None else None,
        rounds=run.state.rounds,
        decision_ms=Milliseconds(
            mean=float(decisions_ms.mean()),
            p99=float(np.percentile(decisions_ms, 99)),
            max=float(decisions_ms.max()),
        )
        if run.decisions_s
        else None,
        value_over_bound=_mean_ratio(run.decided),
        refused=run.refused,
        failed={job.spec.id: job.reason for job in ended if job.state is JobState.FAILED},
        undecided=_undecided(run),
        stalled=run.stalled,
        idle=_idle(run),
        wall_s=wall_s,
        cpu_s=cpu_s,
    )


def _rho(rhos: dict[str, float] | None) -> Rho | None:
    if not rhos:
        return None
    values = np.array(list(rhos.values()))
    return Rho(
        worst=float(values.max()), mean=float(values.mean()), unfair_fraction=float(np.mean(values > 1))
    )


def _undecided(run: SimulatedRun) -> str:
    if not run.undecided:
        return ""
    return f"{len(run.undecided)} of {run.state.rounds} rounds without a decision: {run.undecided[0]}"


def _idle(run: SimulatedRun) -> str:
    if run.state.ended or run.state.jobs:
        return ""
    return f"no job ran: {len(run.refused)} of {len(run.refused)} refused"


def _makespan_s(state: State) -> float | None:
    ends_s = [job.ended_s for job in state.ended.values() if job.ended_s is not None]
    if state.jobs or not ends_s:
        return None
    return max(ends_s) - min(job.submitted_s for job in state.ended.values())


def _mean_ratio(decided: Iterable[tuple[float, float]]) -> float | None:
    ratios = [value / bound for value, bound in decided if bound > 0]
    return float(np.mean(ratios)) if ratios else None
