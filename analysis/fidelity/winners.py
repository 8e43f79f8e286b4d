"""Which policy wins a set, in reality and in simulation. Pure.

The rule is the same on both sides. Over the (set, seed) that all compared policies have, the winner is the
policy with the smallest geometric mean of the runs' mean completion times. Other seeds do not count: a policy
that lacks a hard seed would win by lacking it. In a geometric mean every seed counts the same, however long
its runs are.

`analysis.compare.intervals` decides whether reality itself separates two policies. It does not account for
the fact that the same runs picked the winner, which favors the winner a little.

The tables of times have one row per run: set, policy, seed, real and simulated (mean completion time, s).
"""

import math
from typing import NamedTuple

import polars as pl

from analysis.compare.intervals import ENOUGH_PAIRS, LEVEL, Bounds, bounds_of_mean, outcome
from common.types import Struct

RULE = (
    "The winner of a set is the policy with the smallest geometric mean of the runs' mean completion times, "
    "over the seeds that all compared policies have, both in reality and in simulation. A margin is the "
    f"geometric mean of real ratios paired by seed, with its {LEVEL:.0%} bootstrap interval [ ], or with the "
    f"range ( ) of fewer than {ENOUGH_PAIRS} seeds. Reality is inconclusive about two policies if the "
    "interval contains 1 or there is none."
)


class Winner(Struct, frozen=True):
    """The winner of a set on each side."""

    real: str
    simulated: str
    agree: bool
    apart: float
    """By how much the simulator's winner was behind the real winner in reality: ratio - 1."""
    seeds: int
    seeds_for_real: int
    """The number of seeds in which the simulator's winner was really behind the real winner."""
    could_be_noise: bool | None
    """Whether reality is inconclusive about these two; None if they are the same policy."""
    runner_up: str
    """The second policy in reality."""
    margin: float
    """Real time of the runner-up / real time of the winner."""
    margin_low: float | None
    margin_high: float | None
    margin_bounds: str | None
    """What `margin_low` and `margin_high` are: "interval" or "range"; all three are None for one seed."""
    margin_noise: bool
    """Whether reality is inconclusive about the winner and the runner-up."""


def scores(times: pl.DataFrame) -> dict[str, tuple[float, float]]:
    """The geometric means by policy, real and simulated; empty if the policies have no seed in common."""
    means = pl.col("real", "simulated").log().mean().exp()
    found = _common(times).group_by("policy", maintain_order=True).agg(means)
    return {policy: (real, simulated) for policy, real, simulated in found.iter_rows()}


def winner(times: pl.DataFrame) -> Winner | None:
    """The winner of one set; None for fewer than two policies, or if they have no seed in common."""
    means = scores(times)
    if len(means) < 2:
        return None
    real, runner_up, *_ = sorted(means, key=lambda policy: means[policy][0])
    simulated = min(means, key=lambda policy: means[policy][1])
    margin, behind = _margin(times, runner_up, real), _margin(times, simulated, real)
    low, high, kind = margin.bounds or (None, None, None)
    return Winner(
        real=real,
        simulated=simulated,
        agree=real == simulated,
        apart=behind.ratio - 1,
        seeds=len(behind.log_ratios),
        seeds_for_real=sum(log_ratio > 0 for log_ratio in behind.log_ratios),
        could_be_noise=None if real == simulated else behind.inconclusive,
        runner_up=runner_up,
        margin=margin.ratio,
        margin_low=low,
        margin_high=high,
        margin_bounds=kind,
        margin_noise=margin.inconclusive,
    )


class _Margin(NamedTuple):
    ratio: float
    bounds: Bounds | None
    inconclusive: bool
    log_ratios: list[float]


def _margin(times: pl.DataFrame, policy: str, best: str) -> _Margin:
    """Real times of `policy` / real times of `best`, over the seeds of one set that all policies have."""
    common = _common(times)
    own, other = (common.filter(pl.col("policy") == name) for name in (policy, best))
    pairs = own.join(other, on=["set", "seed"], suffix="_best", maintain_order="left")
    log_ratios = pairs.select((pl.col("real") / pl.col("real_best")).log()).to_series().to_list()
    bounds = bounds_of_mean([log_ratios])
    return _Margin(
        ratio=math.exp(sum(log_ratios) / len(log_ratios)),
        bounds=bounds and Bounds(math.exp(bounds.low), math.exp(bounds.high), bounds.kind),
        inconclusive=outcome(bounds, neutral=0.0, less_is_better=True) == "inconclusive",
        log_ratios=log_ratios,
    )


def _common(times: pl.DataFrame) -> pl.DataFrame:
    """The rows of each (set, seed) that every policy has."""
    return times.filter(pl.col("policy").n_unique().over("set", "seed") == times["policy"].n_unique())
