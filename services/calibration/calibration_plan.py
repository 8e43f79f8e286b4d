"""What `coadapt calibrate` measures, and what it makes of it: pure sums. Times are seconds."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from msgspec import structs

from common.protocol import TrainingSample
from common.types import ApplicationSpec, JobConfig, Struct

ATOMIC_FACTOR = 2
"""Between neighbouring local batches of the grid."""
SMALL = 4
"""Replicas up to which every placement is measured, unless a node has fewer slots; of larger groups one for
each size."""


class Evaluations(Struct, frozen=True):
    """A window of a sample in which there were evaluations."""

    count: int
    window_s: float
    steps_s: float
    """What its steps take, by their median."""


class GridPoint(Struct, frozen=True):
    """One configuration, in the terms of live samples: medians of the last pass of a step with its
    synchronisation and update, of the all-reduce alone, and of a pass by itself."""

    atomic: int
    step_s: float
    sync_s: float
    pass_s: float
    accumulated: bool
    """Whether its steps have passes that only accumulate."""
    steps: int
    quiet_s: float
    """Windows without evaluations, and what their steps take by their medians."""
    quiet_steps_s: float
    evaluations: tuple[Evaluations, ...]


class Placed(Struct, frozen=True):
    """One placement, with all its local batches. `resize_s` is what the change to it has cost, in seconds
    without a step; None where the job has started with it."""

    points: tuple[GridPoint, ...]
    resize_s: float | None = None


class PlannedTraining(Struct, frozen=True):
    """One to be made in a process of its own."""

    application: str
    multiple: int
    """Total batch / M0."""
    seed: int
    target: float
    budget_examples: int
    modules: tuple[str, ...]


class Row(Struct, frozen=True):
    """An evaluation of one training."""

    progress: float
    iteration: int
    metric: float
    sqr: float | None
    var: float | None
    trusted: float
    """1 where the statistics were; of several trainings, their share."""


class Curve(Struct, frozen=True):
    """A training at one total batch; `reached` says whether it ended with the hardest target."""

    rows: tuple[Row, ...]
    reached: bool


class Life(Struct, frozen=True):
    """What a real job's start and end took."""

    start_s: float
    """From the order for its first group to the beginning of its first step."""
    save_s: float
    """From the evaluation that met its target to its final checkpoint."""
    exit_s: float
    """From there until the replica had gone."""
    verify_s: float
    """From the start of the verifier to the completion."""


def placements(nodes: int, slots: int) -> list[tuple[int, ...]]:
    """Replicas on each node, the most first, in the order in which they are measured: a job grows, and
    shrinks again."""
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


def configs(spec: ApplicationSpec, replicas: int) -> list[JobConfig]:
    """Local batches from the least to the largest that jobs of so many replicas have; empty where there is
    none. Passes are accumulated as well where jobs do so: with the largest local batch, and by one replica
    alone, which may take M0 in two passes."""
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
    """Why a profile of it would lack one of the tables of step times; empty where it would not."""
    rows = [row for row in placements(nodes, slots) if configs(spec, sum(row))]
    most = min(SMALL, slots)
    if not any(is_small(row, slots) for row in rows):
        return f"no group of at most {most} replicas can have a batch within its bounds"
    if all(is_small(row, slots) for row in rows):
        return f"no group of more than {most} replicas, which have a table of their own, can have its batches"
    return ""


def totals(spec: ApplicationSpec) -> list[int]:
    """M0, 2 M0, 4 M0 ... and the largest multiple of M0 in bounds."""
    initial, largest = spec.initial_batch_size, spec.max_batch_size // spec.initial_batch_size
    return sorted({*(initial << n for n in range(largest.bit_length())), initial * largest})


def trainings(
    spec: ApplicationSpec, seeds: Sequence[int], modules: tuple[str, ...] = ()
) -> list[PlannedTraining]:
    """To the hardest target at every total batch, as long as the declared progress may take."""
    return [
        PlannedTraining(
            application=spec.name,
            multiple=batch // spec.initial_batch_size,
            seed=seed,
            target=hardest(spec),
            budget_examples=round(spec.max_progress * batch),
            modules=modules,
        )
        for batch in totals(spec)
        for seed in seeds
    ]


def hardest(spec: ApplicationSpec) -> float:
    return spec.target_max if spec.metric_mode == "max" else spec.target_min


def easiest(spec: ApplicationSpec) -> float:
    return spec.target_min if spec.metric_mode == "max" else spec.target_max


def digits(placement: Sequence[int]) -> str:
    return "".join(map(str, placement))


# --------------------------------------------------------------------------- points


def point(config: JobConfig, windows: Sequence[tuple[TrainingSample, int]]) -> GridPoint:
    """Of at least one sample with timed steps, each with the number of evaluations in its window."""
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
            Evaluations(count=count, window_s=sample.window_s, steps_s=_steps_s(sample))
            for sample, count in settled
            if count
        ),
    )


def _steps_s(sample: TrainingSample) -> float:
    return sample.steps * (sample.config.accumulation * sample.accumulation_s + sample.step_s)


def times(placed: Placed) -> dict[int, tuple[float, float, float]]:
    """Of a step, of the all-reduce in it and of a pass, by local batch: without accumulation where there are
    such steps."""
    found: dict[int, tuple[float, float, float]] = {}
    for point in placed.points:
        if not point.accumulated or point.atomic not in found:
            found[point.atomic] = point.step_s, point.sync_s, point.pass_s
    return found


# --------------------------------------------------------------------------- curves


def merge(curves: Sequence[Curve], mode: str) -> list[Row]:
    """Medians over seeds, a row an evaluation, the metric being the best so far: the first row that meets a
    target is the median need. A training that ended with the hardest target keeps its metric; rows go as far
    as the metric of more than half of the trainings is known. Statistics that nobody had yet are those of
    the next row that has some."""
    best = max if mode == "max" else min
    rows: list[Row] = []
    for number in range(max(len(curve.rows) for curve in curves)):
        there = [curve.rows[number] for curve in curves if len(curve.rows) > number]
        known = [curve.rows[: number + 1] for curve in curves if len(curve.rows) > number or curve.reached]
        if 2 * len(known) <= len(curves):
            break
        rows.append(
            Row(
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


def _filled(rows: Sequence[Row]) -> list[Row]:
    filled: list[Row] = []
    later: Row | None = None
    for row in reversed(rows):
        if row.sqr is not None:
            later = row
        elif later is not None:
            row = structs.replace(row, sqr=later.sqr, var=later.var)
        filled.append(row)
    return [row for row in reversed(filled) if row.sqr is not None]


# --------------------------------------------------------------------------- costs


def costs(grid: Mapping[tuple[int, ...], Placed], lives: Sequence[Life]) -> dict[str, float]:
    """Of one application: its table of machine.toml, but for what nothing was seen of."""
    points = [(sum(placement), point) for placement, placed in grid.items() for point in placed.points]
    quiet_steps_s = sum(point.quiet_steps_s for _, point in points)
    overhead = sum(point.quiet_s for _, point in points) / quiet_steps_s if quiet_steps_s else 1.0
    seen = {
        "start_s": [life.start_s for life in lives],
        "resize_s": [placed.resize_s for placed in grid.values() if placed.resize_s is not None],
        "save_s": [life.save_s for life in lives],
        "exit_s": [life.exit_s for life in lives],
        "verify_s": [life.verify_s for life in lives],
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
