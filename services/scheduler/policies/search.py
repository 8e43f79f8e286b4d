"""The exact search: divide slots among jobs, then place them, and bound how good the result can be.

It maximises the sum of the jobs' utilities. A job's utility depends on its number of replicas, on whether
they share one node, and on whether the job keeps its present placement. Any objective that is a sum over jobs
has this form, such as Pollux's power mean of speedups (section 4.2, eq. 14).

1. *Divide.* Ignoring nodes, this is a knapsack over slots with one choice per job. Dynamic programming solves
   it exactly. Its value is an upper bound of what any placement can reach.
2. *Place.* First the jobs that keep their placement; then jobs that must span nodes, largest first, on the
   freest nodes; then the others, largest first, on the tightest node that holds them.
3. *Improve.* If placing lost value, take out a job that lost some, alone or with one other, and put them back
   in the best way. Repeat until that no longer helps or the bound is reached. If much is still lost, start
   again from a division in which jobs that span nodes get whole nodes, and keep the better result.

Everything is deterministic. On ties, jobs that come first in `jobs` get more.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np
import numpy.typing as npt

from common.goodput.model import FloatArray, IntArray
from services.scheduler.policies.placement import Board, BoardView, Row, row_size

MIN_TRIALS, TRIALS_A_JOB = 1500, 3
"""At most so many groups of jobs are taken out. A limit of work, not of time, keeps the search
deterministic."""
TOLERANCE = 1e-12
MAX_PRICES = 30
"""Prices per slot that are tried before dropping counts. Trying more would drop only a few more counts."""
WIDE_GAP = 0.002
"""If value and bound differ by more, relative to the bound, a division into whole nodes is tried too."""


@dataclass(frozen=True, eq=False)
class Options:
    """What one job may get, and the utility of each option; -inf where it is not allowed.

    together: [K + 1] utility of 0..K replicas that share a node; entry 0, no slots, is finite
    spread:   [K + 1] utility of 0..K replicas over several nodes, capped at `together`
    present:  its present row; empty if it has none, or one that cannot be kept
    keep:     utility of the present row, at least that of moving to a row of the same kind
    """

    together: FloatArray
    spread: FloatArray
    present: Row = ()
    keep: float = -np.inf


@dataclass(frozen=True)
class Solution:
    """`rows` is in the order of the jobs; `value` <= `bound` are sums of utilities."""

    rows: tuple[Row, ...]
    value: float
    bound: float


def solve(jobs: Sequence[Options], slots: Sequence[int], *, one_spread_a_node: bool = True) -> Solution:
    """Divide `slots` (free slots of every node) among `jobs`."""
    if not jobs:
        return Solution(rows=(), value=0.0, bound=0.0)
    return _Search(jobs, slots, one_spread_a_node).run()


def divide(utility: FloatArray, slots: int) -> tuple[IntArray, float]:
    """Counts [jobs] with sum <= slots that maximise the sum of utility[j, counts[j]], and that sum.

    utility: [jobs, K + 1], -inf where not allowed, column 0 finite. The result is exact: a Lagrangian bound
    drops only counts that no optimum can contain, and dynamic programming searches the rest.
    """
    allowed = _undominated(utility, slots)
    choices = [np.flatnonzero(row) for row in allowed]
    counts = np.array([choice[0] for choice in choices], dtype=np.int64)
    left = slots - int(counts.sum())
    open_jobs = [j for j, choice in enumerate(choices) if len(choice) > 1]
    # Giving more to a later job has to be better by more than rounding: ties go to earlier jobs.
    tolerance = TOLERANCE * (1.0 + float(np.abs(utility[:, 0]).sum()))
    best = np.zeros(left + 1)
    taken = np.zeros((len(open_jobs), left + 1), dtype=np.int16)
    for i, j in enumerate(open_jobs):
        utilities = utility[j, choices[j]]
        previous, best = best, best + utilities[0]
        for option in range(1, len(choices[j])):
            extra = int(choices[j][option] - choices[j][0])
            if extra > left:
                break
            candidate = previous[: left + 1 - extra] + utilities[option]
            better = candidate > best[extra:] + tolerance
            best[extra:][better] = candidate[better]
            taken[i, extra:][better] = option
    at = left
    for i in range(len(open_jobs) - 1, -1, -1):
        choice = choices[open_jobs[i]]
        count = choice[taken[i, at]]
        at -= int(count - choice[0])
        counts[open_jobs[i]] = count
    return counts, float(utility[np.arange(len(counts)), counts].sum())


def _undominated(utility: FloatArray, slots: int) -> npt.NDArray[np.bool_]:
    """[jobs, K + 1]: which counts may be part of an optimum. At a price per slot, these are the counts whose
    net utility is below the job's best by at most the gap between the Lagrangian bound and the value of a
    feasible division."""
    counts = np.arange(utility.shape[1])
    rows = np.arange(len(utility))

    def at(price: float) -> tuple[FloatArray, IntArray, float, int]:
        net = utility - price * counts
        chosen = net.argmax(axis=1)
        return net, chosen, float(utility[rows, chosen].sum()), int(chosen.sum())

    price = 0.0
    net, chosen, value, used = at(price)
    feasible = value
    if used > slots:
        # Each division gives a line in the price that is a lower limit of the bound. The next price is where
        # two lines cross: that of the best division found so far that fits, and that of one that does not.
        too_much, fits = (value, used), (float(utility[:, 0].sum()), 0)
        for _ in range(MAX_PRICES):
            price = (too_much[0] - fits[0]) / (too_much[1] - fits[1])
            net, chosen, value, used = at(price)
            line = fits[0] - price * fits[1]
            if value - price * used <= line + TOLERANCE * (1.0 + abs(line)):
                break
            if used > slots:
                too_much = value, used
            else:
                fits = value, used
                if used == slots:
                    break
        feasible = fits[0] if used > slots else max(fits[0], value)
    best = net[rows, chosen]
    bound = float(best.sum()) + price * slots
    # With huge utilities, rounding may put the bound below the value that it bounds.
    slack = max(bound - feasible, 0.0) + TOLERANCE * (1.0 + abs(bound))
    return net >= best[:, None] - slack


class _Search:
    def __init__(self, jobs: Sequence[Options], slots: Sequence[int], one_spread_a_node: bool) -> None:
        self.jobs = jobs
        self.slots = sum(slots)
        self.one_spread_a_node = one_spread_a_node
        self.most_on_a_node = max(slots, default=0)
        self.board = Board(slots, one_spread_a_node=one_spread_a_node)
        width = max(len(job.together) for job in jobs)
        together, spread = np.full((len(jobs), width), -np.inf), np.full((len(jobs), width), -np.inf)
        for j, job in enumerate(jobs):
            together[j, : len(job.together)] = job.together
            spread[j, : len(job.spread)] = job.spread
        fits_one = self.most_on_a_node + 1
        spread[:, :fits_one] = np.minimum(spread[:, :fits_one], together[:, :fits_one])
        together[:, fits_one:] = -np.inf
        self.upper = np.maximum(together, spread)
        self.keep = [job.keep for job in jobs]
        self.present_size = [row_size(job.present) for job in jobs]
        for j, job in enumerate(jobs):
            if job.present:
                size = self.present_size[j]
                alike = together if len(job.present) == 1 else spread
                self.keep[j] = max(job.keep, float(alike[j, size]))
                self.upper[j, size] = max(self.upper[j, size], self.keep[j])
        self.utilities = together, spread
        self.rows: list[Row] = [()] * len(jobs)
        self.values: list[float] = together[:, 0].tolist()
        self.most = width - 1
        self.trials_left = max(MIN_TRIALS, TRIALS_A_JOB * len(jobs))

    # Looking up single elements is faster in lists than in arrays. Many rounds look up none at all, so the
    # lists are made on demand.

    @cached_property
    def together(self) -> list[list[float]]:
        lists: list[list[float]] = self.utilities[0].tolist()
        return lists

    @cached_property
    def spread(self) -> list[list[float]]:
        lists: list[list[float]] = self.utilities[1].tolist()
        return lists

    @cached_property
    def best_together(self) -> list[list[int]]:
        return _running_best(self.utilities[0])

    @cached_property
    def best_spread(self) -> list[list[int]]:
        return _running_best(self.utilities[1])

    def run(self) -> Solution:
        counts, bound = divide(self.upper, self.slots)
        self.attempt(self.upper, counts, bound)
        rows, value = self.rows, math.fsum(self.values)
        if self.one_spread_a_node and value < bound - WIDE_GAP * abs(bound):
            whole = self.whole_nodes()
            self.clear()
            self.attempt(whole, divide(whole, self.slots)[0], bound)
            if math.fsum(self.values) > value:
                rows, value = self.rows, math.fsum(self.values)
        return Solution(rows=tuple(rows), value=value, bound=max(bound, value))

    def attempt(self, utility: FloatArray, counts: IntArray, bound: float) -> None:
        aims = utility[np.arange(len(counts)), counts].tolist()
        self.place(counts.tolist(), aims)
        self.improve(counts.tolist(), aims, bound)

    def whole_nodes(self) -> FloatArray:
        """Utilities [jobs, K + 1] without the counts that span nodes and use only a part of the last one.
        Jobs that span nodes cannot share a node, so such counts may leave slots unused."""
        most = max(self.most_on_a_node, 1)
        together, spread = self.utilities
        spread = spread.copy()
        spread[:, np.arange(spread.shape[1]) % most > 0] = -np.inf
        utility: FloatArray = np.maximum(together, spread)
        for j, job in enumerate(self.jobs):
            if job.present and (len(job.present) == 1 or self.present_size[j] % most == 0):
                utility[j, self.present_size[j]] = max(utility[j, self.present_size[j]], self.keep[j])
        return utility

    def clear(self) -> None:
        for row in self.rows:
            self.board.give_back(row)
        self.rows = [()] * len(self.jobs)
        self.values = [together[0] for together in self.together]

    def place(self, counts: list[int], aims: list[float]) -> None:
        """Give each job a row for its count, with the utility it aims at if there is room."""
        movers = []
        for j, (job, count) in enumerate(zip(self.jobs, counts, strict=True)):
            if count == 0:
                continue
            if self.present_size[j] == count and self.keep[j] >= aims[j] and self.board.fits(job.present):
                self.put(j, job.present, self.keep[j])
            else:
                movers.append(j)
        # Jobs that have to span nodes need whole nodes, so they go first.
        movers.sort(key=lambda j: (self.together[j][counts[j]] > -math.inf, -counts[j]))
        for j in movers:
            self.insert(j, counts[j])

    def improve(self, counts: list[int], aims: list[float], bound: float) -> None:
        """Take out jobs whose utility is below their aim, alone or with a partner, while that raises the
        sum."""
        tolerance = TOLERANCE * (1.0 + abs(bound))
        if self.is_done(bound, tolerance):
            return
        elsewhere = [self.anywhere(j, counts[j]) for j in range(len(counts))]
        helped = True
        while helped and not self.is_done(bound, tolerance):
            helped = False
            losers = [j for j, aim in enumerate(aims) if self.values[j] < aim - tolerance]
            for loser in sorted(losers, key=lambda j: self.values[j] - aims[j]):
                gain = aims[loser] - self.values[loser]
                for group in self.groups(loser, gain, elsewhere):
                    if self.reinsert(group, counts, tolerance):
                        helped = True
                        break
        for j in range(len(self.jobs)):
            if self.is_done(bound, tolerance):
                break
            self.reinsert((j,), None, tolerance)

    def is_done(self, bound: float, tolerance: float) -> bool:
        return self.trials_left == 0 or math.fsum(self.values) >= bound - tolerance

    def anywhere(self, j: int, most: int) -> float:
        """The best utility of job j with at most `most` replicas if it moves, given enough room."""
        alone, apart = self.best_together[j][most], self.best_spread[j][most]
        return float(max(self.together[j][alone], self.spread[j][apart]))

    def groups(self, loser: int, gain: float, elsewhere: list[float]) -> Iterable[tuple[int, ...]]:
        """The loser alone, then with each placed job that may lose less by moving than the loser can gain;
        the cheapest first."""
        yield (loser,)
        costs = [(self.values[j] - elsewhere[j], j) for j, row in enumerate(self.rows) if row and j != loser]
        for _, j in sorted(partner for partner in costs if partner[0] < gain):
            yield loser, j

    def reinsert(self, group: tuple[int, ...], counts: list[int] | None, tolerance: float) -> bool:
        """Take the group out and put it back in the best order; True if that raises the sum."""
        if self.trials_left == 0:
            return False
        self.trials_left -= 1
        most = [counts[j] if counts else self.most for j in group]
        before = [(j, self.rows[j], self.values[j]) for j in group]
        best, best_value = before, sum([value for _, _, value in before]) + tolerance
        # For most groups a bound shows, without moving anything, that they cannot improve.
        after = self.board.without([row for _, row, _ in before])
        if sum([self.at_most(j, count, after) for j, count in zip(group, most, strict=True)]) <= best_value:
            return False
        for j in group:
            self.remove(j)
        for order in permutations(zip(group, most, strict=True)):
            for j, count in order[:-1]:
                self.insert(j, count)
            last, count = order[-1]
            value = sum([self.values[j] for j, _ in order[:-1]]) + self.at_most(last, count, self.board)
            if value > best_value:
                self.insert(last, count)
                best, best_value = [(j, self.rows[j], self.values[j]) for j in group], value
            for j in group:
                if self.rows[j]:
                    self.remove(j)
        for j, row, value in best:
            self.put(j, row, value)
        return best is not before

    def at_most(self, j: int, most: int, board: Board | BoardView) -> float:
        """The utility that `insert` would reach for job j on this board."""
        alone = self.best_together[j][min(board.largest_free, most)]
        apart = self.best_spread[j][min(board.spread_free, most)]
        value: float = max(self.together[j][alone], self.spread[j][apart])
        if self.keep[j] > value and self.present_size[j] <= most and board.fits(self.jobs[j].present):
            return self.keep[j]
        return value

    def insert(self, j: int, most: int) -> None:
        """Put job j, which has no slots, where its utility is highest, with at most `most` replicas."""
        job, board = self.jobs[j], self.board
        alone = self.best_together[j][min(board.largest_free, most)]
        apart = self.best_spread[j][min(board.spread_free, most)]
        row: Row | None
        if self.together[j][alone] >= self.spread[j][apart]:
            row, value = (board.together(alone, job.present) if alone else ()), self.together[j][alone]
        else:
            row, value = board.spread(apart, job.present), self.spread[j][apart]
        stays = job.present and self.present_size[j] <= most and self.keep[j] >= value
        if stays and board.fits(job.present):
            row, value = job.present, self.keep[j]
        assert row is not None, "the board has room for what it offers"
        self.put(j, row, value)

    def put(self, j: int, row: Row, value: float) -> None:
        self.board.take(row)
        self.rows[j], self.values[j] = row, value

    def remove(self, j: int) -> None:
        self.board.give_back(self.rows[j])
        self.rows[j], self.values[j] = (), self.together[j][0]


def _running_best(utility: FloatArray) -> list[list[int]]:
    """[jobs, K + 1]: the count of the highest utility among 0..k; the smallest on ties."""
    best = np.maximum.accumulate(utility, axis=1)
    rises = np.ones(utility.shape, dtype=bool)
    rises[:, 1:] = best[:, 1:] > best[:, :-1]
    counts: list[list[int]] = np.maximum.accumulate(
        np.where(rises, np.arange(utility.shape[1]), 0), axis=1
    ).tolist()
    return counts
