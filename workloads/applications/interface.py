"""The interface of an application. A module that contains one defines two names:

    SPEC: ApplicationSpec                                    for scheduler and clients
    build(seed: int, settings: dict[str, float]) -> Task     for the trainer

Importing the module must not import torch; `build` does. `seed` decides the initial weights, the order of the
examples and everything else that is random. The data and their split are the same for every seed, so that
jobs with different seeds can be compared. `settings` overrides numbers in SPEC.settings, such as the learning
rate.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True)
class Task:
    """The objects of a job in one replica. Every replica of a job builds the same ones from the same seed."""

    model: "torch.nn.Module"
    """Everything that training changes must be in its parameters and persistent buffers. Nothing else is
    copied when a job is resized or saved."""
    optimizer: "torch.optim.Optimizer"
    """Created with the learning rate tuned at M0. The trainer scales the rate."""
    train_examples: int
    held_out_examples: int
    loss: "Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]"
    """(model, indices of training examples, int64 [n]) -> scalar, the mean loss over them.
    It must depend only on its arguments and torch's default generator, and must have no side effects: any
    replica may compute it, and each replica computes one extra loss when it starts (`loop.rehearse`)."""
    metric_sum: "Callable[[torch.nn.Module, torch.Tensor], float]"
    """(model, indices of held-out examples, int64 [n]) -> the sum of a quantity over them."""
    metric: "Callable[[float], float]"
    """Mean of that quantity over all held-out examples -> the metric of the job."""
    rate: "Callable[[float], float]"
    """The learning rate schedule: progress in AdaScale steps -> factor on the learning rate."""


class Build(Protocol):
    def __call__(self, seed: int, settings: dict[str, float]) -> Task: ...
