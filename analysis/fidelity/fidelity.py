"""How near simulated runs come to the real ones.

Both folders hold one folder a run, of the same names. Compared are the jobs that completed in both; an error
is simulated / real - 1.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy import stats

from analysis.compare.experiment_runs import gather
from analysis.compare.pairing import ORDER, LeftOut
from analysis.fidelity.run_pairs import JobFigures, Pair, paired
from analysis.fidelity.winners import RULE, Winner, scores, winner
from analysis.log.find_logs import NoRuns
from analysis.run.breakdown import PARTS, Breakdown, mean_breakdown
from analysis.run.step_times import StepTime
from common.types import JobConfig, Struct
from workloads.files.measured_profile import MeasuredProfile


class Sides(Struct, frozen=True):
    """The same figure on both sides; `error` is simulated / real - 1."""

    real: float
    simulated: float
    error: float | None


class Correlation(Struct, frozen=True):
    """Spearman's, of completion times: over all jobs, and within runs."""

    overall: float | None
    within_mean: float | None
    within_least: float | None


class RunComparison(Struct, frozen=True):
    run: str
    set: str
    policy: str
    seed: int
    jobs: int
    mean_jct_s: Sides
    rank_correlation: float | None
    real: Breakdown
    """Means over the jobs, seconds."""
    simulated: Breakdown


class Fidelity(Struct, frozen=True):
    """What `fidelity.json` holds. A mean over runs counts each run alike."""

    date: str | None
    machine: Any
    """As in the experiment's own file."""
    runs: int
    jobs: int
    mean_jct_error: dict[str, float | None]
    """By policy."""
    mean_jct_error_by_set: dict[str, float | None]
    mean_jct_error_by_set_and_policy: dict[str, dict[str, float | None]]
    mean_jct_s: dict[str, Sides]
    job_jct_error: dict[str, float]
    """Mean absolute relative error of a job's completion time, by policy and "overall"."""
    rank_correlation: Correlation
    winner_rule: str
    winners: dict[str, Winner]
    """By set; only sets that were run with several policies, all of them with one seed at least."""
    sets_agreeing: int
    sets_differing_within_noise: int
    """Of the sets with different winners, those where reality does not tell these two apart."""
    policy_order: dict[str, float | None]
    """Kendall's tau between the orders of the policies, made as winners are, by set and "overall"."""
    ratios: dict[str, Sides]
    """Of mean completion times: geometric means over the pairs of runs of the same set and seed."""
    batch_efficiency: dict[str, Sides]
    """By policy, means over the runs: the part of its time that training takes with the best batches
    (`analysis.run.batches`)."""
    parts: dict[str, dict[str, Sides]]
    """Of a job's completion time, by policy, seconds."""
    applications: dict[str, dict[str, Sides]]
    """Means over the jobs of each application; `step_s`: of a step, in the configurations that both sides
    had, each weighted by the time that it really was in use."""
    per_run: tuple[RunComparison, ...]
    left_out: tuple[LeftOut, ...]


def compare_folders(
    real: Path,
    simulated: Path,
    profiles: Mapping[str, MeasuredProfile],
    lacking: Mapping[str, str] | None = None,
) -> tuple[Fidelity, list[Pair]]:
    """The comparison, and what it is made of; `lacking` says, by run, why it was not simulated. Raises
    NoRuns."""
    experiment = gather(real)
    found = list(paired(experiment, simulated, profiles, lacking or {}))
    pairs = [one for one in found if isinstance(one, Pair)]
    left_out = [one for one in found if isinstance(one, LeftOut)]
    if not pairs:
        why = f"; {left_out[0].run}: {left_out[0].why}" if left_out else ""
        raise NoRuns(f"{real}, {simulated}: no run to compare{why}")
    return compare(pairs, left_out, experiment.date, experiment.about.get("machine")), pairs


# --------------------------------------------------------------------------- comparing


