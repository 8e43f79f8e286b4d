"""The loops that `coadapt bench` compares the trainer with.

`train_baseline` is the shortest loop that trains the same task, in one process or as plain
DistributedDataParallel. It has no elasticity, gradient statistics, checkpoints or evaluations. RANK and
WORLD_SIZE in the environment make it one rank of several, as under torchrun. The benchmarks call it
by `python -c`: parsing a command line would add to the start time that they measure.
"""

import os
import sys
import time
from datetime import timedelta

import torch
from torch.nn.parallel import DistributedDataParallel

from workloads.applications import build_task

TIMEOUT_S = 60.0
"""Bound on every collective, even on a busy machine."""


class BaselineTrainer:
    """Every rank trains on an equal share of each batch; the order of the examples follows from `seed`."""

    def __init__(self, application: str, seed: int, rank: int, ranks: int) -> None:
        self._task = build_task(application, seed)
        self._rank, self._ranks = rank, ranks
        model = self._task.model.train()
        self._model = DistributedDataParallel(model) if ranks > 1 else model
        self._shuffled = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.int64)

    def train(self, steps: int, batch: int) -> None:
        """`batch`: examples in one step, over all ranks."""
        for _ in range(steps):
            if len(self._order) < batch:
                self._order = torch.randperm(self._task.train_examples, generator=self._shuffled)
            used, self._order = self._order[:batch], self._order[batch:]
            loss = self._task.loss(self._model, used[self._rank :: self._ranks])
            self._task.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._task.optimizer.step()


def train_baseline(application: str, *, init_method: str = "env://", one_step: int | None = None) -> None:
    """Train the application with a plain loop; the ranks meet at `init_method`.

    With `one_step`, train one step of this total batch size and print the monotonic clock after it, in
    seconds. Without it, train what standard input asks for."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group(
            "gloo", init_method, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S)
        )
    loop = BaselineTrainer(application, 0, rank, ranks)
    if one_step is None:
        _train_on_demand(loop)
    else:
        loop.train(1, one_step)
        if rank == 0:
            print(time.monotonic(), flush=True)
    if ranks > 1:
        # gloo may abort a process that closes its connections while other ranks close theirs.
        torch.distributed.barrier()
        os._exit(0)


def _train_on_demand(loop: BaselineTrainer) -> None:
    """For each line "STEPS BATCH" on standard input: train so many steps and print the seconds they took."""
    for line in sys.stdin:
        steps, batch = map(int, line.split())
        start_s = time.perf_counter()
        loop.train(steps, batch)
        print(time.perf_counter() - start_s, flush=True)
