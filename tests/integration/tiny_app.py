"""`tiny`: a small regression, in double precision unless told otherwise, that takes a fraction of a
millisecond a step, and does on demand what an application should not do. "n-th" counts the losses that a
process computes, from 1; the first one is that of the rehearsal."""

from typing import TYPE_CHECKING

from common.types import ApplicationSpec
from workloads.tasks.interface import Task

if TYPE_CHECKING:
    import torch

MODULE = "tests.integration.tiny_app"
FEATURES = 6
EXAMPLES = 250
HELD_OUT = 50

SPEC = ApplicationSpec(
    name="tiny",
    optimizer="sgd",
    metric="held-out mean squared error",
    metric_mode="min",
    target=0.05,
    target_min=0.0,
    target_max=1.0,
    initial_batch_size=24,
    max_batch_size=192,
    min_atomic_batch=1,
    max_atomic_batch=48,
    examples=EXAMPLES,
    max_progress=5000.0,
    evaluate_every=20.0,
    settings={
        "learning_rate": 0.02,
        "momentum": 0.9,
        "dropout": 0.0,
        "single": 0.0,  # 1: in single precision
        "sleep_ms": 0.0,  # in every loss
        "raise_at": 0.0,  # raise in the n-th loss
        "nan_at": 0.0,  # NaN from the n-th loss on
        "nan_once_at": 0.0,  # NaN in the n-th loss alone
        "exit_at": 0.0,  # end the process in the n-th loss, without a word
    },
)


def build(seed: int, settings: dict[str, float]) -> Task:
    import os
    import time

    import torch
    from torch import nn

    numbers = SPEC.settings | settings
    precision = torch.float32 if numbers["single"] else torch.float64
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(EXAMPLES + HELD_OUT, FEATURES, generator=draw, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True))
    y += 0.1 * torch.randn(len(x), 1, generator=draw, dtype=torch.float64)
    x, y = x.to(precision), y.to(precision)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(numbers["dropout"]), nn.Linear(16, 1)
    ).to(precision)
    losses = 0

    def loss(model: nn.Module, indices: "torch.Tensor") -> "torch.Tensor":
        nonlocal losses
        losses += 1
        time.sleep(numbers["sleep_ms"] / 1000.0)
        if losses == numbers["raise_at"]:
            raise RuntimeError(f"raises in loss {losses}, as its settings say")
        if losses == numbers["exit_at"]:
            os._exit(0)
        error = ((model(x[indices]) - y[indices]) ** 2).mean()
        bad = losses == numbers["nan_once_at"] or losses >= numbers["nan_at"] > 0
        return error * float("nan") if bad else error

    def squared_errors(model: nn.Module, indices: "torch.Tensor") -> float:
        held_out = indices + EXAMPLES
        return float(((model(x[held_out]) - y[held_out]) ** 2).sum())

    return Task(
        model=model,
        optimizer=torch.optim.SGD(
            model.parameters(), lr=numbers["learning_rate"], momentum=numbers["momentum"]
        ),
        train_examples=EXAMPLES,
        held_out_examples=HELD_OUT,
        loss=loss,
        metric_sum=squared_errors,
        metric=lambda mean: mean,
        rate=lambda progress: 1.0,
    )
