"""`mnist1d-conv`: a one-dimensional convolutional network on generated signals in the style of MNIST-1D.

The signals are hard to tell apart, and three in ten training labels are random: the noise scale is ten times
M0.

Measured with one replica: median (least to most) of 20 seeds at each batch size. All of them reached the
target.

    total batch           16 (M0)                32               64               128               256
    progress     1350 (1200-1700)  1375 (1050-1750)  1302 (951-1652)  1328 (1051-1454)  1227 (1001-1451)
    examples                21600             24368            27744             37184             49400
    CPU seconds               5.2               5.4              6.1               5.4               5.3

Noise scale, in examples, after a tenth of the training, after half of it, and at the target: 260, 150, 170.
"""

from typing import TYPE_CHECKING

from common.types import ApplicationSpec
from workloads.applications.classification import classification_task
from workloads.applications.interface import Task

if TYPE_CHECKING:
    import numpy as np

HELD_OUT = 600
SPEC = ApplicationSpec(
    name="mnist1d-conv",
    optimizer="sgd",
    metric="held-out accuracy",
    metric_mode="max",
    target=0.7,
    target_min=0.3,
    target_max=0.8,
    initial_batch_size=16,
    max_batch_size=256,
    min_atomic_batch=4,
    max_atomic_batch=64,
    examples=8000,
    max_progress=4000.0,
    evaluate_every=50.0,
    settings={"learning_rate": 0.025, "momentum": 0.9, "label_noise": 0.3},
)
DATA_SEED = 1

TEMPLATE_POINTS, SIGNAL_POINTS = 12, 40
PADDING_MIN, PADDING_MAX = 36, 60
# The heights of ten hand-drawn strokes, one for each digit, at twelve equally spaced points.
TEMPLATES = (
    (5, 7, 9, 8, 3, -3, -8, -9, -7, -3, 2, 5),
    (0, 1, 2, 3, 5, 7, 9, 6, 2, 1, 0, 0),
    (4, 7, 8, 6, 2, -2, -6, -8, -8, -4, 2, 6),
    (7, 9, 4, 1, 6, 9, 5, 0, -4, -8, -9, -5),
    (-2, -5, -8, -3, 3, 8, 8, 2, -2, 2, 6, 1),
    (8, 8, 7, 2, 4, 6, 3, -3, -7, -8, -4, 0),
    (9, 6, 2, -2, -6, -8, -5, 0, 4, 2, -3, -6),
    (6, 7, 8, 8, 9, 5, 1, -2, -5, -7, -8, -9),
    (3, 8, 3, -3, -8, -3, 3, 8, 3, -3, -8, -3),
    (-4, 1, 6, 8, 5, 0, 3, 7, 4, -2, -7, -9),
)


def signals(count: int, seed: int) -> "tuple[np.ndarray, np.ndarray]":
    """`count` signals, float32 [count, 40], and their digits, int64 [count], equally many of each.

    After Greydanus & Kobak 2024, "Scaling Down Deep Learning with MNIST-1D", section 2: a template of twelve
    points is padded, scaled, translated cyclically, disturbed by correlated and by white noise, sheared, and
    sampled at 40 points. The templates are our own.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    digit = random.permutation(np.arange(count) % len(TEMPLATES))
    length = TEMPLATE_POINTS + random.integers(PADDING_MIN, PADDING_MAX + 1, (count, 1))
    shift = random.random((count, 1)) * length
    place = (np.linspace(0, 1, SIGNAL_POINTS) * (length - 1) - shift) % length
    # A template is zero outside its points. One zero at each end lets one formula interpolate everywhere.
    heights = np.pad(np.array(TEMPLATES) / 10, ((0, 0), (1, 2)))
    place = np.minimum(place + 1, TEMPLATE_POINTS + 1)
    left = place.astype(np.int64)
    part = place - left
    row = digit[:, None]
    signal = heights[row, left] * (1 - part) + heights[row, left + 1] * part
    signal *= 1 + 0.4 * random.standard_normal((count, 1))

    distance = np.subtract.outer(np.arange(SIGNAL_POINTS), np.arange(SIGNAL_POINTS))
    smoothing = np.exp(-0.5 * (distance / 2.0) ** 2)
    smoothing /= np.linalg.norm(smoothing, axis=0)
    signal += 0.25 * random.standard_normal((count, SIGNAL_POINTS)) @ smoothing
    signal += 0.02 * random.standard_normal((count, SIGNAL_POINTS))
    signal += 0.75 * random.uniform(-1, 1, (count, 1)) * np.linspace(-0.5, 0.5, SIGNAL_POINTS)
    return signal.astype(np.float32), digit


def build(seed: int, settings: dict[str, float]) -> Task:
    """Signals and split are the same for every seed: a seed changes weights and order, not the task.

    The fraction `label_noise` of the training labels is replaced by random digits; held-out labels are
    correct.
    """
    import numpy as np
    import torch
    from torch import nn

    numbers = SPEC.settings | settings
    inputs, labels = signals(SPEC.examples + HELD_OUT, DATA_SEED)
    random = np.random.default_rng(DATA_SEED + 1)
    replaced = random.random(len(labels)) < numbers["label_noise"]
    replaced[:HELD_OUT] = False
    labels = np.where(replaced, random.integers(0, len(TEMPLATES), len(labels)), labels)
    signal, digit = torch.from_numpy(inputs)[:, None], torch.from_numpy(labels)

    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(32, 48, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(48, 64, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool1d(2),
        nn.Flatten(),
        nn.Linear(64 * 5, 10),
    )

    for layer in model:
        if isinstance(layer, nn.Conv1d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    return classification_task(
        model, (signal[HELD_OUT:], digit[HELD_OUT:]), (signal[:HELD_OUT], digit[:HELD_OUT]), numbers
    )
