"""Measured profiles of applications: what `coadapt calibrate` writes, read again.

    profiles/machine.toml                    where it was measured, and what starts, resizes and checks cost
    profiles/<app>/placements.csv            placement,local_bsz,step_time,sync_time[,pass_time]
    profiles/<app>/scalability.csv           num_nodes,num_replicas,local_bsz,step_time,sync_time[,pass_time]
    profiles/<app>/validation-<batch>.csv    progress,iteration,metric,grad_sqr,grad_var[,trusted]

The columns are those of the traces that were published with Pollux. A placement's digits are the replicas on
each of its nodes, in any rotation. Times are seconds on one slot of the machine, for the last pass of a step,
for the all-reduce that is part of it, and for a pass by itself (where that is not there, the former less the
latter). Validation has one row an evaluation: the best metric so far, and the gradient
statistics, when trained at that total batch size, and which part of the trainings had statistics that could
be trusted by then (where that is not there, all); progress is in AdaScale steps.

A paced replica saves CPU time while it waits for others in the all-reduce, and spends it in the next pass: a
step of a group may well take less than a pass and the all-reduce after each other.
"""

import csv
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from common.lifecycle import UserError
from common.types import ApplicationSpec, GradientStatistics

PROFILES = Path(__file__).parents[1] / "profiles"
"""Those of our own applications."""
MACHINE_FILE = "machine.toml"
TIMES = "step_time,sync_time"
PASS = "pass_time"

Placement = tuple[int, ...]
"""Replicas on each node."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What an application's jobs cost beside their steps; seconds, but for a ratio."""

    start_s: float
    """From the order for a job's first group to the beginning of its first step."""
    resize_s: float
    """Without a step, when a group is formed anew in place and its newcomers are ready."""
    verify_s: float
    """From the start of the verifier to the verified completion."""
    evaluation_slot_s: float
    """Of one replica that evaluates alone; several share the work."""
    evaluation_group_s: float = 0.0
    """What an evaluation by several takes beside their shares."""
    save_s: float = 0.0
    """To save the state of a job whose replicas leave."""
    exit_s: float = 0.0
    """From a replica's last act to its slot being free."""
    step_overhead: float = 1.0
    """Mean over median time of a step, evaluations left out: what is told of steps are medians."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where profiles were measured. What else the file says is not read here."""

    slot_speed: float
    nodes: int
    slots: int
    """Of a node."""
    applications: dict[str, Costs]


def read_machine(folder: Path) -> Machine:
    """Raises UserError naming the file, the field and what is needed."""
    path = folder / MACHINE_FILE
    try:
        machine = msgspec.toml.decode(path.read_bytes(), type=Machine)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}; `coadapt calibrate` writes the profiles"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from error
    if not 0 < machine.slot_speed <= 1:
        raise UserError(f"{path}: slot_speed {machine.slot_speed}: allowed: above 0, at most 1")
    if min(machine.nodes, machine.slots) < 1:
        raise UserError(f"{path}: nodes {machine.nodes}, slots {machine.slots}: allowed: at least 1")
    for name, costs in machine.applications.items():
        for field, seconds in msgspec.structs.asdict(costs).items():
            if not 0 <= seconds < math.inf:
                raise UserError(f"{path}: applications.{name}: {field} {seconds}: allowed: from 0 on")
        if not costs.step_overhead:
            raise UserError(
                f"{path}: applications.{name}: step_overhead 0: allowed: above 0, as it is a ratio"
            )
    return machine


def read_profiles(
    folder: Path,
    applications: Mapping[str, ApplicationSpec],
    step_factors: Mapping[str, float] | None = None,
) -> dict[str, "MeasuredProfile"]:
    """The profiles of those of the applications that were measured, by name. `step_factors`: what some of
    them take for a step on another day, over what was measured.

    Raises UserError naming the file, the line and what is needed, also where there is none of them."""
    costs = read_machine(folder).applications
    factors = step_factors or {}
    found = {
        name: MeasuredProfile(folder / name, spec, costs[name], factors.get(name, 1.0))
        for name, spec in applications.items()
        if name in costs
    }
    if not found:
        raise UserError(
            f"{folder / MACHINE_FILE}: [applications] has {', '.join(costs) or 'none'}; needed: at least one "
            f"of {', '.join(applications)}"
        )
    return found


