"""A calibration from its first part to the written profile."""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from common.config import Config, load_config
from common.lifecycle import UserError
from common.types import ApplicationSpec
from services.bench.agent_cluster import BenchError
from services.bench.measure import Progress, machine
from services.bench.quiet_machine import LoadBounds, require_quiet
from services.bench.scaling import in_processes
from services.calibration import job_costs as lives
from services.calibration.calibration_plan import (
    Curve,
    Life,
    Placed,
    PlannedTraining,
    Row,
    configs,
    costs,
    digits,
    merge,
    placements,
    totals,
    trainings,
    unmeasurable,
)
from services.calibration.grid import NODES, GridMeasurement
from services.calibration.measurements import Journal
from services.calibration.profile_files import read_machine, write_machine, write_profile
from services.launcher.stack import StackError
from workloads.applications import applications
from workloads.files.measured_profile import Costs, MeasuredProfile

ATTEMPTS = 3
JOBS_A_SLOT = 1.5
"""Of the run that measures starts and ends: some of them begin and end on a full cluster."""


def run(names: Sequence[str], folder: Path, seeds: int, busy_before: float, *, fresh: bool) -> None:
    """Measure what is not there yet, and write the profiles. Raises UserError, Busy where others use more of
    the machine than `busy_before`."""
    config = load_config(os.environ)
    known = applications(config.applications.modules)
    for name in names:
        if name not in known:
            raise UserError(f"--app {name!r}: allowed: {', '.join(known)}")
    if not config.agent.slots:
        raise UserError("agent.slots 0: allowed: 1 or more; profiles are of nodes with so many slots")
    chosen = []
    for spec in (spec for name, spec in known.items() if name in (names or known)):
        if reason := unmeasurable(spec, len(NODES), config.agent.slots):
            _leave_out(spec, reason)
        else:
            chosen.append(spec)
    if not chosen:
        raise UserError("no application can be measured")
    settings = conditions(config, seeds)
    former = {} if fresh and not names else read_machine(folder)
    kept = _kept(folder, former, settings, chosen)
    require = partial(require_quiet, LoadBounds(busy_before=busy_before), "allow more with --busy-before")
    if fresh:  # before anything is thrown away
        require()
    with Journal(folder, settings | {"applications": _names(chosen)}, fresh=fresh) as journal:
        if not (fresh or journal.begun) and _is_complete(former, settings, chosen):
            journal.finish()
            print(f"{folder}: {_names(chosen)} are there already; --fresh measures again")
            return
        calibration = Calibration(config, chosen, list(known.values()), range(seeds), journal)
        if calibration.parts_missing():
            if not fresh:
                require()
            try:
                calibration.measure()
            except KeyboardInterrupt:
                print("calibrate: interrupted: the same command, without --fresh, goes on", file=sys.stderr)
                raise
        written, tables = [], dict(kept)
        for spec in chosen:
            costs_s, grid, curves = calibration.costs(spec), calibration.grid(spec), calibration.curves(spec)
            if reason := unreadable(spec, config.agent.slots, costs_s, grid, curves):
                _leave_out(spec, reason)
                continue
            write_profile(folder / spec.name, config.agent.slots, grid, curves)
            written.append(spec)
            tables[spec.name] = costs_s
        if written:
            tables = {name: tables[name] for name in dict.fromkeys([*known, *tables]) if name in tables}
            write_machine(folder, _machine(settings, tables))
        journal.finish()
    if not written:
        raise UserError(f"{folder}: no profile has been written")
    print(f"{folder}: {_names(written)}")


def unreadable(
    spec: ApplicationSpec,
    slots: int,
    costs_s: Mapping[str, float],
    grid: Mapping[tuple[int, ...], Placed],
    curves: Mapping[int, Sequence[Row]],
) -> str:
    """Why a reader would refuse the profile that has been measured; empty where it would not."""
    with TemporaryDirectory(prefix="coadapt-calibrate-") as draft:
        folder = Path(draft) / spec.name
        write_profile(folder, slots, grid, curves)
        try:
            MeasuredProfile(folder, spec, msgspec.convert(costs_s, Costs))
        except UserError as error:
            return str(error).removeprefix(f"{folder}/")
        except msgspec.ValidationError as error:
            return f"nothing was seen of some of its costs: {error}"
    return ""


def _leave_out(spec: ApplicationSpec, reason: str) -> None:
    print(f"calibrate: {spec.name} is left out: {reason}", file=sys.stderr, flush=True)


