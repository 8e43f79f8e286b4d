"""The goodput of a job as a function of its replicas, their nodes and its batch (Pollux, section 3).

    goodput(a, m, s) = throughput(a, m, s) x efficiency(M)     in useful examples per second   (eq. 6)

for an allocation `a`, an atomic batch size `m`, `s` accumulation passes, and M = replicas x m x (s + 1). All
functions take numbers or numpy arrays and broadcast them.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from common.types import (
    GradientStatistics,
    JobConfig,
    JobSpec,
    Struct,
    ThroughputParameters,
    split_batch,
)

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = float | IntArray | FloatArray

ALONE_S = 1e-8
"""Synchronisation time of a single replica: positive only because the model takes its logarithm."""
GRID_POINTS = 50
"""Batch sizes that `best_batch` tries."""


class BatchBounds(Struct, frozen=True):
    """The batch sizes that a job may have, in examples."""

    initial: int
    """M0, also the smallest total batch."""
    maximum: int
    """The largest total batch."""
    min_atomic: int
    max_atomic: int
    only: int = 0
    """If not 0, the only total batch size allowed; it is split as `batch_config` does."""

    accumulates_alone: bool = False
    """Whether a single replica above M0 must accumulate at least once."""

    @staticmethod
    def of(spec: JobSpec, accumulates_alone: bool = False) -> "BatchBounds":
        """The bounds of a job."""
        return BatchBounds(
            initial=spec.min_batch_size,
            maximum=spec.max_batch_size,
            min_atomic=spec.min_atomic_batch,
            max_atomic=spec.max_atomic_batch,
            accumulates_alone=accumulates_alone,
        )

    @property
    def max_replicas(self) -> int:
        """The most replicas that can each get `min_atomic` examples."""
        return self.maximum // self.min_atomic


def accumulation_time(parameters: ThroughputParameters, atomic: Numbers) -> FloatArray:
    """Seconds of one forward and backward pass over `atomic` examples (T_grad, eq. 8)."""
    return np.asarray(parameters.alpha_c + parameters.beta_c * np.asarray(atomic, dtype=float))


def network_time(parameters: ThroughputParameters, nodes: Numbers, replicas: Numbers) -> FloatArray:
    """Seconds of synchronising gradients (T_sync, eq. 9): with (alpha_r, beta_r) within one node, with
    (alpha_n, beta_n) across nodes, and almost nothing for one replica."""
    many, together = np.asarray(nodes) > 1, np.asarray(replicas) > 1
    alpha = np.where(many, parameters.alpha_n, np.where(together, parameters.alpha_r, ALONE_S))
    beta = np.where(many, parameters.beta_n, np.where(together, parameters.beta_r, ALONE_S))
    return np.asarray(alpha + beta * np.maximum(np.asarray(replicas) - 2, 1e-8))


def last_pass_time(
    parameters: ThroughputParameters, nodes: Numbers, replicas: Numbers, atomic: Numbers
) -> FloatArray:
    """Seconds of the last pass of a step, in which computing and synchronising overlap (T_iter, eq. 10), with
    the update."""
    gamma = parameters.gamma
    compute = gamma * np.log(accumulation_time(parameters, atomic))
    network = gamma * np.log(network_time(parameters, nodes, replicas))
    return np.asarray(np.exp(np.logaddexp(compute, network) / gamma) + parameters.update_s)


def step_time(
    parameters: ThroughputParameters,
    nodes: Numbers,
    replicas: Numbers,
    atomic: Numbers,
    accumulation: Numbers,
) -> FloatArray:
    """Seconds of a step: `accumulation` passes that only accumulate, and the last pass (eq. 11)."""
    passes = np.asarray(accumulation) * accumulation_time(parameters, atomic)
    return np.asarray(passes + last_pass_time(parameters, nodes, replicas, atomic))


def throughput(
    parameters: ThroughputParameters,
    nodes: Numbers,
    replicas: Numbers,
    atomic: Numbers,
    accumulation: Numbers,
) -> FloatArray:
    """Examples per second (eq. 7)."""
    batch = np.asarray(replicas) * np.asarray(atomic) * (np.asarray(accumulation) + 1)
    return np.asarray(batch / step_time(parameters, nodes, replicas, atomic, accumulation))


def gain(statistics: GradientStatistics, scale: Numbers) -> FloatArray:
    """AdaScale's gain r(S) = (var + sqr) / (var / S + sqr), in [1, S]: how many steps at M0 one step at
    `scale` S, that is of S x M0 examples, is worth (Johnson et al. 2020, section 3.2).

    Statistics that are impossible (negative or not finite) give a gain of 1.
    """
    scale = np.asarray(scale, dtype=float)
    sqr, var = statistics.sqr, statistics.var
    if not (math.isfinite(sqr + var) and sqr >= 0.0 and var > 0.0):
        return np.ones_like(scale)
    return np.asarray(np.minimum(np.maximum((var + sqr) / (var / scale + sqr), 1.0), scale))


def efficiency(statistics: GradientStatistics | None, scale: Numbers) -> FloatArray:
    """Progress per example relative to M0 (Pollux, eq. 5): gain / scale. Without statistics it is 1."""
    scale = np.asarray(scale, dtype=float)
    if statistics is None:
        return np.ones_like(scale)
    return np.asarray(gain(statistics, scale) / scale)


def goodput(
    parameters: ThroughputParameters,
    statistics: GradientStatistics | None,
    initial_batch: int,
    nodes: Numbers,
    replicas: Numbers,
    atomic: Numbers,
    accumulation: Numbers,
) -> FloatArray:
    """Useful examples per second. Without statistics this is the throughput."""
    batch = np.asarray(replicas) * np.asarray(atomic) * (np.asarray(accumulation) + 1)
    rate = throughput(parameters, nodes, replicas, atomic, accumulation)
    return np.asarray(rate * efficiency(statistics, batch / initial_batch))


@dataclass(frozen=True, eq=False)
class BestBatch:
    """The best batch for each (nodes, replicas). All three arrays have their broadcast shape.

    If no batch is within the bounds, goodput and atomic batch are 0."""

    goodput: FloatArray
    atomic_batch: IntArray
    accumulation: IntArray


def best_batch(
    bounds: BatchBounds,
    parameters: ThroughputParameters,
    statistics: GradientStatistics | None,
    nodes: Numbers,
    replicas: Numbers,
) -> BestBatch:
    """The batch with the largest goodput (Pollux, eq. 13), on a geometric grid of total batch sizes:
    GRID_POINTS from max(M0, min_atomic x replicas) to the maximum."""
    nodes, replicas = np.broadcast_arrays(np.asarray(nodes), np.asarray(replicas))
    counts = tuple(replicas.ravel().tolist())
    rates = _grid_throughput(bounds, parameters, tuple(nodes.ravel().tolist()), counts)
    return _choose(rates, statistics, _grid(bounds, counts), replicas.shape)


def best_batches(
    bounds: BatchBounds,
    parameters: ThroughputParameters,
    statistics: GradientStatistics | None,
    most: int,
) -> BestBatch:
    """`best_batch` of 1..most replicas on one node (first row) and across nodes (second row): [2, most]."""
    nodes, counts = _within_and_across(most)
    rates = _grid_throughput(bounds, parameters, nodes, counts)
    return _choose(rates, statistics, _grid(bounds, counts), (2, most))


@lru_cache(maxsize=256)
def _within_and_across(most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (1,) * most + (2,) * most, (*range(1, most + 1), *range(1, most + 1))


def _choose(
    rates: FloatArray, statistics: GradientStatistics | None, grid: "BatchGrid", shape: tuple[int, ...]
) -> BestBatch:
    value = rates if statistics is None else rates * efficiency(statistics, grid.scale)
    best = value.argmax(axis=1)
    rows = np.arange(len(best))
    reached = value[rows, best]
    possible = reached > 0
    return BestBatch(
        goodput=reached.reshape(shape),
        atomic_batch=(grid.atomic[rows, best] * possible).reshape(shape),
        accumulation=(grid.accumulation[rows, best] * possible).reshape(shape),
    )


@dataclass(frozen=True, eq=False)
class BatchGrid:
    """The batches to choose from, arrays [replica counts, batches]. `scale` is total batch / M0."""

    atomic: IntArray
    accumulation: IntArray
    scale: FloatArray
    allowed: npt.NDArray[np.bool_]


@lru_cache(maxsize=2048)
def _grid_throughput(
    bounds: BatchBounds, parameters: ThroughputParameters, nodes: tuple[int, ...], replicas: tuple[int, ...]
) -> FloatArray:
    """Examples per second, [replica counts, batches], 0 where the batch is not allowed. Cached: a job's
    gradient statistics change all the time, its step times rarely."""
    grid = _grid(bounds, replicas)
    where = np.array(nodes)[:, None], np.array(replicas)[:, None]
    return np.where(
        grid.allowed, throughput(parameters, *where, np.maximum(grid.atomic, 1), grid.accumulation), 0.0
    )


@lru_cache(maxsize=256)
def _grid(bounds: BatchBounds, replicas: tuple[int, ...]) -> BatchGrid:
    count = np.array(replicas, dtype=np.int64)[:, None]
    if bounds.only:
        splits = [_only_split(bounds, n) for n in replicas]
        atomic = np.array([[split.atomic_batch] for split in splits])
        accumulation = np.array([[split.accumulation] for split in splits])
        return _checked_grid(bounds, count, atomic, accumulation)
    smallest = np.maximum(bounds.initial, bounds.min_atomic * count)
    spread = np.linspace(0.0, 1.0, GRID_POINTS)
    total = smallest * (np.maximum(bounds.maximum, smallest) / smallest) ** spread
    local = total / count
    accumulation = np.ceil(local / bounds.max_atomic - 1e-8).astype(np.int64) - 1
    if bounds.accumulates_alone:
        alone_above_m0 = (count == 1) & (total > bounds.initial + 1e-8)
        accumulation = np.where(alone_above_m0, np.maximum(accumulation, 1), accumulation)
    atomic = np.ceil(local / (accumulation + 1) - 1e-8).astype(np.int64)
    # Rounding up must not take the total past the maximum. After this it may be below M0.
    atomic = np.minimum(atomic, bounds.maximum // (count * (accumulation + 1)))
    return _checked_grid(bounds, count, atomic, accumulation)


def _only_split(bounds: BatchBounds, replicas: int) -> JobConfig:
    totals, atomics = (bounds.initial, bounds.maximum), (bounds.min_atomic, bounds.max_atomic)
    try:
        return split_batch(bounds.only, replicas, totals, atomics)
    except ValueError:
        return JobConfig(atomic_batch=0)


def _checked_grid(
    bounds: BatchBounds, count: IntArray, atomic: IntArray, accumulation: IntArray
) -> BatchGrid:
    allowed = (bounds.min_atomic <= atomic) & (atomic <= bounds.max_atomic)
    batch = count * atomic * (accumulation + 1)
    allowed &= batch >= bounds.initial
    # A batch that is not allowed needs some valid scale; M0 is as good as any.
    scale = np.where(allowed, batch, bounds.initial) / bounds.initial
    return BatchGrid(atomic=atomic, accumulation=accumulation, scale=scale, allowed=allowed)
