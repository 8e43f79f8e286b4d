"""What the trainer is compared with: the shortest loop that trains the same task, alone or as plain
DistributedDataParallel. Run by `coadapt bench`, as `python -m workloads.trainer.standalone.baselines`.

With RANK and WORLD_SIZE in its environment, as under torchrun, it is one rank of so many. It knows nothing of
elasticity, gradient statistics, checkpoints or evaluations.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
from torch.nn.parallel import DistributedDataParallel

from workloads.applications import build_task

TIMEOUT_S = 60.0
"""Of every collective, however busy the machine is."""


class BaselineTrainer:
    """All ranks use equal shares of every batch, in an order that follows from `seed`."""

    def __init__(self, application: str, seed: int, rank: int, ranks: int) -> None:
        self._task = build_task(application, seed)
        self._rank, self._ranks = rank, ranks
        model = self._task.model.train()
        self._model = DistributedDataParallel(model) if ranks > 1 else model
        self._shuffled = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.int64)

    def train(self, steps: int, batch: int) -> None:
        """`batch`: examples of a step, over all ranks."""
        for _ in range(steps):
            if len(self._order) < batch:
                self._order = torch.randperm(self._task.train_examples, generator=self._shuffled)
            used, self._order = self._order[:batch], self._order[batch:]
            loss = self._task.loss(self._model, used[self._rank :: self._ranks])
            self._task.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._task.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("application")
    parser.add_argument("--init-method", default="env://", help="where the ranks meet")
    parser.add_argument(
        "--one-step", type=int, metavar="BATCH", help="one step of BATCH; print the monotonic clock after it"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group(
            "gloo", options.init_method, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S)
        )
    loop = BaselineTrainer(options.application, 0, rank, ranks)
    if options.one_step is None:
        _train_on_demand(loop)
    else:
        loop.train(1, options.one_step)
        if rank == 0:
            print(time.monotonic(), flush=True)
    if ranks > 1:
        # gloo may abort a process that takes its connections down while others do.
        torch.distributed.barrier()
        os._exit(0)


def _train_on_demand(loop: BaselineTrainer) -> None:
    """For each line on standard input, steps and batch: train so much, answer with the seconds."""
    for line in sys.stdin:
        steps, batch = map(int, line.split())
        start_s = time.perf_counter()
        loop.train(steps, batch)
        print(time.perf_counter() - start_s, flush=True)


if __name__ == "__main__":
    main()
