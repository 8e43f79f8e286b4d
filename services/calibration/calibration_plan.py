"""What `coadapt calibrate` measures, and how it condenses the measurements. Pure; times are in seconds."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from msgspec import structs

from common.protocol import TrainingSample
from common.types import ApplicationSpec, JobConfig, Struct

ATOMIC_FACTOR = 2
"""Between neighbouring local batch sizes of the grid."""
SMALL = 4
"""Up to this many replicas, or the slots of a node, every placement is measured; for larger groups, one
placement of each size."""


class EvaluationWindow(Struct, frozen=True):
    """The window of a sample, with the `count` of evaluations in it. `steps_s` is the part of the window that
    its steps take, by their median."""

    count: int
    window_s: float
    steps_s: float


class GridPoint(Struct, frozen=True):
    """The measurement of one configuration, by medians over live samples.

    `step_s` is the last pass of a step including synchronization and update, `sync_s` the all-reduce alone,
    `pass_s` a pass that only accumulates; `accumulated` says whether the steps have such passes. `quiet_s` is
    the time in windows without evaluations, `quiet_steps_s` the part of it that their steps take."""

    atomic: int
    step_s: float
    sync_s: float
    pass_s: float
    accumulated: bool
    steps: int
    quiet_s: float
    quiet_steps_s: float
    evaluations: tuple[EvaluationWindow, ...]


class MeasuredPlacement(Struct, frozen=True):
    """One placement with all its local batch sizes. `resize_s` is the time without a step during the change
    to this placement; None if the job started in it."""

    points: tuple[GridPoint, ...]
    resize_s: float | None = None


class PlannedTraining(Struct, frozen=True):
    """A training that gets its own process. `multiple` is its total batch size / M0."""

    application: str
    multiple: int
    seed: int
    target: float
    budget_examples: int
    modules: tuple[str, ...]


class CurveRow(Struct, frozen=True):
    """An evaluation of one training."""

    progress: float
    iteration: int
    metric: float
    sqr: float | None
    var: float | None
    trusted: float
    """1 if the statistics are trusted, else 0; after `merge_curves`, the fraction that is trusted."""


class Curve(Struct, frozen=True):
    """A training at one total batch size. `reached`: whether it ended at the hardest target."""

    rows: tuple[CurveRow, ...]
    reached: bool


class LifecycleTimes(Struct, frozen=True):
    """How long the start and the end of a real job took."""

    start_s: float
    """From the order for its first group to the beginning of its first step."""
    save_s: float
    """From the evaluation that met its target to its final checkpoint."""
    exit_s: float
    """From there until the replica was gone."""
    verify_s: float
    """From the start of the verifier to the completion."""


def placements(nodes: int, slots: int) -> list[tuple[int, ...]]:
    """Replicas on each node, largest first, in the order of measurement: the job grows and then shrinks."""
    on_one = [(n,) for n in range(1, slots + 1)]
    on_two = [(a, b) for a in range(1, slots + 1) for b in range(1, a + 1)] if nodes > 1 else []
    on_two.sort(key=lambda row: (-sum(row), row[0] - row[1]))
    chosen: list[tuple[int, ...]] = []
    for row in [*on_one, *on_two]:
        known = {(len(other), sum(other)) for other in chosen}
        if is_small(row, slots) or (len(row), sum(row)) not in known:
            chosen.append(row)
    return chosen


def is_small(placement: Sequence[int], slots: int) -> bool:
    return sum(placement) <= min(SMALL, slots)


def batch_configs(spec: ApplicationSpec, replicas: int) -> list[JobConfig]:
    """Configurations from the smallest to the largest local batch size that a job with so many replicas may
    have; empty if it may have none. They include accumulation in the two cases in which jobs use it: with the
    largest local batch, and with a single replica, which may do M0 in two passes."""
    passes = 2 if replicas == 1 else 1
    least = max(spec.min_atomic_batch, math.ceil(spec.initial_batch_size / (replicas * passes)))
    most = min(spec.max_atomic_batch, spec.max_batch_size // replicas)
    sizes = [least]
    while sizes[-1] * ATOMIC_FACTOR < most:
        sizes.append(sizes[-1] * ATOMIC_FACTOR)
    sizes += [most] if most > least else []
    found = [
        JobConfig(atomic_batch=size, accumulation=accumulation)
        for size in sizes
        for accumulation in (0, 1)
        if not accumulation or replicas == 1 or size == spec.max_atomic_batch
    ]
    return [
        config
        for config in found
        if spec.initial_batch_size <= config.total_batch(replicas) <= spec.max_batch_size
        and config.atomic_batch <= most
    ]


def unmeasurable(spec: ApplicationSpec, nodes: int, slots: int) -> str:
    """Why a profile of this application would lack one of the tables of step times; empty if it would not."""
    rows = [row for row in placements(nodes, slots) if batch_configs(spec, sum(row))]
    most = min(SMALL, slots)
    if not any(is_small(row, slots) for row in rows):
        return f"no group of at most {most} replicas can have a batch within its bounds"
    if all(is_small(row, slots) for row in rows):
        return f"no group of more than {most} replicas, which have a table of their own, can have its batches"
    return ""


def total_batch_sizes(spec: ApplicationSpec) -> list[int]:
    """M0, 2 M0, 4 M0 ... and the largest multiple of M0 in bounds."""
    initial, largest = spec.initial_batch_size, spec.max_batch_size // spec.initial_batch_size
    return sorted({*(initial << n for n in range(largest.bit_length())), initial * largest})


def plan_trainings(
    spec: ApplicationSpec, seeds: Sequence[int], modules: tuple[str, ...] = ()
) -> list[PlannedTraining]:
    """Trainings to the hardest target at every total batch size, limited by the application's budget."""
    return [
        PlannedTraining(
            application=spec.name,
            multiple=batch // spec.initial_batch_size,
            seed=seed,
            target=hardest_target(spec),
            budget_examples=round(spec.max_progress * batch),
            modules=modules,
        )
        for batch in total_batch_sizes(spec)
        for seed in seeds
    ]


