"""Evidence that every example was used exactly once in each epoch.

Each example has a 60-bit hash. The *mark* of a set of examples is the sum of their hashes modulo 2^60: the
marks of parts add up to the mark of the whole, and a lost, repeated or exchanged example changes it (except
with probability 2^-60). Each rank computes the mark and the count of the examples whose gradient it really
computed. They travel with the gradients as five limbs of 12 bits, whose sums over up to 4096 ranks are exact
even in single precision. So all ranks keep the same ledger; a checkpoint carries it to the verifier, which
computes what the mark of each epoch must be.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

LIMBS = 5
LIMB_BITS = 12
MARK_MASK = (1 << (LIMBS * LIMB_BITS)) - 1
WORD_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """Hash a number to 64 bits: one step of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & WORD_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD_MASK
    return value ^ (value >> 31)


class Fingerprints:
    """The hashes of the examples 0 .. `examples` - 1."""

    def __init__(self, examples: int) -> None:
        self.hashes = np.fromiter(map(mix, range(examples)), dtype=np.uint64, count=examples)
        self.all = self._mark(self.hashes)

    def mark(self, passes: Iterable[torch.Tensor]) -> int:
        """The mark of the examples with these indices, each tensor int64 [n]."""
        return sum(self._mark(self.hashes[indices.numpy()]) for indices in passes) & MARK_MASK

    @staticmethod
    def _mark(hashes: np.ndarray) -> int:
        return int(hashes.sum()) & MARK_MASK


def limbs(mark: int) -> tuple[float, ...]:
    """The mark as LIMBS pieces of 12 bits, lowest first."""
    return tuple(float((mark >> (LIMB_BITS * i)) & ((1 << LIMB_BITS) - 1)) for i in range(LIMBS))


def from_limbs(sums: Sequence[float]) -> int:
    """The mark of all ranks together, from the sums of their limbs."""
    return sum(int(part) << (LIMB_BITS * i) for i, part in enumerate(sums)) & MARK_MASK


class SampleLedger:
    """Count and mark of the examples used in the current epoch and in each finished one."""

    def __init__(self) -> None:
        self.count = 0
        self.mark = 0
        self.finished: list[tuple[int, int]] = []

    def add(self, count: int, mark: int) -> None:
        self.count += count
        self.mark = (self.mark + mark) & MARK_MASK

    def end_epoch(self) -> None:
        self.finished.append((self.count, self.mark))
        self.count, self.mark = 0, 0

    def findings(self, fingerprints: Fingerprints, epochs: int, used: torch.Tensor) -> tuple[str, ...]:
        """What is wrong, one sentence each: `epochs` must be finished, and the examples `used`, int64 [n],
        must be those of the current epoch."""
        if len(self.finished) != epochs:
            return (f"ledger has {len(self.finished)} finished epochs, the sampler {epochs}",)
        expected = [(len(fingerprints.hashes), fingerprints.all)] * epochs
        expected.append((len(used), fingerprints.mark([used])))
        return tuple(
            f"epoch {epoch}: {count} examples of {should} were used"
            if count != should
            else f"epoch {epoch}: not every example was used exactly once"
            for epoch, ((count, mark), (should, right)) in enumerate(
                zip([*self.finished, (self.count, self.mark)], expected, strict=True)
            )
            if (count, mark) != (should, right)
        )

    def state(self) -> dict[str, list[int]]:
        return {"present": [self.count, self.mark], "finished": [n for epoch in self.finished for n in epoch]}

    def load(self, state: dict[str, list[int]]) -> None:
        self.count, self.mark = state["present"]
        numbers = state["finished"]
        self.finished = list(zip(numbers[::2], numbers[1::2], strict=True))
