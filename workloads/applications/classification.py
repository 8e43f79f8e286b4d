"""The task of an application that classifies: cross-entropy, accuracy, and SGD with momentum."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from workloads.applications.interface import Task

if TYPE_CHECKING:
    import torch

    Examples = tuple["torch.Tensor", "torch.Tensor"]


def classification_task(
    model: "torch.nn.Module", train: "Examples", held_out: "Examples", settings: Mapping[str, float]
) -> Task:
    """`train` and `held_out` are inputs [examples, ...] and labels, int64 [examples]. `settings` has
    learning_rate and momentum. The metric is the accuracy."""
    import torch
    from torch import nn
    from torch.nn import functional

    train_inputs, train_labels = train
    held_out_inputs, held_out_labels = held_out

    def loss(model: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(train_inputs[indices]), train_labels[indices])

    def correct(model: nn.Module, indices: torch.Tensor) -> float:
        predicted = model(held_out_inputs[indices]).argmax(dim=1)
        return float((predicted == held_out_labels[indices]).sum())

    return Task(
        model=model,
        optimizer=torch.optim.SGD(
            model.parameters(), lr=settings["learning_rate"], momentum=settings["momentum"]
        ),
        train_examples=len(train_labels),
        held_out_examples=len(held_out_labels),
        loss=loss,
        metric_sum=correct,
        metric=lambda mean: mean,
        rate=lambda progress: 1.0,
    )