def compare(
    pairs: Sequence[Pair],
    left_out: Sequence[LeftOut] = (),
    date: str | None = None,
    machine: Any = None,
) -> Fidelity:
    runs = [_run(pair) for pair in pairs]
    policies = sorted({run.policy for run in runs}, key=place)
    sets = sorted({run.set for run in runs})
    by_policy = {policy: [run for run in runs if run.policy == policy] for policy in policies}
    by_set = {name: [run for run in runs if run.set == name] for name in sets}
    within = [run.rank_correlation for run in runs if run.rank_correlation is not None]
    jobs = [(pair.policy, job, pair.simulated[name]) for pair in pairs for name, job in pair.real.items()]
    winners = {
        name: found for name, of_set in by_set.items() if (found := winner(_times_s(of_set))) is not None
    }
    undecided = [
        LeftOut(run=name, why="no winner is told: there is no seed that all its policies have")
        for name, of_set in by_set.items()
        if name not in winners and len({run.policy for run in of_set}) > 1
    ]
    return Fidelity(
        date=date,
        machine=machine,
        runs=len(runs),
        jobs=len(jobs),
        mean_jct_error={policy: _mean_jct(some).error for policy, some in by_policy.items()},
        mean_jct_error_by_set={name: _mean_jct(some).error for name, some in by_set.items()},
        mean_jct_error_by_set_and_policy={
            name: {
                policy: _mean_jct(some).error
                for policy in policies
                if (some := [run for run in of_set if run.policy == policy])
            }
            for name, of_set in by_set.items()
        },
        mean_jct_s={policy: _mean_jct(some) for policy, some in by_policy.items()},
        job_jct_error={
            "overall": _absolute_error(jobs),
            **{policy: _absolute_error([row for row in jobs if row[0] == policy]) for policy in policies},
        },
        rank_correlation=Correlation(
            overall=spearman([(job.jct_s, twin.jct_s) for _, job, twin in jobs]),
            within_mean=float(np.mean(within)) if within else None,
            within_least=min(within, default=None),
        ),
        winner_rule=RULE,
        winners=winners,
        sets_agreeing=sum(found.agree for found in winners.values()),
        sets_differing_within_noise=sum(found.could_be_noise is True for found in winners.values()),
        policy_order={
            "overall": _order(runs),
            **{name: _order(of_set) for name, of_set in by_set.items() if name in winners},
        },
        ratios=_ratios(by_policy),
        batch_efficiency={policy: _sides(known) for policy in policies if (known := _batches(pairs, policy))},
        parts={policy: {part: _part(some, part) for part in PARTS} for policy, some in by_policy.items()},
        applications=_applications(jobs, pairs),
        per_run=tuple(runs),
        left_out=(*left_out, *undecided),
    )


def place(policy: str) -> tuple[int, str]:
    return ORDER.index(policy) if policy in ORDER else len(ORDER), policy


def _run(pair: Pair) -> RunComparison:
    rows = [(job, pair.simulated[job_id]) for job_id, job in pair.real.items()]
    return RunComparison(
        run=pair.run,
        set=pair.set,
        policy=pair.policy,
        seed=pair.seed,
        jobs=len(rows),
        mean_jct_s=_sides((job.jct_s, twin.jct_s) for job, twin in rows),
        rank_correlation=spearman([(job.jct_s, twin.jct_s) for job, twin in rows]),
        real=mean_breakdown([job.parts for job, _ in rows]),
        simulated=mean_breakdown([twin.parts for _, twin in rows]),
    )


def _sides(rows: Iterable[tuple[float, float]]) -> Sides:
    """Their means."""
    real, simulated = np.mean(list(rows), axis=0).tolist()
    return Sides(real, simulated, simulated / real - 1 if real > 0 else None)


def _mean_jct(runs: Sequence[RunComparison]) -> Sides:
    return _sides((run.mean_jct_s.real, run.mean_jct_s.simulated) for run in runs)


def _part(runs: Sequence[RunComparison], name: str) -> Sides:
    return _sides((getattr(run.real, name), getattr(run.simulated, name)) for run in runs)


def _batches(pairs: Sequence[Pair], policy: str) -> list[tuple[float, float]]:
    """Of the policy's runs that have the figure on both sides."""
    both = [(pair.real_batches, pair.simulated_batches) for pair in pairs if pair.policy == policy]
    return [(real, copy) for real, copy in both if real is not None and copy is not None]


def _absolute_error(jobs: Sequence[tuple[str, JobFigures, JobFigures]]) -> float:
    return float(np.mean([abs(twin.jct_s / job.jct_s - 1) for _, job, twin in jobs]))


