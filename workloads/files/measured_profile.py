"""Read the measured profiles of applications that `coadapt calibrate` has written.

    profiles/machine.toml                    the machine, and what starts, resizes and verifications cost
    profiles/<app>/placements.csv            placement,local_bsz,step_time,sync_time[,pass_time]
    profiles/<app>/scalability.csv           num_nodes,num_replicas,local_bsz,step_time,sync_time[,pass_time]
    profiles/<app>/validation-<batch>.csv    progress,iteration,metric,grad_sqr,grad_var[,trusted]

The columns are those of the traces published with Pollux. The digits of a placement are the replicas on each
of its nodes, in any rotation. Times are seconds on one slot of the machine: `step_time` is the last pass of a
step, `sync_time` the all-reduce within it, and `pass_time` a pass by itself (if missing: step_time -
sync_time). A validation file has one row per evaluation of trainings at that total batch size: the best
metric so far, the gradient statistics, and the fraction of the trainings whose statistics were trusted (if
missing: all). Progress is in AdaScale steps.

A paced replica saves CPU time while it waits in the all-reduce and spends it in the next pass. So a step of a
group may take less time than a pass followed by the all-reduce.
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
"""The profiles of our own applications."""
MACHINE_FILE = "machine.toml"
TIMES = "step_time,sync_time"
PASS = "pass_time"

Placement = tuple[int, ...]
"""The replicas on each node."""


def packed(replicas: int, slots: int) -> Placement:
    """This many replicas on as few nodes of `slots` as possible."""
    whole, rest = divmod(replicas, slots)
    return (*(whole * [slots]), *([rest] if rest else []))


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What the jobs of an application cost besides their steps. In seconds, except `step_overhead`."""

    start_s: float
    """From the order for the first group of a job to the start of its first step."""
    resize_s: float
    """Time without a step when a new group is formed in place and its newcomers are ready."""
    verify_s: float
    """From the start of the verifier to the verified completion."""
    evaluation_slot_s: float
    """An evaluation by one replica. Several replicas share the work."""
    evaluation_group_s: float = 0.0
    """Additional time of an evaluation by several replicas."""
    save_s: float = 0.0
    """To save the state of a preempted job."""
    exit_s: float = 0.0
    """From the last action of a replica until its slot is free."""
    step_overhead: float = 1.0
    """Mean time of a step / median time, without evaluations. Step times in the files are medians."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine where profiles were measured. Other keys of the file are ignored."""

    slot_speed: float
    nodes: int
    slots: int
    """Slots of a node."""
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
                raise UserError(
                    f"{path}: applications.{name}: {field} {seconds}: allowed: finite, at least 0"
                )
        if not costs.step_overhead:
            raise UserError(f"{path}: applications.{name}: step_overhead 0: allowed: above 0 (it is a ratio)")
    return machine


def read_profiles(
    folder: Path,
    applications: Mapping[str, ApplicationSpec],
    step_factors: Mapping[str, float] | None = None,
) -> dict[str, "MeasuredProfile"]:
    """The profiles of the measured applications among `applications`, by name. `step_factors`: for some of
    them, the factor by which steps take longer than measured, such as on another day.

    Raises UserError naming the file, the line and what is needed, also if none of them was measured."""
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
    """These columns of a table as numbers, followed by the optional column if the table has it. Raises
    UserError naming the file and the line."""
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
    """The validation files by total batch size, in ascending order. Raises UserError if there is none."""
    files = {
        int(batch): path
        for path in folder.glob("validation-*.csv")
        if (batch := path.stem.removeprefix("validation-")).isdecimal()
    }
    if not files:
        raise UserError(f"{folder}: no validation-<batch>.csv in it")
    return dict(sorted(files.items()))


class StepTimes:
    """The step times of one application.

    Times of a measured placement are interpolated over the atomic batch size; see `elsewhere` for the
    others."""

    def __init__(self, folder: Path) -> None:
        """Read the tables of a profile. Raises UserError."""
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
        """(nodes, replicas, atomic batch, times...), averaged over all placements with these numbers."""
        self._known: dict[tuple[Placement, int], tuple[float, ...]] = {}
        self._groups: dict[int, dict[int, list[tuple[float, ...]]]] = {}

    def times(self, placement: Placement, atomic: int) -> tuple[float, ...]:
        """Seconds of the last pass of a step, of the synchronisation in it, and of a pass that only
        accumulates. Raises UserError for a group that is larger than measured."""
        known = self._known.get((placement, atomic))
        if known is None:
            rows = self.measured.get(_key(placement))
            known = _over_sizes(rows, atomic) if rows else self.elsewhere(placement, atomic)
            if not known[0] > known[1]:
                raise self.unknown(placement, atomic)
            self._known[placement, atomic] = known
        return known

    def elsewhere(self, placement: Placement, atomic: int) -> tuple[float, ...]:
        """Times of a placement that was not measured: interpolated between the next smaller and the next
        larger group on as many nodes, or on the most nodes measured. Raises UserError for a group that is
        larger than measured."""
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
            f"nodes with {atomic} examples per pass"
        )


def _read_times(path: Path, keys: str) -> list[list[float]]:
    """Rows of these columns and the three times. Raises UserError."""
    rows = read_columns(path, f"{keys},{TIMES}", PASS)
    passes = len(rows[0]) > len(f"{keys},{TIMES}".split(","))
    return rows if passes else [[*row, row[-2] - row[-1]] for row in rows]