class Calibration:
    """The parts of one calibration, measured or not."""

    def __init__(
        self,
        config: Config,
        specs: Sequence[ApplicationSpec],
        background: Sequence[ApplicationSpec],
        seeds: Sequence[int],
        journal: Journal,
    ) -> None:
        self._config, self._specs, self._background = config, specs, background
        self._seeds, self._journal = seeds, journal
        self._placements = placements(len(NODES), config.agent.slots)
        # Every application's lives have to be seen.
        self._jobs = max(round(JOBS_A_SLOT * len(NODES) * config.agent.slots), len(specs))

    def parts_missing(self) -> int:
        grids = sum(len(list(self._missing_placements(spec))) for spec in self._specs)
        return grids + ("lives" not in self._journal) + len(list(self._missing_trainings()))

    def measure(self) -> None:
        """All parts that are missing."""
        self._progress = Progress("calibrate", self.parts_missing())
        if any(True for spec in self._specs for _ in self._missing_placements(spec)):
            again_if_need_be(self._measure_grids)
        if "lives" not in self._journal:
            again_if_need_be(self._measure_lives)
        for training, curve in in_processes(train, list(self._missing_trainings())):
            name, multiple, seed = training.application, training.multiple, training.seed
            self._journal.add(_curve(name, multiple, seed), curve)
            self._progress.step(f"{name}, {multiple} M0, seed {seed}")

    def grid(self, spec: ApplicationSpec) -> dict[tuple[int, ...], Placed]:
        return {
            placement: self._journal.get(_grid(spec, placement), Placed)
            for placement in self._placements
            if configs(spec, sum(placement))
        }

    def curves(self, spec: ApplicationSpec) -> dict[int, list[Row]]:
        return {
            batch: merge(
                [
                    self._journal.get(_curve(spec.name, batch // spec.initial_batch_size, seed), Curve)
                    for seed in self._seeds
                ],
                spec.metric_mode,
            )
            for batch in totals(spec)
        }

    def costs(self, spec: ApplicationSpec) -> dict[str, float]:
        lives = self._journal.get("lives", dict[str, list[Life]])[spec.name]
        return costs(self.grid(spec), lives)

    def _measure_grids(self) -> None:
        with GridMeasurement(self._config, self._background) as grid:
            for spec in self._specs:
                if missing := list(self._missing_placements(spec)):
                    grid.begin(spec)
                    for placement in missing:
                        placed = grid.measure(placement, configs(spec, sum(placement)))
                        self._journal.add(_grid(spec, placement), placed)
                        self._progress.step(f"{spec.name}, placement {digits(placement)}")

    def _measure_lives(self) -> None:
        self._journal.add("lives", lives.measure(self._config, self._specs, self._jobs))
        self._progress.step("starts and ends of jobs")

    def _missing_placements(self, spec: ApplicationSpec) -> Iterator[tuple[int, ...]]:
        for placement in self._placements:
            if configs(spec, sum(placement)) and _grid(spec, placement) not in self._journal:
                yield placement

    def _missing_trainings(self) -> Iterator[PlannedTraining]:
        for spec in self._specs:
            for training in trainings(spec, self._seeds, self._config.applications.modules):
                if _curve(spec.name, training.multiple, training.seed) not in self._journal:
                    yield training


def again_if_need_be(measure: Callable[[], None]) -> None:
    """A replica or a service that is lost on the way costs some time, but not the whole calibration."""
    for _ in range(ATTEMPTS - 1):
        try:
            measure()
            return
        except (BenchError, StackError) as error:
            print(f"\ncalibrate: tries again, since {error}", file=sys.stderr, flush=True)
    measure()


def train(training: PlannedTraining) -> tuple[PlannedTraining, Curve]:
    """In a process of its own."""
    from workloads.trainer.standalone.curves import evaluations
    from workloads.trainer.standalone.train_alone import TrainingCase

    seen, reached = evaluations(TrainingCase(rule="adascale", **msgspec.structs.asdict(training)))
    return training, Curve(rows=tuple(Row(**row._asdict()) for row in seen), reached=reached)


def _grid(spec: ApplicationSpec, placement: Sequence[int]) -> str:
    return f"{spec.name}/placement/{'-'.join(map(str, placement))}"


def _curve(application: str, multiple: int, seed: int) -> str:
    return f"{application}/{multiple}/{seed}"


# --------------------------------------------------------------------------- the machine


def conditions(config: Config, seeds: int) -> dict[str, Any]:
    """What has to be the same for all that stands in one folder."""
    facts = machine()
    return {
        "processor": facts["processor"],
        "cores": facts["cores"],
        "nodes": len(NODES),
        "slots": config.agent.slots,
        "slot_speed": config.agent.slot_speed,
        "seeds": seeds,
    }


def _machine(settings: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    names = ("torch", "numpy")
    return {
        "date": time.strftime("%Y-%m-%d"),
        **settings,
        "versions": {
            "python": platform.python_version(),
            "coadapt": machine()["coadapt"],
            **{name: version(name) for name in names},
        },
        "applications": tables,
    }


def _is_complete(
    former: Mapping[str, Any], settings: Mapping[str, Any], chosen: Sequence[ApplicationSpec]
) -> bool:
    """Whether the profile of a machine has all that is wanted, measured in the same way."""
    there = former.get("applications", {})
    same = all(former.get(key) == value for key, value in settings.items())
    return same and all(spec.name in there for spec in chosen)


def _kept(
    folder: Path,
    former: Mapping[str, Any],
    settings: Mapping[str, Any],
    chosen: Sequence[ApplicationSpec],
) -> dict[str, dict[str, float]]:
    """Costs of the applications that are not measured now; they have to be of the same machine."""
    names = {spec.name for spec in chosen}
    others = {name: t for name, t in former.get("applications", {}).items() if name not in names}
    for key, value in settings.items():
        if others and former.get(key) != value:
            raise UserError(
                f"{folder}: {', '.join(others)} measured with {key} {former.get(key)!r}, which is "
                f"{value!r} now: measure all of them again, or use another --out"
            )
    return others


def _names(specs: Sequence[ApplicationSpec]) -> str:
    return ", ".join(spec.name for spec in specs)
