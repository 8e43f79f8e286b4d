"""Which examples a step uses: a permutation from (seed, epoch) and one cursor for the whole job.

Every replica computes the same permutation and knows the same cursor. So (cursor, replicas, passes) decides
which replica trains on which examples, and nothing has to be sent. Each example is used exactly once in an
epoch, however replicas and batch size change during it. No step spans two epochs: the last step of an epoch
takes the examples that are left, which may be too few for every replica to get one.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch


@dataclass(frozen=True)
class StepBatch:
    """The examples that one rank uses in a step."""

    passes: tuple[torch.Tensor, ...]
    """Example indices of each pass of this rank, int64 [n]; passes without an example are left out."""
    total: int
    """Examples that all ranks use in this step."""
    groups: int
    """Passes of all ranks that have an example: the groups of the gradient statistics."""

    @property
    def local(self) -> int:
        return sum(len(indices) for indices in self.passes)


class Sampler:
    """The position of a job in its data. Raises ValueError for `examples` below 1."""

    def __init__(self, examples: int, seed: int) -> None:
        if examples < 1:
            raise ValueError(f"examples {examples}: allowed: at least 1")
        self.examples = examples
        self.seed = seed
        self._restore(0, 0)

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self._epoch

    @property
    def cursor(self) -> int:
        """Number of examples used in the current epoch, less than `examples`."""
        return self._cursor

    def used(self) -> torch.Tensor:
        """Indices of the examples used in the current epoch, int64 [cursor]."""
        return self._permutation[: self._cursor]

    def take(self, total: int, rank: int = 0, ranks: int = 1, passes: int = 1) -> StepBatch:
        """The part of `rank` in the next step of at most `total` examples. Changes nothing; call `advance`
        once the step has happened. Raises ValueError for a batch or part that does not exist.

        The examples of the step are cut into ranks x passes runs, in order of rank, whose lengths differ by
        at most one. So 4 ranks x 1 pass, 2 x 2 and 1 x 4 give the same groups.
        """
        if total < 1 or passes < 1 or not 0 <= rank < ranks:
            raise ValueError(
                f"batch {total}, rank {rank} of {ranks}, {passes} passes: allowed: a batch and passes of at "
                "least 1, a rank from 0 to ranks - 1"
            )
        size = min(total, self.examples - self._cursor)
        groups = ranks * passes
        first = rank * passes
        cuts = [self._cursor + size * group // groups for group in range(first, first + passes + 1)]
        parts = (self._permutation[start:end] for start, end in pairwise(cuts))
        return StepBatch(tuple(part for part in parts if len(part)), size, min(groups, size))

    def advance(self, total: int) -> bool:
        """Record a step of `total` examples; True if it was the last one of its epoch. Raises ValueError for
        more examples than are left in the epoch."""
        if not 0 < total <= self.examples - self._cursor:
            raise ValueError(f"step of {total} examples: allowed: 1 to {self.examples - self._cursor}")
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
