"""What steps really took, and what was measured of the same configurations by a calibration. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from analysis.log.history import RunHistory
from analysis.run.batches import placements
from common.lifecycle import UserError
from common.types import JobConfig, Struct
from workloads.files.measured_profile import MeasuredProfile


class StepTime(Struct, frozen=True):
    """Of one application in one configuration: mean seconds of a step, and seconds of samples with it.
    `placement` has the replicas on each node, the most first."""

    application: str
    placement: tuple[int, ...]
    config: JobConfig
    step_s: float
    weight_s: float


def step_times(run: RunHistory) -> tuple[StepTime, ...]:
    """Of every configuration in which its jobs were timed."""
    sums: dict[tuple[str, tuple[int, ...], JobConfig], list[float]] = {}
    for job in run.jobs.values():
        placement_of = placements(job)
        for _, sample in job.samples:
            placement = placement_of(sample)
            step_s = sample.step_s + sample.config.accumulation * sample.accumulation_s
            if sample.timed_steps > 0 and sample.window_s > 0 and step_s > 0 and placement is not None:
                key = (job.spec.application, placement, sample.config)
                held = sums.setdefault(key, [0.0, 0.0])
                held[0] += sample.window_s
                held[1] += sample.window_s / step_s
    return tuple(StepTime(*key, weight_s / steps, weight_s) for key, (weight_s, steps) in sums.items())


def step_factors(
    steps: Iterable[StepTime], profiles: Mapping[str, MeasuredProfile]
) -> tuple[tuple[str, float], ...]:
    """By application, the seconds that its steps took over those that as many would have taken by what was
    measured of the same configurations: how much slower the machine was than on the day of the profiles.
    Nothing of an application of which nothing was measured."""
    return tuple(
        (name, real_s / told_s) for name, (real_s, told_s) in sorted(_seconds(steps, profiles).items())
    )


def step_factor(steps: Iterable[StepTime], profiles: Mapping[str, MeasuredProfile]) -> float | None:
    """The same of all applications together; None where nothing was measured of any of them."""
    seconds = _seconds(steps, profiles).values()
    told_s = sum(told_s for _, told_s in seconds)
    return sum(real_s for real_s, _ in seconds) / told_s if told_s else None


def _seconds(
    steps: Iterable[StepTime], profiles: Mapping[str, MeasuredProfile]
) -> dict[str, tuple[float, float]]:
    """By application, as they were, and by its profile; without configurations that it says nothing of."""
    sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for step in steps:
        if measured := profiles.get(step.application):
            config = step.config
            try:
                known_s = measured.step_s(step.placement, config.atomic_batch, config.accumulation)
            except UserError:
                continue
            real_s, told_s = sums[step.application]
            sums[step.application] = (
                real_s + step.weight_s,
                told_s + step.weight_s * known_s / step.step_s,
            )
    return sums
