"""What steps really took, against what a calibration measured of the same configurations. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
import polars as pl

from analysis.log.history import RunHistory
from analysis.run.placements import placed_samples
from common.lifecycle import UserError
from common.types import JobConfig, Struct
from workloads.files.measured_profile import MeasuredProfile


class StepTime(Struct, frozen=True):
    """One application in one configuration: mean seconds of a step, and seconds of the samples with it.
    `placement` has the replicas on each node, most first."""

    application: str
    placement: tuple[int, ...]
    config: JobConfig
    step_s: float
    weight_s: float


def step_times(run: RunHistory) -> tuple[StepTime, ...]:
    """Every configuration in which the run's jobs were timed."""
    seconds = pl.col("step_s") + pl.col("accumulation") * pl.col("accumulation_s")
    timed = placed_samples(run).with_columns(seconds=seconds)
    timed = timed.filter((pl.col("timed_steps") > 0) & (pl.col("window_s") > 0) & (pl.col("seconds") > 0))
    keys = ["application", "placement", "atomic_batch", "accumulation"]
    distinct = timed.select(keys).unique(maintain_order=True).with_row_index("key")
    key = timed.join(distinct, on=keys, maintain_order="left")["key"].to_numpy()
    window_s = timed["window_s"].to_numpy()
    weights_s = np.bincount(key, window_s, len(distinct)).tolist()
    steps = np.bincount(key, window_s / timed["seconds"].to_numpy(), len(distinct)).tolist()
    return tuple(
        StepTime(
            application=application,
            placement=tuple(placement),
            config=JobConfig(atomic_batch=atomic_batch, accumulation=accumulation),
            step_s=weight_s / count,
            weight_s=weight_s,
        )
        for (application, placement, atomic_batch, accumulation), weight_s, count in zip(
            distinct.drop("key").rows(), weights_s, steps, strict=True
        )
    )


def step_factors(
    steps: Iterable[StepTime], profiles: Mapping[str, MeasuredProfile]
) -> tuple[tuple[str, float], ...]:
    """(application, seconds that its steps took / seconds that as many steps take by its profile): how much
    slower the machine was than on the day of the profiles. Applications without a profile are left out."""
    seconds = sorted(_seconds(steps, profiles).items())
    return tuple((name, real_s / measured_s) for name, (real_s, measured_s) in seconds)


def step_factor(steps: Iterable[StepTime], profiles: Mapping[str, MeasuredProfile]) -> float | None:
    """The same for all applications together; None without a profile of any of them."""
    seconds = _seconds(steps, profiles).values()
    measured_s = sum(measured_s for _, measured_s in seconds)
    return sum(real_s for real_s, _ in seconds) / measured_s if measured_s else None


def _seconds(
    steps: Iterable[StepTime], profiles: Mapping[str, MeasuredProfile]
) -> dict[str, tuple[float, float]]:
    """By application: (seconds of its steps, seconds of as many steps by its profile), over the
    configurations that the profile has."""
    sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for step in steps:
        if measured := profiles.get(step.application):
            config = step.config
            try:
                known_s = measured.step_s(step.placement, config.atomic_batch, config.accumulation)
            except UserError:
                continue
            real_s, measured_s = sums[step.application]
            sums[step.application] = (
                real_s + step.weight_s,
                measured_s + step.weight_s * known_s / step.step_s,
            )
    return sums
