"""The board of free slots, and the conversion between rows and allocations."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policies.placement import (
    Board,
    Row,
    describe,
    keep_or_take_freest,
    number_nodes,
    to_allocation,
    to_row,
)
from tests.fixtures.policy_views import at, nodes


def test_a_job_goes_to_the_tightest_node_that_holds_it() -> None:
    assert Board([4, 2, 3]).pack(2) == ((1, 2),)
    assert Board([4, 3, 3]).pack(2) == ((1, 2),)


def test_a_job_stays_on_its_node_when_it_grows_or_shrinks_there() -> None:
    assert Board([2, 4]).pack(2, present=((1, 3),)) == ((1, 2),)
    assert Board([2, 4]).pack(4, present=((1, 1),)) == ((1, 4),)


def test_a_job_too_large_for_any_node_takes_all_of_the_freest_and_the_tightest_for_the_rest() -> None:
    assert Board([2, 4, 3, 1]).pack(5) == ((1, 4), (3, 1))
    assert Board([2, 4, 3, 1]).pack(6) == ((1, 4), (0, 2))


def test_among_equally_free_nodes_the_ones_the_job_is_on_come_first() -> None:
    assert Board([3, 3, 3]).pack(6, present=((2, 2),)) == ((2, 3), (0, 3))


def test_a_job_that_does_not_fit_is_not_placed() -> None:
    assert Board([2, 1]).pack(4) is None
    assert Board([]).pack(1) is None


def test_taking_and_giving_back_leaves_the_board_as_it_was() -> None:
    board = Board([3, 3, 3], one_spread_a_node=True)
    rng = random.Random(5)
    taken = []
    for _ in range(200):
        if taken and rng.random() < 0.5:
            board.give_back(taken.pop(rng.randrange(len(taken))))
        else:
            row = board.pack(rng.randint(1, 6))
            if row:
                assert board.fits(row)
                board.take(row)
                taken.append(row)
        assert min(board.free) >= 0
        assert board.largest_free == max(board.free)
    for row in taken:
        board.give_back(row)
    assert board.free == [3, 3, 3]
    assert board.spread_free == 9


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_a_view_predicts_what_giving_rows_back_would_free(seed: int, avoid: bool) -> None:
    rng = random.Random(seed)
    board = Board([rng.randint(1, 4) for _ in range(rng.randint(1, 5))], one_spread_a_node=avoid)
    taken: list[Row] = []
    for _ in range(6):
        row = board.pack(rng.randint(1, 6))
        if row:
            board.take(row)
            taken.append(row)
    given_back = rng.sample(taken, min(len(taken), 2))
    numbers = range(len(board.free))
    wanted: list[Row] = [tuple((n, rng.randint(1, 3)) for n in rng.sample(numbers, k)) for k in numbers]
    without = board.without(given_back)
    predicted = without.largest_free, without.spread_free, [without.fits(row) for row in wanted]
    for row in given_back:
        board.give_back(row)
    assert predicted == (board.largest_free, board.spread_free, [board.fits(row) for row in wanted])


def test_jobs_whose_count_is_unchanged_stay_and_the_others_take_the_freest_nodes() -> None:
    present = [at((1, 2)), at((2, 1)), (), ()]
    placed = keep_or_take_freest([2, 3, 4, 1], present, nodes(4, 4, 4), order=[3, 1, 2, 0])
    assert placed == [at((1, 2)), at((3, 3)), at((2, 3), (1, 1)), at((2, 1))]


def test_two_jobs_that_span_nodes_share_none_where_interference_is_avoided() -> None:
    board = Board([3, 3, 3], one_spread_a_node=True)
    board.take(((0, 2), (1, 2)))
    assert not board.fits(((1, 1), (2, 1)))
    assert board.fits(((1, 1),))
    assert board.spread_free == 3
    assert board.spread(4) is None
    sharing = Board([3, 3, 3])
    sharing.take(((0, 2), (1, 2)))
    assert sharing.fits(((1, 1), (2, 1)))
    assert sharing.spread(4) == ((2, 3), (0, 1))


def test_an_unchanged_allocation_is_the_same_object() -> None:
    cluster = nodes(4, 4, 4)
    present = at((3, 2), (1, 1))
    row = to_row(present, number_nodes(cluster))
    assert to_allocation(tuple(sorted(row)), cluster, present) is present


def test_nodes_that_stay_keep_their_ranks_before_new_ones() -> None:
    assert to_allocation(((0, 2), (2, 1)), nodes(4, 4, 4), at((3, 2))) == at((3, 1), (1, 2))


def test_an_allocation_on_a_node_that_is_gone_has_no_row() -> None:
    assert to_row(at((3, 2)), number_nodes(nodes(4, 4))) == ()


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(1, 1)], "1 replica on node-1"),
        ([(2, 3)], "3 replicas on node-2"),
        ([(1, 2), (2, 1)], "3 replicas on node-1 (2) and node-2 (1)"),
        ([(1, 1), (2, 1), (3, 1)], "3 replicas on node-1 (1), node-2 (1) and node-3 (1)"),
    ],
)
def test_allocations_are_described_in_words(places: list[tuple[int, int]], words: str) -> None:
    assert describe(at(*places)) == words
