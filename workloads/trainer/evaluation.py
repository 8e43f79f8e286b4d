"""The metric of a job on all held-out data."""

import torch

from workloads.applications.interface import Task
from workloads.trainer.pacer import Pacer
from workloads.trainer.process_group import Group


def evaluate(task: Task, chunk_examples: int, group: Group, pacer: Pacer) -> float:
    """The metric, the same on every rank. Each rank evaluates its share of the held-out data,
    `chunk_examples` at a time. Raises GroupBroken. Changes no state of the model."""
    total = torch.zeros(1, dtype=torch.float64)
    task.model.eval()
    with torch.no_grad():
        share = torch.arange(group.rank, task.held_out_examples, group.size)
        for indices in torch.split(share, chunk_examples):
            if len(indices):
                total += task.metric_sum(task.model, indices)
            pacer.pause()
    task.model.train()
    group.all_reduce(total)
    return task.metric(total.item() / task.held_out_examples)
