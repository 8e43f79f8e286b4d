"""Which examples a step uses: a permutation from (seed, epoch) and one cursor for the whole job.

Every replica computes the same permutation and knows the same cursor, so that who trains on what follows
from (cursor, replicas, passes) alone and nothing has to be sent. Each example is used exactly once an epoch,
whatever replicas and batch sizes did meanwhile. Steps never span two epochs: the last one of an epoch takes
what is left, and may leave some replicas without an example.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of a step."""

    passes: tuple[torch.Tensor, ...]
    """Indices of the examples of each of this rank's passes, int64 [n], only those with n > 0."""
    total: int
    """Examples of the step on all ranks."""
    groups: int
    """Passes of all ranks that have an example: the groups of the gradient statistics."""

    @property
    def local(self) -> int:
        return sum(len(indices) for indices in self.passes)


class Sampler:
    def __init__(self, examples: int, seed: int) -> None:
        if examples < 1:
            raise ValueError(f"examples {examples}: must be at least 1")
        self.examples = examples
        self.seed = seed
        self._restore(0, 0)

    @property
    def epoch(self) -> int:
        """Epochs that are finished."""
        return self._epoch

    @property
    def cursor(self) -> int:
        """Examples of the present epoch that have been used, less than `examples`."""
        return self._cursor

    def used(self) -> torch.Tensor:
        """Indices of the present epoch up to the cursor, int64 [cursor]."""
        return self._permutation[: self._cursor]

    def take(self, total: int, rank: int = 0, ranks: int = 1, passes: int = 1) -> StepBatch:
        """The part of `rank` in the next step of at most `total` examples. Changes nothing: `advance` does,
        once the step is known to have happened.

        The step's examples are cut into ranks x passes runs whose lengths differ by at most one, rank by
        rank, so that 4 ranks x 1 pass, 2 x 2 and 1 x 4 are the same groups.
        """
        if total < 1 or passes < 1 or not 0 <= rank < ranks:
            raise ValueError(f"no such part: batch {total}, rank {rank} of {ranks}, {passes} passes")
        size = min(total, self.examples - self._cursor)
        groups = ranks * passes
        first = rank * passes
        cuts = [self._cursor + size * group // groups for group in range(first, first + passes + 1)]
        parts = (self._permutation[start:end] for start, end in pairwise(cuts))
        return StepBatch(tuple(part for part in parts if len(part)), size, min(groups, size))

    def advance(self, total: int) -> bool:
        """A step with `total` examples has happened. True when it was the last one of its epoch."""
        if not 0 < total <= self.examples - self._cursor:
            raise ValueError(f"step of {total} examples: {self.examples - self._cursor} are left")
        if self._cursor + total < self.examples:
            self._cursor += total
            return False
        self._restore(self._epoch + 1, 0)
        return True

    def state(self) -> dict[str, int]:
        return {"epoch": self._epoch, "cursor": self._cursor}

    def load(self, state: dict[str, int]) -> None:
        self._restore(state["epoch"], state["cursor"])

    def _restore(self, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = epoch, cursor
        order = np.random.default_rng([self.seed, epoch]).permutation(self.examples)
        self._permutation = torch.from_numpy(order)