def spearman(rows: Sequence[tuple[float, float]]) -> float | None:
    """Rank correlation; None where there is no order to compare."""
    return _statistic(stats.spearmanr, rows)


def _statistic(measure: Callable[..., Any], rows: Sequence[tuple[float, float]]) -> float | None:
    if len(rows) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constant input, which has no order
        value = float(measure(*zip(*rows, strict=True)).statistic)
    return value if math.isfinite(value) else None


def _times_s(runs: Sequence[RunComparison]) -> dict[str, dict[tuple[str, int], tuple[float, float]]]:
    times_s: dict[str, dict[tuple[str, int], tuple[float, float]]] = {}
    for run in runs:
        times_s.setdefault(run.policy, {})[run.set, run.seed] = run.mean_jct_s.real, run.mean_jct_s.simulated
    return times_s


def _order(runs: Sequence[RunComparison]) -> float | None:
    return _statistic(stats.kendalltau, list(scores(_times_s(runs)).values()))


def _ratios(by_policy: Mapping[str, Sequence[RunComparison]]) -> dict[str, Sides]:
    """Of each policy over each one before it, where both ran the same set and seed."""
    times_s = {
        policy: {(run.set, run.seed): run.mean_jct_s for run in runs} for policy, runs in by_policy.items()
    }
    found = {}
    for other, one in combinations(times_s, 2):
        same = sorted(times_s[one].keys() & times_s[other].keys())
        if same:
            logs = [
                [math.log(times_s[one][key].real / times_s[other][key].real) for key in same],
                [math.log(times_s[one][key].simulated / times_s[other][key].simulated) for key in same],
            ]
            real, simulated = np.exp(np.mean(logs, axis=1)).tolist()
            found[f"{one}/{other}"] = Sides(real, simulated, simulated / real - 1)
    return found


def _applications(
    jobs: Sequence[tuple[str, JobFigures, JobFigures]], pairs: Sequence[Pair]
) -> dict[str, dict[str, Sides]]:
    measures: dict[str, Callable[[JobFigures], float | None]] = {
        "jct_s": lambda job: job.jct_s,
        **{part: lambda job, part=part: getattr(job.parts, part) for part in PARTS},  # type: ignore[misc]
        "progress": lambda job: job.progress,
        "replicas": lambda job: job.replicas,
        "batch": lambda job: job.batch,
        "rescales": lambda job: job.rescales,
    }
    found: dict[str, dict[str, Sides]] = {}
    for application in sorted({job.application for _, job, _ in jobs}):
        rows = [(job, twin) for _, job, twin in jobs if job.application == application]
        found[application] = {}
        for name, measure in measures.items():
            known = [
                (one, other)
                for job, twin in rows
                if (one := measure(job)) is not None and (other := measure(twin)) is not None
            ]
            if known:
                found[application][name] = _sides(known)
        if steps := _steps(application, pairs):
            found[application]["step_s"] = steps
    return found


def _steps(application: str, pairs: Sequence[Pair]) -> Sides | None:
    """Mean seconds of a step over the configurations that both sides had, weighted by the real seconds."""
    real = _by_configuration(application, (step for pair in pairs for step in pair.real_steps))
    simulated = _by_configuration(application, (step for pair in pairs for step in pair.simulated_steps))
    rows = [
        (step_s, simulated[key][0], weight_s) for key, (step_s, weight_s) in real.items() if key in simulated
    ]
    if not rows:
        return None
    one, other, weights = np.array(rows).T
    means = float(one @ weights / weights.sum()), float(other @ weights / weights.sum())
    return Sides(*means, means[1] / means[0] - 1 if means[0] > 0 else None)


def _by_configuration(
    application: str, steps: Iterable[StepTime]
) -> dict[tuple[tuple[int, ...], JobConfig], tuple[float, float]]:
    """Mean seconds of a step, and the seconds of samples with it."""
    sums: dict[tuple[tuple[int, ...], JobConfig], tuple[float, float]] = {}
    for step in (step for step in steps if step.application == application):
        key = step.placement, step.config
        mean_s, weight_s = sums.get(key, (step.step_s, 0.0))
        both_s = weight_s + step.weight_s
        sums[key] = both_s / (weight_s / mean_s + step.weight_s / step.step_s), both_s
    return sums


def encoded(found: Fidelity) -> str:
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"
