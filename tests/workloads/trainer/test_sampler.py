import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.trainer.sample_ledger import Fingerprints, SampleLedger
from workloads.trainer.sampler import Sampler

shapes = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 40))
"""(ranks, passes, atomic batch size)"""


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


def test_a_thousand_random_schedules_lose_and_repeat_nothing() -> None:
    """Resizes, newcomers that take over a survivor's state, steps that broke and are done again, jobs that
    resume from their state: proven as the verifier does it, by the ledger, and by counting."""
    for number in range(1000):
        draw = random.Random(number)
        examples = draw.randint(1, 60)
        proofs = Fingerprints(examples)
        replicas, ledger = [Sampler(examples, number)], SampleLedger()
        used: Counter[int] = Counter()
        for _ in range(draw.randint(1, 20)):
            if draw.random() < 0.2:
                survivors = replicas[: draw.randint(0, 2)]
                state = draw.choice(replicas).state()
                newcomers = [Sampler(examples, number) for _ in range(draw.randint(not survivors, 2))]
                for newcomer in newcomers:
                    newcomer.load(state)
                replicas = [*survivors, *newcomers]
            ranks, passes = len(replicas), draw.randint(1, 2)
            left = examples - replicas[0].cursor
            total = draw.choice([draw.randint(1, 20), left, left + 1])
            parts = [replica.take(total, rank, ranks, passes) for rank, replica in enumerate(replicas)]
            if draw.random() < 0.1:
                continue
            taken = [i for part in parts for indices in part.passes for i in indices.tolist()]
            used.update(taken)
            ledger.add(len(taken), sum(proofs.mark(part.passes) for part in parts))
            ended = [replica.advance(len(taken)) for replica in replicas]
            if ended[0]:
                assert used == Counter(range(examples))
                used.clear()
                ledger.end_epoch()
        assert len({tuple(replica.state().items()) for replica in replicas}) == 1
        assert used == Counter(replicas[0].used().tolist())
        assert ledger.findings(proofs, replicas[0].epoch, replicas[0].used()) == ()


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
    with pytest.raises(ValueError, match="allowed: 1 to 20"):
        sampler.advance(21)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        sampler.take(4, rank=2, ranks=2)
    with pytest.raises(ValueError, match="at least 1"):
        Sampler(0, 0)
