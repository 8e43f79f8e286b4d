"""A sensitivity study: how mean completion times change when one thing is varied. Pure.

Every run is compared by two ratios of mean completion times, taken within the same workload and seed: to the
baseline policy at the same point, and to the same policy at the default point.
"""

import statistics
from collections.abc import Mapping, Sequence

import msgspec
import polars as pl

from common.types import Struct

CELL = ["sweep", "point", "policy"]
BLOCK = ["workload", "seed"]
"""Columns that two compared runs share."""


class SweepOutcome(Struct, frozen=True):
    """One run. `mean_jct_s` is None if not all of its jobs completed; `why` then gives the reason."""

    sweep: str
    point: str
    policy: str
    workload: str
    seed: int
    mean_jct_s: float | None
    why: str = ""


class Axis(Struct, frozen=True):
    """A sweep with its points and policies in order; `default` is one of the points."""

    name: str
    title: str
    points: tuple[str, ...]
    default: str
    policies: tuple[str, ...]


class RatioSpread(Struct, frozen=True):
    """Ratios over `runs` pairs of workload and seed: their geometric mean and their range."""

    mean: float
    least: float
    most: float
    runs: int


class Cell(Struct, frozen=True):
    """A policy at a point. A ratio is None if no workload and seed has both runs."""

    mean_jct_s: float | None
    over_baseline: RatioSpread | None
    over_default: RatioSpread | None


class SweepTable(Struct, frozen=True):
    title: str
    default: str
    points: dict[str, dict[str, Cell]]
    """By point and policy."""


class Study(Struct, frozen=True):
    """The content of `sensitivity-<world>.json`."""

    world: str
    version: str
    baseline: str
    workloads: tuple[str, ...]
    seeds: tuple[int, ...]
    sweeps: dict[str, SweepTable]
    left_out: dict[str, str]
    """Sweeps and runs without a figure, and why."""


def study(
    world: str,
    version: str,
    baseline: str,
    axes: Sequence[Axis],
    outcomes: Sequence[SweepOutcome],
    left_out: Mapping[str, str],
) -> Study:
    """`left_out` names what was not run; runs without a mean completion time join it."""
    failed = {
        f"{run.sweep} {run.point}, {run.policy} on {run.workload}, seed {run.seed}": run.why
        for run in outcomes
        if run.mean_jct_s is None
    }
    cells = _cells(axes, outcomes, baseline)
    empty = Cell(mean_jct_s=None, over_baseline=None, over_default=None)
    return Study(
        world=world,
        version=version,
        baseline=baseline,
        workloads=tuple(dict.fromkeys(run.workload for run in outcomes)),
        seeds=tuple(sorted({run.seed for run in outcomes})),
        sweeps={
            axis.name: SweepTable(
                title=axis.title,
                default=axis.default,
                points={
                    point: {policy: cells.get((axis.name, point, policy), empty) for policy in axis.policies}
                    for point in axis.points
                },
            )
            for axis in axes
        },
        left_out={**left_out, **failed},
    )


def encoded(found: Study) -> str:
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


def _cells(
    axes: Sequence[Axis], outcomes: Sequence[SweepOutcome], baseline: str
) -> dict[tuple[str, str, str], Cell]:
    """By sweep, point and policy."""
    rows = [
        (run.sweep, run.point, run.policy, run.workload, run.seed, run.mean_jct_s)
        for run in outcomes
        if run.mean_jct_s is not None
    ]
    text = dict.fromkeys([*CELL, "workload"], pl.String)
    runs = pl.DataFrame(rows, schema={**text, "seed": pl.Int64, "jct_s": pl.Float64}, orient="row")
    defaults = pl.DataFrame(
        [(axis.name, axis.default) for axis in axes],
        schema={"sweep": pl.String, "point": pl.String},
        orient="row",
    )
    runs = runs.unique([*CELL, *BLOCK], keep="last", maintain_order=True)
    at_baseline = runs.filter(pl.col("policy") == baseline).drop("policy")
    at_default = runs.join(defaults, on=["sweep", "point"], how="semi").drop("point")
    compared = runs.join(
        at_baseline, on=["sweep", "point", *BLOCK], how="left", suffix="_of_baseline", maintain_order="left"
    ).join(
        at_default, on=["sweep", "policy", *BLOCK], how="left", suffix="_at_default", maintain_order="left"
    )
    grouped = compared.group_by(CELL, maintain_order=True).agg(
        pl.col("jct_s"),
        _ratios("jct_s_of_baseline"),
        _ratios("jct_s_at_default"),
    )
    return {
        (sweep, point, policy): Cell(statistics.fmean(jcts_s), _spread(over_baseline), _spread(over_default))
        for sweep, point, policy, jcts_s, over_baseline, over_default in grouped.iter_rows()
    }


def _ratios(reference: str) -> pl.Expr:
    """Each run's time over its reference; without runs that have none, or one of 0 seconds."""
    ratio = (pl.col("jct_s") / pl.col(reference)).filter(pl.col(reference) > 0)
    return ratio.alias(f"over_{reference}")


def _spread(ratios: Sequence[float]) -> RatioSpread | None:
    if not ratios:
        return None
    return RatioSpread(statistics.geometric_mean(ratios), min(ratios), max(ratios), len(ratios))
