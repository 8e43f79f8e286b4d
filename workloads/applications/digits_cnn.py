"""`digits-cnn`: a small convolutional network on the 8x8 handwritten digits that scikit-learn ships.

Clean and easy: the noise scale is small, and a large batch buys little.

Measured with one replica: medians (least to most) of 20 seeds at each batch; every one of them reached the
target.

    total batch        16 (M0)             32             64            128
    progress     375 (275-525)  376 (301-476)  401 (301-502)  400 (300-528)
    examples              5990           7788          11300          15840
    CPU seconds            3.2            3.5            4.5            5.6

Noise scale, in examples, at a tenth of the way, half of it, at the target: 220, 50, 70.
"""

from typing import TYPE_CHECKING

from common.types import ApplicationSpec
from workloads.applications.interface import Task

if TYPE_CHECKING:
    import numpy as np

HELD_OUT = 297
SPEC = ApplicationSpec(
    name="digits-cnn",
    optimizer="sgd",
    metric="held-out accuracy",
    metric_mode="max",
    target=0.965,
    target_min=0.5,
    target_max=0.975,
    initial_batch_size=16,
    max_batch_size=128,
    min_atomic_batch=4,
    max_atomic_batch=64,
    examples=1797 - HELD_OUT,
    max_progress=3000.0,
    evaluate_every=25.0,
    settings={"learning_rate": 0.01, "momentum": 0.9},
)
SPLIT_SEED = 1


def build(seed: int, settings: dict[str, float]) -> Task:
    """The split is the same for every seed: seeds differ in weights and order, not in the task."""
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional

    numbers = SPEC.settings | settings
    table = read_digits()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(table))
    pixels = torch.from_numpy(table[order, :64].astype(np.float32)).reshape(-1, 1, 8, 8) / 16
    digit = torch.from_numpy(table[order, 64].astype(np.int64))
    held_out_pixels, train_pixels = pixels[:HELD_OUT], pixels[HELD_OUT:]
    held_out_digit, train_digit = digit[:HELD_OUT], digit[HELD_OUT:]

    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )

    def loss(model: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(train_pixels[indices]), train_digit[indices])

    def correct(model: nn.Module, indices: torch.Tensor) -> float:
        answer = model(held_out_pixels[indices]).argmax(dim=1)
        return float((answer == held_out_digit[indices]).sum())

    return Task(
        model=model,
        optimizer=torch.optim.SGD(
            model.parameters(), lr=numbers["learning_rate"], momentum=numbers["momentum"]
        ),
        train_examples=len(train_pixels),
        held_out_examples=len(held_out_pixels),
        loss=loss,
        metric_sum=correct,
        metric=lambda mean: mean,
        rate=lambda progress: 1.0,
    )


def read_digits() -> "np.ndarray":
    """uint8 [1797, 65]: 64 pixels of 0..16 and the digit.

    The file is read where scikit-learn keeps it, without importing scikit-learn: the import takes more than
    a second of every newcomer's start, reading the file 10 ms.
    """
    import gzip
    from importlib.util import find_spec
    from pathlib import Path

    import numpy as np

    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("digits-cnn needs the digits data of scikit-learn: pip install scikit-learn")
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path) as file:
        return np.loadtxt(file, delimiter=",", dtype=np.uint8)