def hardest_target(spec: ApplicationSpec) -> float:
    return spec.target_max if spec.metric_mode == "max" else spec.target_min


def easiest_target(spec: ApplicationSpec) -> float:
    return spec.target_min if spec.metric_mode == "max" else spec.target_max


def placement_code(placement: Sequence[int]) -> str:
    return "".join(map(str, placement))


# --------------------------------------------------------------------------- points


def grid_point(config: JobConfig, windows: Sequence[tuple[TrainingSample, int]]) -> GridPoint:
    """`windows` are samples, each with the number of evaluations in its window; at least one sample must have
    timed steps."""
    timed = [sample for sample, _ in windows if sample.timed_steps]
    step_s = median(sample.step_s for sample in timed)
    sync_s = median(sample.sync_s for sample in timed)
    settled = [(sample, count) for sample, count in windows if sample.timed_steps == sample.steps]
    quiet = [sample for sample, count in settled if not count]
    return GridPoint(
        atomic=config.atomic_batch,
        step_s=step_s,
        sync_s=sync_s,
        pass_s=median(sample.accumulation_s for sample in timed),
        accumulated=config.accumulation > 0,
        steps=sum(sample.timed_steps for sample in timed),
        quiet_s=sum(sample.window_s for sample in quiet),
        quiet_steps_s=sum(_steps_s(sample) for sample in quiet),
        evaluations=tuple(
            EvaluationWindow(count=count, window_s=sample.window_s, steps_s=_steps_s(sample))
            for sample, count in settled
            if count
        ),
    )


def _steps_s(sample: TrainingSample) -> float:
    return sample.steps * (sample.config.accumulation * sample.accumulation_s + sample.step_s)


def times_by_batch(measured: MeasuredPlacement) -> dict[int, tuple[float, float, float]]:
    """Times of a step, of its all-reduce and of a pass, by local batch size; from steps without accumulation
    if there are any."""
    found: dict[int, tuple[float, float, float]] = {}
    for point in measured.points:
        if not point.accumulated or point.atomic not in found:
            found[point.atomic] = point.step_s, point.sync_s, point.pass_s
    return found


# --------------------------------------------------------------------------- curves


def merge_curves(curves: Sequence[Curve], mode: str) -> list[CurveRow]:
    """The medians over the seeds of one total batch size, one row per evaluation.

    The metric of a row is the best so far, so the first row that meets a target has the median need of that
    target. A training that ended at the hardest target keeps its last metric. The rows end when the metric is
    no longer known for more than half of the trainings. A row without statistics gets those of the next row
    that has some."""
    best = max if mode == "max" else min
    rows: list[CurveRow] = []
    for number in range(max(len(curve.rows) for curve in curves)):
        there = [curve.rows[number] for curve in curves if len(curve.rows) > number]
        known = [curve.rows[: number + 1] for curve in curves if len(curve.rows) > number or curve.reached]
        if 2 * len(known) <= len(curves):
            break
        rows.append(
            CurveRow(
                progress=median(row.progress for row in there),
                iteration=round(median(row.iteration for row in there)),
                metric=median(best(row.metric for row in seen) for seen in known),
                sqr=_median([row.sqr for row in there]),
                var=_median([row.var for row in there]),
                trusted=fmean(row.trusted for row in there),
            )
        )
    return _filled(rows)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _filled(rows: Sequence[CurveRow]) -> list[CurveRow]:
    filled: list[CurveRow] = []
    later: CurveRow | None = None
    for row in reversed(rows):
        if row.sqr is not None:
            later = row
        elif later is not None:
            row = structs.replace(row, sqr=later.sqr, var=later.var)
        filled.append(row)
    return [row for row in reversed(filled) if row.sqr is not None]


# --------------------------------------------------------------------------- costs


def cost_table(
    grid: Mapping[tuple[int, ...], MeasuredPlacement], lifecycles: Sequence[LifecycleTimes]
) -> dict[str, float]:
    """The costs of one application for machine.toml, without those that were never observed."""
    points = [(sum(placement), point) for placement, measured in grid.items() for point in measured.points]
    quiet_steps_s = sum(point.quiet_steps_s for _, point in points)
    overhead = sum(point.quiet_s for _, point in points) / quiet_steps_s if quiet_steps_s else 1.0
    seen = {
        "start_s": [lifecycle.start_s for lifecycle in lifecycles],
        "resize_s": [measured.resize_s for measured in grid.values() if measured.resize_s is not None],
        "save_s": [lifecycle.save_s for lifecycle in lifecycles],
        "exit_s": [lifecycle.exit_s for lifecycle in lifecycles],
        "verify_s": [lifecycle.verify_s for lifecycle in lifecycles],
    }
    evaluations = [
        (replicas, max(some.window_s - overhead * some.steps_s, 0.0) / some.count)
        for replicas, point in points
        for some in point.evaluations
    ]
    if alone := [seconds for replicas, seconds in evaluations if replicas == 1]:
        slot_s = median(alone)
        seen["evaluation_slot_s"] = [slot_s]
        seen["evaluation_group_s"] = [
            max(seconds - slot_s / replicas, 0.0) for replicas, seconds in evaluations if replicas > 1
        ]
    return {name: median(values) for name, values in seen.items() if values} | {"step_overhead": overhead}