def _key(placement: Placement) -> str:
    """The digits of a placement without zeros, in their smallest rotation."""
    filled = tuple(count for count in placement if count)
    return "".join(map(str, min((filled[i:] + filled[:i] for i in range(len(filled))), default=())))


def _over_sizes(rows: Sequence[tuple[float, ...]], atomic: int) -> tuple[float, ...]:
    sizes, *times_s = np.array(rows).T
    return tuple(float(np.interp(atomic, sizes, seconds)) for seconds in times_s)


class ValidationCurve(msgspec.Struct, frozen=True):
    """Trainings at one total batch size: metric and gradient statistics over progress, which increases."""

    progress: list[float]
    metric: list[float]
    sqr: list[float]
    var: list[float]
    trusted: list[float]
    first_gain: float
    """Mean gain of the steps up to the first row."""

    def at(self, progress: float) -> tuple[float, float, float, float]:
        """Metric, sqr, var and trusted fraction: interpolated between the rows, constant before and after
        them."""
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
    """The measured profile of one application."""

    def __init__(self, folder: Path, spec: ApplicationSpec, costs: Costs, step_factor: float = 1.0) -> None:
        """Read the profile from its folder. Raises UserError."""
        self.spec, self.costs, self.step_factor = spec, costs, step_factor
        self._times = StepTimes(folder)
        self.most_replicas = int(max(point[1] for point in self._times.points))
        """The largest group that was measured."""
        self._curves = {batch: _read_curve(path) for batch, path in validation_files(folder).items()}
        self.batches = tuple(self._curves)
        """The total batch sizes of the trainings, in ascending order."""
        self._between: dict[int, ValidationCurve] = {}

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
        """Mean seconds of a step in a sequence of steps, without evaluations."""
        return self.step_s(placement, atomic, accumulation) * self.costs.step_overhead

    def evaluation_s(self, replicas: int) -> float:
        """Seconds of one evaluation by this many replicas."""
        group_s = self.costs.evaluation_group_s if replicas > 1 else 0.0
        return self.step_factor * (self.costs.evaluation_slot_s / replicas + group_s)

    def gain(self, batch: int, progress: float, scale: float) -> float:
        """AdaScale's gain of a step at this scale (batch / M0, except for the last step of an epoch), as
        `common.goodput.model.gain` computes it for arrays. Before the first row there are no statistics yet,
        so the gain is at most the mean gain up to that row."""
        curve = self._curve(batch)
        _, sqr, var, _ = curve.at(progress)
        gain = (var + sqr) / (var / scale + sqr)
        return min(gain, curve.first_gain) if progress < curve.progress[0] else gain

    def statistics(self, batch: int, progress: float) -> GradientStatistics:
        """Gradient statistics after training at this total batch to this progress. They are trusted if those
        of at least half the trainings were."""
        _, sqr, var, trusted = self._curve(batch).at(progress)
        return GradientStatistics(sqr=sqr, var=var, trusted=trusted >= 0.5)

    def metric(self, batch: int, progress: float) -> float:
        """The best metric up to this progress."""
        return self._curve(batch).at(progress)[0]

    def needed_progress(self, batch: int, target: float) -> float:
        """Median progress at which an evaluation first meets the target; infinity if none does. Interpolated
        between the two nearest measured batch sizes, if both meet it."""
        low, high, share = self._neighbours(batch)
        below, above = (self._need(self._curves[b], target) for b in (low, high))
        if share == 0 or below == above:
            return below
        return math.inf if math.inf in (below, above) else below + share * (above - below)

    def _need(self, curve: ValidationCurve, target: float) -> float:
        better = self.spec.metric_mode == "max"
        meets = (
            progress
            for progress, metric in zip(curve.progress, curve.metric, strict=True)
            if (metric >= target if better else metric <= target)
        )
        return next(meets, math.inf)

    def _curve(self, batch: int) -> ValidationCurve:
        """The curve of a batch size, interpolated between the two nearest measured ones at equal progress."""
        known = self._between.get(batch)
        if known is None:
            low, high, share = self._neighbours(batch)
            known = self._curves[low]
            if share > 0:
                other = self._curves[high]
                progress = sorted({*known.progress, *other.progress})
                mixed = [
                    [a + share * (b - a) for a, b in zip(known.at(p), other.at(p), strict=True)]
                    for p in progress
                ]
                metric, sqr, var, trusted = map(list, zip(*mixed, strict=True))
                first_gain = known.first_gain + share * (other.first_gain - known.first_gain)
                known = ValidationCurve(progress, metric, sqr, var, trusted, first_gain)
            self._between[batch] = known
        return known

    def _neighbours(self, batch: int) -> tuple[int, int, float]:
        """The nearest smaller and larger measured batch sizes, and how far between them this one lies (0 to
        1)."""
        high = next((b for b in self.batches if b >= batch), self.batches[-1])
        low = next((b for b in reversed(self.batches) if b <= batch), self.batches[0])
        share = (batch - low) / (high - low) if high > low else 0.0
        return low, high, share


def _read_curve(path: Path) -> ValidationCurve:
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
    return ValidationCurve(progress, metric, sqr, var, of_half, progress[0] / iterations[0])
