"""The exact search: compared with brute force on small inputs, and its invariants on all inputs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policies.placement import Board, Row, row_size
from services.scheduler.policies.pollux import utility
from services.scheduler.policies.search import Options, Solution, divide, solve
from tests.fixtures.policy_views import SEEDS


def random_utilities(rng: np.random.Generator, jobs: int, most: int) -> np.ndarray:
    """Utilities of several kinds: rising, concave, with jumps or ties; some counts are not allowed."""
    kind = rng.integers(4)
    steps = rng.random((jobs, most + 1))
    if kind == 1:
        steps = -np.sort(-steps, axis=1)
    if kind == 2:
        steps = np.round(steps)
    utility = np.cumsum(steps, axis=1) - steps[:, :1]
    if kind == 3:
        utility = -1.0 / (utility + 1e-3)
    utility[:, 1:][rng.random((jobs, most)) < 0.15] = -np.inf
    return utility


def random_jobs(rng: np.random.Generator, slots: list[int], count: int) -> list[Options]:
    """Random jobs. Some hold a row, and all these rows fit together."""
    board = Board(slots, one_spread_a_node=True)
    jobs = []
    for _ in range(count):
        most = int(rng.integers(1, sum(slots) + 1))
        together = random_utilities(rng, 1, most)[0]
        spread = together - rng.random(most + 1) * rng.integers(0, 2)
        spread[:2] = -np.inf
        present: Row = ()
        keep = -np.inf
        if rng.random() < 0.6:
            present = board.pack(int(rng.integers(1, most + 1))) or ()
            board.take(present)
            if present:
                keep = float(np.max(together[np.isfinite(together)])) * rng.choice([0.9, 1.0])
        jobs.append(Options(together=together, spread=spread, present=present, keep=keep))
    return jobs


def utility_of(job: Options, row: Row) -> float:
    if not row:
        return float(job.together[0])
    moved = float(job.together[row_size(row)] if len(row) == 1 else job.spread[row_size(row)])
    return max(moved, job.keep) if sorted(row) == sorted(job.present) else moved


def rows_of(job: Options, slots: list[int]) -> list[Row]:
    ways = itertools.product(*(range(free + 1) for free in slots))
    rows = [tuple((n, r) for n, r in enumerate(way) if r) for way in ways if sum(way) < len(job.together)]
    return [row for row in rows if utility_of(job, row) > -math.inf]


def best_by_brute_force(jobs: list[Options], slots: list[int]) -> float:
    def best(at: int, board: Board) -> float:
        if at == len(jobs):
            return 0.0
        reached = -math.inf
        for row in rows_of(jobs[at], slots):
            if board.fits(row):
                board.take(row)
                reached = max(reached, utility_of(jobs[at], row) + best(at + 1, board))
                board.give_back(row)
        return reached

    return best(0, Board(slots, one_spread_a_node=True))


def check(solution: Solution, jobs: list[Options], slots: list[int], one_spread_a_node: bool = True) -> None:
    board = Board(slots, one_spread_a_node=one_spread_a_node)
    for row in solution.rows:
        assert board.fits(row)
        board.take(row)
    total = sum(utility_of(job, row) for job, row in zip(jobs, solution.rows, strict=True))
    assert solution.value <= solution.bound
    # A row of several nodes is credited with no more than one node would give.
    assert total >= solution.value - 1e-9


@given(SEEDS, st.integers(1, 4), st.integers(0, 9), st.integers(1, 5))
def test_the_division_is_the_best_of_all_divisions(seed: int, jobs: int, slots: int, most: int) -> None:
    utility = random_utilities(np.random.default_rng(seed), jobs, most)
    counts, value = divide(utility, slots)
    assert counts.sum() <= slots
    assert value == pytest.approx(utility[np.arange(jobs), counts].sum())
    every = itertools.product(range(most + 1), repeat=jobs)
    best = max(utility[np.arange(jobs), way].sum() for way in map(list, every) if sum(way) <= slots)
    assert value == pytest.approx(best, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", [30, 137, 202, 327])
def test_huge_utilities_leave_every_job_a_count(seed: int) -> None:
    """At p = -4 a job without slots has a utility of -1e12, so rounding can put the bound below the value."""
    rng = np.random.default_rng(seed)
    jobs = int(rng.integers(1, 20))
    speedups = np.cumsum(rng.random((jobs, 9)), axis=1)
    speedups[:, 0] = 0.0
    slots = int(rng.integers(1, 12))
    counts, value = divide(utility(speedups, power=-4.0), slots)
    assert counts.sum() == slots
    assert (counts > 0).sum() == min(jobs, slots)
    assert np.isfinite(value)


@given(SEEDS)
def test_the_best_placement_lies_between_value_and_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.integers(1, 4, size=int(rng.integers(1, 4))).tolist()
    jobs = random_jobs(rng, slots, int(rng.integers(1, 4)))
    solution = solve(jobs, slots)
    check(solution, jobs, slots)
    best = best_by_brute_force(jobs, slots)
    assert solution.value <= best + 1e-9
    assert best <= solution.bound + 1e-9


def test_the_search_nearly_always_finds_the_best_placement() -> None:
    found = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        slots = rng.integers(1, 4, size=3).tolist()
        jobs = random_jobs(rng, slots, 3)
        found += solve(jobs, slots).value >= best_by_brute_force(jobs, slots) - 1e-9
    assert found >= 190


@given(SEEDS, st.booleans())
def test_a_solution_keeps_capacity_and_interference_on_larger_clusters(seed: int, avoid: bool) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, 7, size=int(rng.integers(1, 9))).tolist()
    jobs = random_jobs(rng, slots, int(rng.integers(1, 12))) if sum(slots) else []
    solution = solve(jobs, slots, one_spread_a_node=avoid)
    check(solution, jobs, slots, avoid)


@given(SEEDS)
def test_one_more_node_never_lowers_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = [4] * int(rng.integers(1, 6))
    jobs = random_jobs(rng, slots, int(rng.integers(1, 8)))
    assert solve(jobs, [*slots, 4]).bound >= solve(jobs, slots).bound - 1e-9


def concave(most: int, scale: float) -> Options:
    utility = -1.0 / (scale * np.arange(most + 1) ** 0.8 + 1e-3)
    spread = utility - 0.05
    spread[:2] = -np.inf
    return Options(together=utility, spread=spread)


def test_on_ties_earlier_jobs_get_more() -> None:
    solution = solve([concave(4, 1.0) for _ in range(3)], [4])
    assert [row_size(row) for row in solution.rows] == [2, 1, 1]
    starved = solve([concave(4, 1.0) for _ in range(6)], [4])
    assert [row_size(row) for row in starved.rows] == [1, 1, 1, 1, 0, 0]


def test_a_slot_that_gains_nothing_stays_free() -> None:
    flat = Options(together=np.array([0.0, 1.0, 1.0]), spread=np.array([-np.inf, -np.inf, 1.0]))
    assert row_size(solve([flat], [4]).rows[0]) == 1


def test_a_job_with_the_best_placement_stays() -> None:
    job = concave(4, 1.0)
    kept = Options(
        together=job.together - 0.1, spread=job.spread, present=((1, 4),), keep=float(job.together[4])
    )
    assert solve([kept], [4, 4]).rows[0] is kept.present


def test_a_small_job_moves_if_a_large_one_gains_more() -> None:
    # Two free slots on each node: the newcomer needs four on one, its only allowed size.
    small = [
        Options(
            together=np.array([-10.0, -1.0, -0.2]),
            spread=np.full(3, -np.inf),
            present=((node, 2),),
            keep=-0.1,
        )
        for node in (0, 1)
    ]
    large = Options(together=np.array([-10.0, *[-np.inf] * 3, -1.0]), spread=np.full(5, -np.inf))
    solution = solve([*small, large], [4, 4])
    assert [row_size(row) for row in solution.rows] == [2, 2, 4]
    assert solution.value == pytest.approx(-0.1 - 0.2 - 1.0)


def test_a_few_large_jobs_that_cannot_share_nodes_get_whole_ones() -> None:
    """A division that ignores nodes would give some jobs parts of nodes, and no other job could use the
    rest."""
    counts = np.arange(33)
    jobs = []
    for weight in (3.0, 5.0, 3.0, 5.0):
        utility = -weight / (1e-3 + counts**0.9)
        jobs.append(Options(together=np.where(counts <= 4, utility, -np.inf), spread=utility))
    divided, _ = divide(np.stack([job.spread for job in jobs]), 32)
    assert np.any(divided % 4 > 0)
    assert [row_size(row) for row in solve(jobs, [4] * 8).rows] == [8, 8, 8, 8]


def test_no_jobs_and_no_slots_give_an_empty_solution() -> None:
    assert solve([], [4]).rows == ()
    assert solve([concave(4, 1.0)], []).rows == ((),)
    assert solve([concave(4, 1.0)], [0, 0]).rows == ((),)


def test_many_jobs_nearly_reach_the_bound() -> None:
    rng = np.random.default_rng(2)
    jobs = [concave(int(rng.integers(2, 17)), float(rng.uniform(0.1, 1.0))) for _ in range(200)]
    solution = solve(jobs, [4] * 100)
    assert solution.bound / solution.value >= 0.99