def read_columns(path: Path, columns: str, optional: str = "") -> list[list[float]]:
    """These columns of a table, as numbers, and the optional one where there is one. Raises UserError naming
    the file and the line."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            names = columns.split(",")
            if optional and optional in (reader.fieldnames or ()):
                names.append(optional)
            rows = [[float(row[name]) for name in names] for row in reader]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: line {reader.line_num}: needs numbers under {columns}") from error
    if not rows or not np.all(np.isfinite(rows)) or np.min(rows) < 0:
        raise UserError(f"{path}: needs rows of finite numbers, none below 0, under {columns}")
    return rows


def validation_files(folder: Path) -> dict[int, Path]:
    """By total batch size, in order. Raises UserError where there is none."""
    files = {
        int(batch): path
        for path in folder.glob("validation-*.csv")
        if (batch := path.stem.removeprefix("validation-")).isdecimal()
    }
    if not files:
        raise UserError(f"{folder}: no validation-<batch>.csv in it")
    return dict(sorted(files.items()))


class StepTimes:
    """Step times of one application, read from a folder of its profile.

    A placement that was measured is interpolated over the local batch; any other one by `elsewhere`."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError."""
        self.folder = folder
        placements = _read_times(folder / "placements.csv", "placement,local_bsz")
        scalability = _read_times(folder / "scalability.csv", "num_nodes,num_replicas,local_bsz")
        self.local_sizes = [int(row[1]) for row in placements]
        self.measured: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        groups: dict[tuple[int, int, int], list[tuple[float, ...]]] = defaultdict(list)
        for digits, size, *times in placements:
            placement = tuple(map(int, str(int(digits))))
            self.measured[_key(placement)].append((size, *times))
            nodes = sum(count > 0 for count in placement)
            groups[nodes, sum(placement), int(size)].append(tuple(times))
        self.points = [(*key, *np.mean(groups[key], axis=0)) for key in sorted(groups)]
        self.points += [tuple(row) for row in scalability]
        """(nodes, replicas, local batch, times...), means over the placements of a group."""
        self._known: dict[tuple[Placement, int], tuple[float, ...]] = {}
        self._groups: dict[int, dict[int, list[tuple[float, ...]]]] = {}

    def times(self, placement: Placement, atomic: int) -> tuple[float, ...]:
        """Of a step's last pass, of the synchronisation in it, and of a pass that only accumulates."""
        known = self._known.get((placement, atomic))
        if known is None:
            rows = self.measured.get(_key(placement))
            known = _over_sizes(rows, atomic) if rows else self.elsewhere(placement, atomic)
            if not known[0] > known[1]:
                raise self.unknown(placement, atomic)
            self._known[placement, atomic] = known
        return known

    def elsewhere(self, placement: Placement, atomic: int) -> tuple[float, ...]:
        """On as many nodes, or on the most that were measured: linear between the next smaller and the next
        larger group. Raises UserError for a larger one than was measured."""
        if not self._groups:
            for nodes, replicas, *row in sorted(self.points):
                self._groups.setdefault(int(nodes), {}).setdefault(int(replicas), []).append(tuple(row))
        wanted = sum(placement)
        groups = self._groups.get(min(len(placement), max(self._groups)), {})
        above = min((count for count in groups if count >= wanted), default=None)
        if above is None:
            raise self.unknown(placement, atomic)
        below = max((count for count in groups if count <= wanted), default=above)
        low, high = (_over_sizes(groups[count], atomic) for count in (below, above))
        share = (wanted - below) / (above - below) if above > below else 0.0
        return tuple(a + share * (b - a) for a, b in zip(low, high, strict=True))

    def unknown(self, placement: Placement, atomic: int) -> UserError:
        return UserError(
            f"{self.folder.name}: the tables say nothing of {sum(placement)} replicas on {len(placement)} "
            f"nodes with {atomic} examples a pass"
        )


def _read_times(path: Path, keys: str) -> list[list[float]]:
    """Rows of these columns and the three times. Raises UserError."""
    rows = read_columns(path, f"{keys},{TIMES}", PASS)
    passes = len(rows[0]) > len(f"{keys},{TIMES}".split(","))
    return rows if passes else [[*row, row[-2] - row[-1]] for row in rows]


def _key(placement: Placement) -> str:
    """Its digits in the smallest rotation, without zeros."""
    filled = tuple(count for count in placement if count)
    return "".join(map(str, min((filled[i:] + filled[:i] for i in range(len(filled))), default=())))


def _over_sizes(rows: Sequence[tuple[float, ...]], atomic: int) -> tuple[float, ...]:
    sizes, *times_s = np.array(rows).T
    return tuple(float(np.interp(atomic, sizes, seconds)) for seconds in times_s)


class _Course(msgspec.Struct, frozen=True):
    """Trainings at one total batch: metric and statistics over progress, which grows."""

    progress: list[float]
    metric: list[float]
    sqr: list[float]
    var: list[float]
    trusted: list[float]
    first_gain: float
    """Of the steps up to the first row, on average."""

    def at(self, progress: float) -> tuple[float, float, float, float]:
        """Metric, square, variance, trusted part; linear between the rows, constant before and after them."""
        k = bisect_right(self.progress, progress)
        low, high = max(k - 1, 0), min(k, len(self.progress) - 1)
        begin, end = self.progress[low], self.progress[high]
        share = (progress - begin) / (end - begin) if end > begin else 0.0
        metric, sqr, var, trusted = (
            values[low] + share * (values[high] - values[low])
            for values in (self.metric, self.sqr, self.var, self.trusted)
        )
        return metric, sqr, var, trusted


