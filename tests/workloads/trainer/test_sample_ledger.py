import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workloads.trainer.gradient_statistics.flat_gradients import StepSums
from workloads.trainer.sample_ledger import (
    LIMBS,
    MARK_MASK,
    Fingerprints,
    SampleLedger,
    from_limbs,
    limbs,
    mix,
)
from workloads.trainer.sampler import Sampler

EXAMPLES = 60


def run(epochs: float, spoil_step: int | None = None, spoil: str = "") -> tuple[str, ...]:
    """Findings after this many epochs on three ranks, whose sums are added in float32 as in a group."""
    sampler, fingerprints, ledger = Sampler(EXAMPLES, 3), Fingerprints(EXAMPLES), SampleLedger()
    step = 0
    while sampler.epoch + sampler.cursor / EXAMPLES < epochs:
        reduced = torch.zeros(1 + LIMBS)
        total = 0
        for rank in range(3):
            batch = sampler.take(9, rank, 3)
            used = torch.cat(batch.passes) if batch.passes else torch.zeros(0, dtype=torch.int64)
            total = batch.total
            if step == spoil_step and rank == 1:
                used = {
                    "lose": used[1:],
                    "repeat": torch.cat([used, used[:1]]),
                    "exchange": torch.cat([used[1:], used[1:2]]),
                }[spoil]
            reduced += torch.tensor([len(used), *limbs(fingerprints.mark([used]))])
        count, *mark = reduced.tolist()
        ledger.add(int(count), from_limbs(mark))
        if sampler.advance(total):
            ledger.end_epoch()
        step += 1
    kept = SampleLedger()
    kept.load(ledger.state())
    return kept.findings(fingerprints, sampler.epoch, sampler.used())


@pytest.mark.parametrize("epochs", [0.5, 1, 2.4, 3])
def test_an_exact_run_has_no_findings(epochs: float) -> None:
    assert run(epochs) == ()


@pytest.mark.parametrize(
    ("spoil", "finding"), [("lose", "59 examples of 60"), ("repeat", "61 examples of 60")]
)
def test_one_lost_or_repeated_example_is_found(spoil: str, finding: str) -> None:
    assert run(3, 8, spoil) == (f"epoch 1: {finding} were used",)


def test_an_example_used_twice_instead_of_another_is_found() -> None:
    assert run(3, 8, "exchange") == ("epoch 1: not every example was used exactly once",)


def test_an_unfinished_epoch_is_checked_up_to_its_cursor() -> None:
    assert run(0.5, 2, "lose") == ("epoch 0: 35 examples of 36 were used",)


def test_a_missing_epoch_is_found() -> None:
    assert SampleLedger().findings(Fingerprints(3), 2, torch.zeros(0, dtype=torch.int64)) == (
        "ledger has 0 finished epochs, the sampler 2",
    )


@given(st.lists(st.integers(0, MARK_MASK), min_size=1, max_size=64))
def test_marks_add_up_over_ranks_in_single_precision(marks: list[int]) -> None:
    sums = torch.tensor([limbs(mark) for mark in marks], dtype=torch.float32).sum(0)
    assert from_limbs(sums.tolist()) == sum(marks) & MARK_MASK


def test_a_mark_has_a_place_for_each_limb_among_the_sums_of_a_step() -> None:
    assert sum(name.startswith("mark_") for name in StepSums._fields) == LIMBS
    assert StepSums._fields[-LIMBS].startswith("mark_0")


def test_neighbouring_numbers_have_hashes_that_share_nothing() -> None:
    differing = [(mix(i) ^ mix(i + 1)).bit_count() for i in range(1000)]
    assert 28 < sum(differing) / len(differing) < 36
