"""How closely simulated runs agree with the real ones.

Both folders hold one folder per run, with the same names. Only jobs that completed on both sides count. An
error is simulated / real - 1. A mean over runs counts each run the same.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from scipy import stats

from analysis.compare.experiment_runs import gather
from analysis.compare.pairing import LeftOut, rank
from analysis.fidelity.run_pairs import Pair, paired
from analysis.fidelity.winners import RULE, Winner, scores, winner
from analysis.log.find_logs import NoRuns
from analysis.run.breakdown import PARTS, Breakdown, mean_breakdown
from analysis.run.step_times import StepTime
from common.types import Struct
from workloads.files.measured_profile import MeasuredProfile

JOB_MEASURES = {
    "jct_s": attrgetter("jct_s"),
    **{part: attrgetter(f"parts.{part}") for part in PARTS},
    **{name: attrgetter(name) for name in ("progress", "replicas", "batch", "rescales")},
}
"""By name, how to read the figure from `JobFigures`."""


class Sides(Struct, frozen=True):
    """The same figure on both sides; `error` is simulated / real - 1, None if real is 0."""

    real: float
    simulated: float
    error: float | None


class Correlation(Struct, frozen=True):
    """Spearman's rank correlation of completion times, over all jobs and within runs; None where there is no
    order to compare."""

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
    """Means over the jobs, in seconds."""
    simulated: Breakdown


class Fidelity(Struct, frozen=True):
    """The content of `fidelity.json`."""

    date: str | None
    machine: Any
    """As in experiment.json."""
    runs: int
    jobs: int
    mean_jct_error: dict[str, float | None]
    """By policy."""
    mean_jct_error_by_set: dict[str, float | None]
    mean_jct_error_by_set_and_policy: dict[str, dict[str, float | None]]
    mean_jct_s: dict[str, Sides]
    job_jct_error: dict[str, float]
    """Mean absolute error of a job's completion time, by policy and "overall"."""
    rank_correlation: Correlation
    winner_rule: str
    winners: dict[str, Winner]
    """By set; only sets with several policies and at least one seed that all of them have."""
    sets_agreeing: int
    sets_differing_within_noise: int
    """Sets with different winners, where reality is inconclusive about these two."""
    policy_order: dict[str, float | None]
    """Kendall's tau between the real and the simulated order of the policies, by set and "overall"."""
    ratios: dict[str, Sides]
    """Ratios of mean completion times: geometric means over pairs of runs of the same set and seed."""
    batch_efficiency: dict[str, Sides]
    """By policy, means over runs: the fraction of its time that training would take with the best batches
    (`analysis.run.batches`)."""
    parts: dict[str, dict[str, Sides]]
    """The parts of a job's completion time, by policy, in seconds."""
    applications: dict[str, dict[str, Sides]]
    """Means over the jobs of each application. `step_s`: seconds per step in the configurations that both
    sides had, each weighted by the real time in it."""
    per_run: tuple[RunComparison, ...]
    left_out: tuple[LeftOut, ...]


def compare_folders(
    real: Path,
    simulated: Path,
    profiles: Mapping[str, MeasuredProfile],
    not_simulated: Mapping[str, str] | None = None,
) -> tuple[Fidelity, list[Pair]]:
    """The comparison and the pairs behind it. `not_simulated` gives the reason, by run, why it has no twin.
    Raises NoRuns."""
    experiment = gather(real)
    found = list(paired(experiment, simulated, profiles, not_simulated or {}))
    pairs = [one for one in found if isinstance(one, Pair)]
    left_out = [one for one in found if isinstance(one, LeftOut)]
    if not pairs:
        why = f"; {left_out[0].run}: {left_out[0].why}" if left_out else ""
        raise NoRuns(f"{real}, {simulated}: no run to compare{why}")
    return compare_pairs(pairs, left_out, experiment.date, experiment.about.get("machine")), pairs


