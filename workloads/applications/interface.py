"""What an application gives to the trainer. A module with an application has two names:

    SPEC: ApplicationSpec                              what scheduler and clients know; importing the
                                                       module must not import torch
    build(seed: int, settings: dict[str, float]) -> Task      torch is imported in here

`seed` decides initial weights, order of examples and everything else random of the job; data and their split
stay the same, so that jobs of different seeds can be compared. `settings` overrides the numbers that the
application names in SPEC.settings, such as its learning rate.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True)
class Task:
    """A job's objects in one replica. Every replica of a job builds the same ones from the same seed."""

    model: "torch.nn.Module"
    """All that training changes is in its parameters and persistent buffers: nothing else goes along when a
    job is resized or saved."""
    optimizer: "torch.optim.Optimizer"
    """Made with the rate tuned at M0; the trainer scales it."""
    train_examples: int
    held_out_examples: int
    loss: "Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]"
    """(model, indices: int64 [n] of training examples) -> scalar, the mean loss over them.
    It depends on these two and on torch's default generator alone, and has no effects of its own: any replica
    may compute it, and computes one more than it trains on when it starts (`loop.rehearse`)."""
    metric_sum: "Callable[[torch.nn.Module, torch.Tensor], float]"
    """(model, indices: int64 [n] of held-out examples) -> the sum of a quantity over them."""
    metric: "Callable[[float], float]"
    """Mean of that quantity over all held-out examples -> the metric that the target is about."""
    rate: "Callable[[float], float]"
    """Progress in AdaScale steps -> factor of the learning rate; 1.0 without a schedule."""


class Build(Protocol):
    def __call__(self, seed: int, settings: dict[str, float]) -> Task: ...
