"""`char-lm`: a recurrent model of the characters of Python's own help texts (`pydoc_data.topics`).

An example is a window of 16 characters. The noise scale grows fivefold during the training.

Measured with one replica: median (least to most) of 20 seeds at each batch size. All of them reached the
target.

    total batch        16 (M0)             32             64            128            256
    progress     425 (375-500)  451 (375-525)  451 (351-527)  430 (330-501)  382 (328-482)
    examples              6800           8720          11040          13952          17150
    CPU seconds            4.4            4.6            5.4            4.8            4.3

Noise scale, in examples, after a tenth of the training, after half of it, and at the target: 34, 107, 181.
"""

import hashlib
import math
import warnings
from typing import TYPE_CHECKING

from common.types import ApplicationSpec
from workloads.applications.interface import Task

if TYPE_CHECKING:
    import numpy as np

HELD_OUT = 640
WINDOW = 16
SPEC = ApplicationSpec(
    name="char-lm",
    optimizer="adamw",
    metric="held-out bits per character",
    metric_mode="min",
    target=2.8,
    target_min=2.5,
    target_max=5.0,
    initial_batch_size=16,
    max_batch_size=256,
    min_atomic_batch=4,
    max_atomic_batch=64,
    examples=25600,
    max_progress=3000.0,
    evaluate_every=25.0,
    settings={"learning_rate": 0.006, "dropout": 0.1},
)
SPLIT_SEED = 1
CHARACTERS = (SPEC.examples + HELD_OUT) * WINDOW + 1
CODES = 128
TEXT_SHA256 = "4753f8af24b0da13c41f37179ad945de0f53fb280cf223d1311fa97683b60599"
"""SHA-256 of the characters used, in the Python version for which the target was chosen."""


def build(seed: int, settings: dict[str, float]) -> Task:
    """The split is the same for every seed: a seed changes weights and order, not the task."""
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional

    numbers = SPEC.settings | settings

    class CharacterModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(CODES, 32)
            self.gru = nn.GRU(32, 96, batch_first=True)
            self.dropout = nn.Dropout(numbers["dropout"])
            self.head = nn.Linear(96, CODES)

        def forward(self, codes: torch.Tensor) -> torch.Tensor:
            """int64 [n, w] characters -> [n, w, 128] logits of the next character."""
            states, _ = self.gru(self.embedding(codes))
            logits: torch.Tensor = self.head(self.dropout(states))
            return logits

    codes = text_codes(_text())
    starts = np.random.default_rng(SPLIT_SEED).permutation(SPEC.examples + HELD_OUT) * WINDOW
    windows = torch.from_numpy(codes[starts[:, None] + np.arange(WINDOW + 1)].astype(np.int64))
    held_out, train = windows[:HELD_OUT], windows[HELD_OUT:]

    torch.manual_seed(seed)
    model = CharacterModel()

    def cross_entropy(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
        logits = model(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def loss(model: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, train[indices])

    def nats(model: nn.Module, indices: torch.Tensor) -> float:
        mean = cross_entropy(model, held_out[indices])
        return mean.item() * len(indices)

    return Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=numbers["learning_rate"]),
        train_examples=len(train),
        held_out_examples=len(held_out),
        loss=loss,
        metric_sum=nats,
        metric=lambda mean: mean / math.log(2),
        rate=lambda progress: 1.0,
    )


def text_codes(text: str) -> "np.ndarray":
    """ASCII codes of the first characters of `text`, uint8 [CHARACTERS]; "?" for a character that is not
    ASCII.

    Other versions of Python have slightly different texts. A replica then warns in its output and trains on
    them. All replicas of a job need the same text, so all nodes must have the same version of Python. Raises
    RuntimeError if the text is too short.
    """
    import numpy as np

    data = text.encode("ascii", "replace")[:CHARACTERS]
    if len(data) < CHARACTERS:
        raise RuntimeError(
            f"char-lm: the help texts of this Python have {len(data)} characters; {CHARACTERS} are needed"
        )
    digest = hashlib.sha256(data).hexdigest()
    if digest != TEXT_SHA256:
        warnings.warn(
            f"char-lm: the help texts of this Python (SHA-256 {digest[:12]}...) differ from those for which "
            f"the target was chosen ({TEXT_SHA256[:12]}..., Python 3.11.7); it may be easier or harder",
            stacklevel=2,
        )
    return np.frombuffer(data, dtype=np.uint8)


def _text() -> str:
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))