def compare_pairs(
    pairs: Sequence[Pair],
    left_out: Sequence[LeftOut] = (),
    date: str | None = None,
    machine: Any = None,
) -> Fidelity:
    figures = _job_figures(pairs)
    of_runs = figures.group_by("run", "set", "policy", "seed", "measure", maintain_order=True).agg(
        pl.col("real", "simulated").mean()
    )
    jcts, run_jcts = (frame.filter(pl.col("measure") == "jct_s") for frame in (figures, of_runs))
    policies = sorted(set(run_jcts["policy"]), key=rank)
    by_set = {
        str(name): times for (name,), times in run_jcts.sort("set").partition_by("set", as_dict=True).items()
    }
    winners = {name: found for name, times in by_set.items() if (found := winner(times))}
    undecided = [
        LeftOut(run=name, why="it has no winner: its policies have no seed in common")
        for name, times in by_set.items()
        if name not in winners and times["policy"].n_unique() > 1
    ]
    jct_of_policy, jct_of_set = _means(run_jcts, "policy"), _means(run_jcts, "set")
    jct_of_both = _means(run_jcts, "set", "policy")
    part_means = _means(of_runs, "policy", "measure")
    batches = _means(_batch_efficiencies(pairs), "policy")
    return Fidelity(
        date=date,
        machine=machine,
        runs=len(pairs),
        jobs=jcts.height,
        mean_jct_error={policy: jct_of_policy[policy,].error for policy in policies},
        mean_jct_error_by_set={name: jct_of_set[name,].error for name in by_set},
        mean_jct_error_by_set_and_policy={
            name: {
                policy: jct_of_both[name, policy].error
                for policy in policies
                if (name, policy) in jct_of_both
            }
            for name in by_set
        },
        mean_jct_s={policy: jct_of_policy[policy,] for policy in policies},
        job_jct_error={
            "overall": _absolute_error(jcts),
            **{policy: _absolute_error(jcts.filter(pl.col("policy") == policy)) for policy in policies},
        },
        rank_correlation=_correlation(jcts),
        winner_rule=RULE,
        winners=winners,
        sets_agreeing=sum(found.agree for found in winners.values()),
        sets_differing_within_noise=sum(found.could_be_noise is True for found in winners.values()),
        policy_order={"overall": _order(run_jcts), **{name: _order(by_set[name]) for name in winners}},
        ratios=_ratios(run_jcts, policies),
        batch_efficiency={policy: batches[policy,] for policy in policies if (policy,) in batches},
        parts={policy: {part: part_means[policy, part] for part in PARTS} for policy in policies},
        applications=_applications(figures, pairs),
        per_run=_per_run(pairs, jcts),
        left_out=(*left_out, *undecided),
    )


def encoded(found: Fidelity) -> str:
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


# --------------------------------------------------------------------------- tables


def _job_figures(pairs: Sequence[Pair]) -> pl.DataFrame:
    """One row per job and measure, with the figure on both sides; null if unknown."""
    schema = {
        "run": pl.String,
        "set": pl.String,
        "policy": pl.String,
        "seed": pl.Int64,
        "application": pl.String,
        "measure": pl.String,
        "real": pl.Float64,
        "simulated": pl.Float64,
    }
    rows = [
        (
            pair.run,
            pair.set,
            pair.policy,
            pair.seed,
            job.application,
            measure,
            of(job),
            of(pair.simulated[job_id]),
        )
        for pair in pairs
        for job_id, job in pair.real.items()
        for measure, of in JOB_MEASURES.items()
    ]
    return pl.DataFrame(rows, schema=schema, orient="row")