class MeasuredProfile:
    """An application as it was measured."""

    def __init__(self, folder: Path, spec: ApplicationSpec, costs: Costs, step_factor: float = 1.0) -> None:
        """Raises UserError."""
        self.spec, self.costs, self.step_factor = spec, costs, step_factor
        self._times = StepTimes(folder)
        self.most_replicas = int(max(point[1] for point in self._times.points))
        """The largest group that was measured."""
        self._courses = {batch: _read_course(path) for batch, path in validation_files(folder).items()}
        self.batches = tuple(self._courses)
        """The total batch sizes that were trained with, in order."""
        self._between: dict[int, _Course] = {}

    def times(self, placement: Placement, atomic: int) -> tuple[float, float]:
        """Seconds of the last pass of a step, and of the synchronisation that is part of it."""
        step_s, sync_s, _ = self._times.times(placement, atomic)
        return self.step_factor * step_s, self.step_factor * sync_s

    def pass_s(self, placement: Placement, atomic: int) -> float:
        """Seconds of a pass that only accumulates."""
        return self.step_factor * self._times.times(placement, atomic)[2]

    def step_s(self, placement: Placement, atomic: int, accumulation: int) -> float:
        """Median seconds of a whole step."""
        last_s = self.times(placement, atomic)[0]
        return last_s + accumulation * self.pass_s(placement, atomic) if accumulation else last_s

    def mean_step_s(self, placement: Placement, atomic: int, accumulation: int) -> float:
        """What steps take one after the other, evaluations left out."""
        return self.step_s(placement, atomic, accumulation) * self.costs.step_overhead

    def evaluation_s(self, replicas: int) -> float:
        beside_s = self.costs.evaluation_group_s if replicas > 1 else 0.0
        return self.step_factor * (self.costs.evaluation_slot_s / replicas + beside_s)

    def gain(self, batch: int, progress: float, scale: float) -> float:
        """Of a step at this scale, which is that of the batch but for the last step of an epoch: AdaScale's,
        as common.goodput.model has it for arrays; before the first row, whose statistics are of later, at
        most what the steps up to there were worth on average."""
        course = self._course(batch)
        _, sqr, var, _ = course.at(progress)
        gain = (var + sqr) / (var / scale + sqr)
        return min(gain, course.first_gain) if progress < course.progress[0] else gain

    def statistics(self, batch: int, progress: float) -> GradientStatistics:
        """When trained at this total batch up to this progress; trusted if those of half the jobs were."""
        _, sqr, var, trusted = self._course(batch).at(progress)
        return GradientStatistics(sqr=sqr, var=var, trusted=trusted >= 0.5)

    def metric(self, batch: int, progress: float) -> float:
        """The best metric up to this progress."""
        return self._course(batch).at(progress)[0]

    def needed_progress(self, batch: int, target: float) -> float:
        """The median progress at which an evaluation first meets the target; infinity where none did. For a
        batch between two that were trained with, linear between theirs, where both met it."""
        low, high, share = self._neighbours(batch)
        below, above = (self._need(self._courses[b], target) for b in (low, high))
        if share == 0 or below == above:
            return below
        return math.inf if math.inf in (below, above) else below + share * (above - below)

    def _need(self, course: _Course, target: float) -> float:
        better = self.spec.metric_mode == "max"
        meets = (
            progress
            for progress, metric in zip(course.progress, course.metric, strict=True)
            if (metric >= target if better else metric <= target)
        )
        return next(meets, math.inf)

    def _course(self, batch: int) -> _Course:
        """Between two batches that were trained with: linear between theirs, at equal progress."""
        known = self._between.get(batch)
        if known is None:
            low, high, share = self._neighbours(batch)
            known = self._courses[low]
            if share > 0:
                other = self._courses[high]
                progress = sorted({*known.progress, *other.progress})
                mixed = [
                    [a + share * (b - a) for a, b in zip(known.at(p), other.at(p), strict=True)]
                    for p in progress
                ]
                metric, sqr, var, trusted = map(list, zip(*mixed, strict=True))
                first_gain = known.first_gain + share * (other.first_gain - known.first_gain)
                known = _Course(progress, metric, sqr, var, trusted, first_gain)
            self._between[batch] = known
        return known

    def _neighbours(self, batch: int) -> tuple[int, int, float]:
        """The next smaller and larger batch that were trained with, and how far between them this one is."""
        high = next((b for b in self.batches if b >= batch), self.batches[-1])
        low = next((b for b in reversed(self.batches) if b <= batch), self.batches[0])
        share = (batch - low) / (high - low) if high > low else 0.0
        return low, high, share


def _read_course(path: Path) -> _Course:
    rows = read_columns(path, "progress,iteration,metric,grad_sqr,grad_var", "trusted")
    progress, iterations, *columns = (list(column) for column in zip(*rows, strict=True))
    if any(after <= before for before, after in pairwise(progress)):
        raise UserError(f"{path}: needs rows in order of progress, each with more than the one before")
    if iterations[0] <= 0:
        raise UserError(f"{path}: iteration {iterations[0]:g}: needs steps up to the first row")
    if not all(map(max, columns[1], columns[2])):
        raise UserError(f"{path}: needs rows with a grad_sqr or a grad_var above 0")
    metric, sqr, var, *trusted = columns
    of_half = trusted[0] if trusted else [1.0] * len(progress)
    return _Course(progress, metric, sqr, var, of_half, progress[0] / iterations[0])
