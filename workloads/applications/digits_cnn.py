"""`digits-cnn`: a small convolutional network on the 8x8 handwritten digits that scikit-learn ships.

The data are clean and easy: the noise scale is small, and a large batch helps little.

Measured with one replica: median (least to most) of 20 seeds at each batch size. All of them reached the
target.

    total batch        16 (M0)             32             64            128
    progress     375 (275-525)  376 (301-476)  401 (301-502)  400 (300-528)
    examples              5990           7788          11300          15840
    CPU seconds            3.2            3.5            4.5            5.6

Noise scale, in examples, after a tenth of the training, after half of it, and at the target: 220, 50, 70.
"""

from typing import TYPE_CHECKING

from common.types import ApplicationSpec
from workloads.applications.classification import classification_task
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
    """The split is the same for every seed: a seed changes weights and order, not the task."""
    import numpy as np
    import torch
    from torch import nn

    numbers = SPEC.settings | settings
    table = read_digits()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(table))
    pixels = torch.from_numpy(table[order, :64].astype(np.float32)).reshape(-1, 1, 8, 8) / 16
    digit = torch.from_numpy(table[order, 64].astype(np.int64))

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

    return classification_task(
        model, (pixels[HELD_OUT:], digit[HELD_OUT:]), (pixels[:HELD_OUT], digit[:HELD_OUT]), numbers
    )


def read_digits() -> "np.ndarray":
    """The digits of scikit-learn, uint8 [1797, 65]: 64 pixels of 0..16, and the digit.

    The file is read without importing scikit-learn. The import would add more than a second to the start of
    every replica; reading the file takes 10 ms.
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
