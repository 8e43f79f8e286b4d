from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.trainer.sampler import Sampler

shapes = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 40))
"""(ranks, passes, batch a pass)"""


@given(
    examples=st.integers(1, 97), seed=st.integers(0, 9), schedule=st.lists(shapes, min_size=1, max_size=60)
)
def test_every_example_is_used_exactly_once_an_epoch_whatever_is_resized(
    examples: int, seed: int, schedule: list[tuple[int, int, int]]
) -> None:
    replicas = [Sampler(examples, seed) for _ in range(5)]
    used: Counter[int] = Counter()
    epochs = 0
    for ranks, passes, atomic in schedule:
        total = ranks * passes * atomic
        parts = [replicas[rank].take(total, rank, ranks, passes) for rank in range(ranks)]
        sizes = [len(indices) for part in parts for indices in part.passes]
        assert {part.total for part in parts} == {sum(sizes)}
        assert {part.groups for part in parts} == {len(sizes)}
        assert max(sizes) <= atomic
        used.update(i for part in parts for indices in part.passes for i in indices.tolist())
        ended = [replica.advance(parts[0].total) for replica in replicas]
        if ended[0]:
            assert used == Counter(range(examples))
            used.clear()
            epochs += 1
        assert max(used.values(), default=1) == 1
    assert {replica.epoch for replica in replicas} == {epochs}
    assert replicas[0].cursor == used.total()


def test_the_groups_of_a_step_do_not_depend_on_how_they_are_spread() -> None:
    def groups(ranks: int, passes: int) -> list[list[int]]:
        parts = [Sampler(50, 1).take(18, rank, ranks, passes) for rank in range(ranks)]
        return [indices.tolist() for part in parts for indices in part.passes]

    assert groups(4, 1) == groups(2, 2) == groups(1, 4)


def test_ranks_without_an_example_take_part_with_none() -> None:
    sampler = Sampler(10, 0)
    sampler.advance(8)
    parts = [sampler.take(16, rank, 4) for rank in range(4)]
    assert sorted(part.local for part in parts) == [0, 0, 1, 1]
    assert {part.groups for part in parts} == {2}


def test_epochs_and_seeds_have_orders_of_their_own_that_repeat() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = Sampler(30, seed)
        for _ in range(epoch):
            sampler.advance(30)
        return sampler.take(30).passes[0].tolist()

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(o) for o in orders}) == 4
    assert order(1, 1) == orders[3]


def test_a_position_survives_in_its_state() -> None:
    sampler = Sampler(20, 4)
    sampler.advance(20)
    sampler.advance(7)
    other = Sampler(20, 4)
    other.load(sampler.state())
    assert other.take(5).passes[0].tolist() == sampler.take(5).passes[0].tolist()


def test_taking_does_not_advance() -> None:
    sampler = Sampler(20, 4)
    assert sampler.take(5).passes[0].tolist() == sampler.take(5).passes[0].tolist()


def test_steps_beyond_the_epoch_and_parts_that_do_not_exist_are_refused() -> None:
    sampler = Sampler(20, 4)
    with pytest.raises(ValueError, match="20 are left"):
        sampler.advance(21)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        sampler.take(4, rank=2, ranks=2)
    with pytest.raises(ValueError, match="at least 1"):
        Sampler(0, 0)