def _batch_efficiencies(pairs: Sequence[Pair]) -> pl.DataFrame:
    """One row per run that has the figure on both sides."""
    rows = [(pair.policy, pair.real_batches, pair.simulated_batches) for pair in pairs]
    schema = {"policy": pl.String, "real": pl.Float64, "simulated": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row").drop_nulls()


def _steps(steps: Sequence[StepTime]) -> pl.DataFrame:
    """One row per application and configuration: mean seconds per step, and the seconds in it."""
    rows = [
        (step.application, repr((step.placement, step.config)), step.step_s, step.weight_s) for step in steps
    ]
    schema = {
        "application": pl.String,
        "configuration": pl.String,
        "step_s": pl.Float64,
        "weight_s": pl.Float64,
    }
    step_count = (pl.col("weight_s") / pl.col("step_s")).sum()
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    return frame.group_by("application", "configuration", maintain_order=True).agg(
        (pl.col("weight_s").sum() / step_count).alias("step_s"), pl.col("weight_s").sum()
    )


# --------------------------------------------------------------------------- figures of the tables


def _sides(real: float, simulated: float) -> Sides:
    return Sides(real, simulated, simulated / real - 1 if real > 0 else None)


def _means(frame: pl.DataFrame, *by: str) -> dict[tuple[str, ...], Sides]:
    """Means of both sides over the rows that have both, by the values of these columns."""
    means = frame.drop_nulls().group_by(*by, maintain_order=True).agg(pl.col("real", "simulated").mean())
    return {tuple(key): _sides(real, simulated) for *key, real, simulated in means.iter_rows()}


def _absolute_error(jcts: pl.DataFrame) -> float:
    errors: list[float] = jcts.select((pl.col("simulated") / pl.col("real") - 1).abs()).to_series().to_list()
    return math.fsum(errors) / len(errors)


def _correlations(jcts: pl.DataFrame) -> dict[str, float]:
    """By run, for runs that have an order to compare."""
    spearman = pl.corr("real", "simulated", method="spearman").fill_nan(None).alias("correlation")
    found = jcts.group_by("run", maintain_order=True).agg(spearman).drop_nulls()
    return dict(found.iter_rows())


def _correlation(jcts: pl.DataFrame) -> Correlation:
    overall = _correlations(jcts.with_columns(run=pl.lit("overall"))).get("overall")
    within = list(_correlations(jcts).values())
    return Correlation(
        overall=overall,
        within_mean=math.fsum(within) / len(within) if within else None,
        within_least=min(within, default=None),
    )


def _order(run_jcts: pl.DataFrame) -> float | None:
    """Kendall's tau between the orders of the policies; None where there is no order to compare."""
    means = list(scores(run_jcts).values())
    if len(means) < 2:
        return None
    tau = float(stats.kendalltau(*zip(*means, strict=True)).statistic)
    return tau if math.isfinite(tau) else None


def _ratios(run_jcts: pl.DataFrame, policies: Sequence[str]) -> dict[str, Sides]:
    """Each policy over each one before it, where both ran the same set and seed."""
    runs = run_jcts.select("set", "seed", "policy", "real", "simulated")
    pairs = runs.join(runs, on=["set", "seed"], suffix="_baseline", maintain_order="left")
    ratios = [
        (pl.col(side) / pl.col(f"{side}_baseline")).log().mean().exp() for side in ("real", "simulated")
    ]
    means = pairs.group_by("policy", "policy_baseline", maintain_order=True).agg(*ratios)
    found = {
        (policy, baseline): _sides(real, simulated) for policy, baseline, real, simulated in means.iter_rows()
    }
    return {
        f"{policy}/{baseline}": found[policy, baseline]
        for baseline, policy in combinations(policies, 2)
        if (policy, baseline) in found
    }


def _applications(figures: pl.DataFrame, pairs: Sequence[Pair]) -> dict[str, dict[str, Sides]]:
    means = _means(figures, "application", "measure")
    step_means = _step_means(pairs)
    found: dict[str, dict[str, Sides]] = {}
    for application in sorted(set(figures["application"])):
        found[application] = {
            name: means[application, name] for name in JOB_MEASURES if (application, name) in means
        }
        if application in step_means:
            found[application]["step_s"] = step_means[application]
    return found


def _step_means(pairs: Sequence[Pair]) -> dict[str, Sides]:
    """Mean seconds per step, by application, over the configurations that both sides had, each weighted by
    the real seconds in it."""
    real = _steps([step for pair in pairs for step in pair.real_steps])
    simulated = _steps([step for pair in pairs for step in pair.simulated_steps])
    both = real.join(
        simulated, on=["application", "configuration"], suffix="_simulated", maintain_order="left"
    )
    weight = pl.col("weight_s")
    means = both.group_by("application", maintain_order=True).agg(
        *((pl.col(name) * weight).sum() / weight.sum() for name in ("step_s", "step_s_simulated"))
    )
    return {
        application: _sides(real_s, simulated_s) for application, real_s, simulated_s in means.iter_rows()
    }


def _per_run(pairs: Sequence[Pair], jcts: pl.DataFrame) -> tuple[RunComparison, ...]:
    means, correlations = _means(jcts, "run"), _correlations(jcts)
    return tuple(
        RunComparison(
            run=pair.run,
            set=pair.set,
            policy=pair.policy,
            seed=pair.seed,
            jobs=len(pair.real),
            mean_jct_s=means[pair.run,],
            rank_correlation=correlations.get(pair.run),
            real=mean_breakdown([job.parts for job in pair.real.values()]),
            simulated=mean_breakdown([job.parts for job in pair.simulated.values()]),
        )
        for pair in pairs
    )
