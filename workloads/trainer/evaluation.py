"""The metric on all held-out data, each rank looking at its share."""

import torch

from workloads.applications.interface import Task
from workloads.trainer.elastic import Group
from workloads.trainer.pacer import Pacer


def evaluate(task: Task, at_once: int, group: Group, pacer: Pacer) -> float:
    """`at_once`: examples that the model is given together. Raises GroupBroken; changes nothing."""
    total = torch.zeros(1, dtype=torch.float64)
    task.model.eval()
    with torch.no_grad():
        share = torch.arange(group.rank, task.held_out_examples, group.size)
        for indices in torch.split(share, at_once):
            if len(indices):
                total += task.metric_sum(task.model, indices)
            pacer.pause()
    task.model.train()
    group.all_reduce(total)
    return task.metric(total.item() / task.held_out_examples)
