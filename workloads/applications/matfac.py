"""`matfac`: factorisation of a generated matrix of ratings; the items that a user rated also describe the
user.

Ratings are noisy and each depends on few parameters: the noise scale is far above every allowed batch size,
and grows fivefold during the training.

Measured with one replica: median (least to most) of 20 seeds at each batch size. All of them reached the
target.

    total batch       256 (M0)            512           1024           2048           4096
    progress     700 (625-725)  700 (650-750)  676 (650-727)  632 (602-678)  631 (583-664)
    examples            179000         181440         179392         175296         190000
    CPU seconds            3.8            3.1            2.9            2.1            2.1

Noise scale, in examples, after a tenth of the training, after half of it, and at the target: 12000, 37000,
65000.
"""

import math
from typing import TYPE_CHECKING

from common.types import ApplicationSpec
from workloads.applications.interface import Task

if TYPE_CHECKING:
    import numpy as np

USERS, ITEMS = 1500, 500
TRAIN_EACH, HELD_OUT_EACH = 80, 4
"""Ratings of each user."""
RANK = 32
SPEC = ApplicationSpec(
    name="matfac",
    optimizer="adam",
    metric="held-out root mean square error",
    metric_mode="min",
    target=0.95,
    target_min=0.94,
    target_max=1.2,
    initial_batch_size=256,
    max_batch_size=4096,
    min_atomic_batch=64,
    max_atomic_batch=1024,
    examples=USERS * TRAIN_EACH,
    max_progress=3000.0,
    evaluate_every=25.0,
    settings={"learning_rate": 0.01, "weight_decay": 0.0002},
)
DATA_SEED = 1
TRUE_RANK = 6
NOISE = 0.8
"""Standard deviation of the noise in a rating. The predictable part has variance 1."""


def ratings(seed: int) -> "tuple[np.ndarray, np.ndarray]":
    """Items that each user has rated, int64 [users, 84], and the ratings, float32 [users, 84].

    Popular items are rated by more users: a sample without replacement from a softmax, drawn as the largest
    of popularity + Gumbel noise. A rating is the sum of taste x trait (variance 0.7), the biases of user and
    item (0.15 each), and noise.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    each = TRAIN_EACH + HELD_OUT_EACH
    appeal = random.standard_normal(ITEMS) + random.gumbel(size=(USERS, ITEMS))
    items = random.permuted(np.argpartition(appeal, -each, axis=1)[:, -each:], axis=1)
    tastes = random.standard_normal((USERS, TRUE_RANK))
    traits = random.standard_normal((ITEMS, TRUE_RANK))
    score = tastes @ traits.T * math.sqrt(0.7 / TRUE_RANK)
    score += math.sqrt(0.15) * (random.standard_normal((USERS, 1)) + random.standard_normal(ITEMS))
    rating = np.take_along_axis(score, items, axis=1) + NOISE * random.standard_normal(items.shape)
    return items, rating.astype(np.float32)


def build(seed: int, settings: dict[str, float]) -> Task:
    """Ratings and split are the same for every seed: a seed changes weights and order, not the task.

    The model is SVD++ with a mean for the normalised sum: a user's vector is the user's own plus the mean of
    the vectors of all items that the user rated (Koren 2008, "Factorization Meets the Neighborhood", eq. 15).
    Gradients are dense, because the trainer reduces them in one flat buffer.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    numbers = SPEC.settings | settings
    items, rating = map(torch.from_numpy, ratings(DATA_SEED))
    train_items, held_out_items = items[:, :TRAIN_EACH].contiguous(), items[:, TRAIN_EACH:]
    train_rating, held_out_rating = rating[:, :TRAIN_EACH], rating[:, TRAIN_EACH:]

    class FactorModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user = nn.Embedding(USERS, RANK)
            self.item = nn.Embedding(ITEMS, RANK)
            self.rated = nn.EmbeddingBag(ITEMS, RANK, mode="mean")
            self.user_bias = nn.Embedding(USERS, 1)
            self.item_bias = nn.Embedding(ITEMS, 1)
            for table in (self.user, self.item, self.rated):
                nn.init.normal_(table.weight, std=0.1)
            for table in (self.user_bias, self.item_bias):
                nn.init.zeros_(table.weight)

        def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
            """int64 [n] users and [n] items -> [n] ratings."""
            taste = self.user(user) + self.rated(train_items[user])
            bias = self.user_bias(user) + self.item_bias(item)
            rating: torch.Tensor = (taste * self.item(item)).sum(dim=1) + bias.squeeze(1)
            return rating

    torch.manual_seed(seed)
    model = FactorModel()

    def loss(model: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        user, column = indices // TRAIN_EACH, indices % TRAIN_EACH
        return functional.mse_loss(model(user, train_items[user, column]), train_rating[user, column])

    def squared_error(model: nn.Module, indices: torch.Tensor) -> float:
        user, column = indices // HELD_OUT_EACH, indices % HELD_OUT_EACH
        error = model(user, held_out_items[user, column]) - held_out_rating[user, column]
        return float(error.detach().double().square().sum())

    return Task(
        model=model,
        optimizer=torch.optim.Adam(
            model.parameters(), lr=numbers["learning_rate"], weight_decay=numbers["weight_decay"]
        ),
        train_examples=train_rating.numel(),
        held_out_examples=held_out_rating.numel(),
        loss=loss,
        metric_sum=squared_error,
        metric=math.sqrt,
        rate=lambda progress: 1.0,
    )
