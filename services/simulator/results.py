"""The result of a simulated run, as `coadapt simulate --json` prints it."""

import numpy as np

from common.types import JobState, Struct
from services.scheduler.state import State
from services.simulator.cases import SimulationCase
from services.simulator.engine import SimulatedRun


class Milliseconds(Struct, frozen=True):
    mean: float
    p99: float
    max: float


class Rho(Struct, frozen=True):
    """Finish-time fairness of the completed jobs: JCT / JCT alone on the job's share of the cluster.
    `unfair_fraction` is the fraction of jobs above 1."""

    worst: float
    mean: float
    unfair_fraction: float


class Result(Struct, frozen=True):
    """Times are in virtual seconds; None means not available.

    JCTs run from submission to verified completion, and only completed jobs have one. The makespan runs from
    the first submission to the last end of a job. Goodput is useful examples a second: M0 x progress of the
    completed jobs, over the makespan. `decision_ms` is CPU time of all that the scheduler's core does in a
    round. `value_over_bound` is the mean over the decisions of a policy that knows a bound of its objective.
    `refused` and `failed` give the reason by job."""

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
    rho: Rho | None
    jcts_s: dict[str, float]
    rhos: dict[str, float] | None
    rounds: int
    decision_ms: Milliseconds | None
    value_over_bound: float | None
    refused: dict[str, str]
    failed: dict[str, str]
    undecided: str
    """In how many rounds the policy gave no valid decision, and the first reason; empty: in none."""
    stalled: str
    """Why the run was given up before its jobs had ended; empty: it was not."""
    idle: str
    """Says that every job was refused; empty: at least one ran."""
    wall_s: float
    cpu_s: float

    @property
    def problems(self) -> list[str]:
        """One line for each job that failed or was refused, and one each when the policy gave no valid
        decision, the run was given up, or no job could run."""
        jobs = (("failed", self.failed), ("refused", self.refused))
        lines = [f"{job_id} {what}: {reason}" for what, of in jobs for job_id, reason in of.items()]
        return lines + [problem for problem in (self.undecided, self.stalled, self.idle) if problem]


def result_of(
    run: SimulatedRun, case: SimulationCase, rhos: dict[str, float] | None, *, wall_s: float, cpu_s: float
) -> Result:
    """`rhos` is finish-time fairness by job; `wall_s` and `cpu_s` are what the simulation took."""
    ended = run.state.ended.values()
    completed = [job for job in ended if job.state is JobState.COMPLETED]
    jcts_s = {job.spec.id: job.ended_s - job.submitted_s for job in completed if job.ended_s is not None}
    makespan_s = _makespan_s(run.state)
    useful_examples = sum(job.progress * job.spec.min_batch_size for job in completed)
    times_s = np.array(list(jcts_s.values()))
    return Result(
        run_id=case.run_id,
        workload=str(case.workload or case.label),
        label=case.label,
        policy=case.policy,
        world=case.world,
        seed=case.seed,
        mean_jct_s=float(times_s.mean()) if jcts_s else None,
        p99_jct_s=float(np.percentile(times_s, 99)) if jcts_s else None,
        makespan_s=makespan_s,
        goodput=useful_examples / makespan_s if makespan_s else None,
        rho=_rho(rhos),
        jcts_s=dict(sorted(jcts_s.items())),
        rhos=dict(sorted(rhos.items())) if rhos is not None else None,
        rounds=run.state.rounds,
        decision_ms=_milliseconds(run.decisions_s),
        value_over_bound=_mean_value_over_bound(run),
        refused=run.refused,
        failed={job.spec.id: job.reason for job in ended if job.state is JobState.FAILED},
        undecided=_undecided(run),
        stalled=run.stalled,
        idle=_idle(run),
        wall_s=wall_s,
        cpu_s=cpu_s,
    )


def _milliseconds(times_s: list[float]) -> Milliseconds | None:
    if not times_s:
        return None
    times_ms = 1000 * np.array(times_s)
    return Milliseconds(
        mean=float(times_ms.mean()), p99=float(np.percentile(times_ms, 99)), max=float(times_ms.max())
    )


def _rho(rhos: dict[str, float] | None) -> Rho | None:
    if not rhos:
        return None
    values = np.array(list(rhos.values()))
    return Rho(
        worst=float(values.max()), mean=float(values.mean()), unfair_fraction=float(np.mean(values > 1))
    )


def _undecided(run: SimulatedRun) -> str:
    reasons = run.invalid_decisions
    if not reasons:
        return ""
    return f"{len(reasons)} of {run.state.rounds} rounds without a decision: {reasons[0]}"


def _idle(run: SimulatedRun) -> str:
    if run.state.ended or run.state.jobs:
        return ""
    return f"no job ran: {len(run.refused)} of {len(run.refused)} refused"


def _makespan_s(state: State) -> float | None:
    ends_s = [job.ended_s for job in state.ended.values() if job.ended_s is not None]
    if state.jobs or not ends_s:
        return None
    return max(ends_s) - min(job.submitted_s for job in state.ended.values())


def _mean_value_over_bound(run: SimulatedRun) -> float | None:
    ratios = [value / bound for value, bound in run.values_and_bounds if bound > 0]
    return float(np.mean(ratios)) if ratios else None
