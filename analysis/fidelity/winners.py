"""Who wins, really and in simulation, paired by seed. Pure.

The rule, the same on both sides: of the (set, seed) that every compared policy has on both sides, the winner
is the policy with the least geometric mean of the runs' mean completion times. Other seeds do not count,
since a policy that lacks a hard one would win by that; and in a geometric mean every seed counts alike,
however long it lasts.

Whether reality itself tells two policies apart is judged by the mean log ratio over these seeds, with
Student's 95% interval: it reaches 95% with few seeds too, where a bootstrap cannot, if log ratios are about
normal. That the winner was picked by the same runs is not accounted for: it favours the winner a little.
"""

import math
from collections.abc import Mapping

import numpy as np
from scipy import stats

from common.types import Struct

LEVEL = 0.95
RULE = (
    "The winner of a set is the policy with the least geometric mean of the runs' mean completion times, "
    "really and in simulation alike, over the seeds that all compared policies have. Margins are geometric "
    f"means of ratios paired by seed, with Student's {LEVEL:.0%} interval of their logarithms."
)

Times = Mapping[str, Mapping[tuple[str, int], tuple[float, float]]]
"""By policy and (set, seed): mean completion time of the run, real and simulated, seconds."""


class Margin(Struct, frozen=True):
    """Geometric mean of a ratio of real times over the seeds; bounds are None of a single seed."""

    ratio: float
    low: float | None
    high: float | None

    @property
    def could_be_noise(self) -> bool | None:
        """Whether the interval contains 1; None where there is none."""
        return None if self.low is None or self.high is None else self.low <= 1.0 <= self.high


class Winner(Struct, frozen=True):
    """The winner of a set on each side, by the rule above.

    `apart`: by how much the simulator's winner was really behind the real one. `seeds_for_real`: in how many
    of the `seeds` it was. `could_be_noise`: whether reality cannot tell these two apart; None where they are
    the same, or there is but one seed.

    `margin`: real time of the `runner_up`, the second in reality, over that of the real winner;
    `margin_noise`: whether its interval contains 1, so that reality itself does not tell who wins; None with
    but one seed."""

    real: str
    simulated: str
    agree: bool
    apart: float
    seeds: int
    seeds_for_real: int
    could_be_noise: bool | None
    runner_up: str
    margin: float
    margin_low: float | None
    margin_high: float | None
    margin_noise: bool | None


def common(times_s: Times) -> list[tuple[str, int]]:
    """The (set, seed) that every policy has."""
    if not times_s:
        return []
    return sorted(set.intersection(*(set(of_policy) for of_policy in times_s.values())))


def scores(times_s: Times) -> dict[str, tuple[float, float]]:
    """By policy the geometric means, real and simulated, over what all have in common; empty without any."""
    keys = common(times_s)
    if not keys:
        return {}
    found = {}
    for policy, of_policy in times_s.items():
        real, simulated = np.exp(np.mean(np.log([of_policy[key] for key in keys]), axis=0)).tolist()
        found[policy] = (real, simulated)
    return found


def winner(times_s: Times) -> Winner | None:
    """Of one set; None of fewer than two policies, or without a seed that all of them have."""
    means = scores(times_s)
    if len(means) < 2:
        return None
    real, runner_up, *_ = sorted(means, key=lambda policy: means[policy][0])
    simulated = min(means, key=lambda policy: means[policy][1])
    keys = common(times_s)
    behind, margin = _margin(times_s, simulated, real), _margin(times_s, runner_up, real)
    return Winner(
        real=real,
        simulated=simulated,
        agree=real == simulated,
        apart=behind.ratio - 1,
        seeds=len(keys),
        seeds_for_real=sum(times_s[simulated][key][0] > times_s[real][key][0] for key in keys),
        could_be_noise=None if real == simulated else behind.could_be_noise,
        runner_up=runner_up,
        margin=margin.ratio,
        margin_low=margin.low,
        margin_high=margin.high,
        margin_noise=margin.could_be_noise,
    )


def _margin(times_s: Times, one: str, other: str) -> Margin:
    logs = np.log([times_s[one][key][0] / times_s[other][key][0] for key in common(times_s)])
    mean = float(logs.mean())
    if len(logs) < 2:
        return Margin(math.exp(mean), None, None)
    bound = float(stats.t.ppf((1 + LEVEL) / 2, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    return Margin(math.exp(mean), math.exp(mean - bound), math.exp(mean + bound))
