"""A calibration, from the first measurement to the written profiles."""

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
from services.calibration.calibration_plan import (
    Curve,
    CurveRow,
    LifecycleTimes,
    MeasuredPlacement,
    PlannedTraining,
    batch_configs,
    cost_table,
    merge_curves,
    placement_code,
    placements,
    plan_trainings,
    total_batch_sizes,
    unmeasurable,
)
from services.calibration.finished_parts import FinishedParts
from services.calibration.grid import NODES, GridMeasurement
from services.calibration.job_costs import measure_lifecycles
from services.calibration.profile_files import read_former_machine, write_machine, write_profile
from services.launcher.stack import StackError
from workloads.applications import applications
from workloads.files.measured_profile import PROFILES, Costs, MeasuredProfile

ATTEMPTS = 3
JOBS_PER_SLOT = 1.5
"""In the run that measures starts and ends, so that some jobs start and end on a full cluster."""
LIFECYCLES = "lives"
"""Name of the part with the lifecycle times of all applications."""


def run_calibration(
    names: Sequence[str], out: Path | None, seeds: int, busy_before: float, *, fresh: bool
) -> None:
    """Measure the applications `names` (all if empty), except for the parts that are finished, and write
    their profiles into `out`, or into those of the checkout. `seeds` trainings are made at each total batch
    size; `fresh` measures everything.

    Raises UserError, and MachineBusy if others use more of the machine than the share `busy_before`."""
    folder = out or checkout_profiles()
    config = load_config(os.environ)
    known = applications(config.applications.modules)
    for name in names:
        if name not in known:
            raise UserError(f"--app {name!r}: allowed: {', '.join(known)}")
    if not config.agent.slots:
        raise UserError("agent.slots 0: allowed: 1 or more; profiles are measured with that many on a node")
    chosen = []
    for spec in (spec for name, spec in known.items() if name in (names or known)):
        if reason := unmeasurable(spec, len(NODES), config.agent.slots):
            _leave_out(spec, reason)
        else:
            chosen.append(spec)
    if not chosen:
        raise UserError("no application can be measured")
    settings = measurement_conditions(config, seeds)
    former = {} if fresh and not names else read_former_machine(folder)
    kept = _kept(folder, former, settings, chosen)
    require = partial(require_quiet, LoadBounds(busy_before=busy_before), "allow more with --busy-before")
    if fresh:  # before anything is deleted
        require()
    with FinishedParts(folder, settings | {"applications": _names(chosen)}, fresh=fresh) as parts:
        if not (fresh or len(parts)) and _is_complete(former, settings, chosen):
            parts.remove()
            print(f"{folder}: {_names(chosen)} are there already; --fresh measures again")
            return
        calibration = Calibration(config, chosen, list(known.values()), range(seeds), parts)
        if calibration.count_missing():
            if not fresh:
                require()
            try:
                calibration.measure()
            except KeyboardInterrupt:
                print("calibrate: interrupted: the same command without --fresh continues", file=sys.stderr)
                raise
        written, tables = [], dict(kept)
        for spec in chosen:
            costs_s, grid, curves = calibration.costs(spec), calibration.grid(spec), calibration.curves(spec)
            if reason := why_unreadable(spec, config.agent.slots, costs_s, grid, curves):
                _leave_out(spec, reason)
                continue
            write_profile(folder / spec.name, config.agent.slots, grid, curves)
            written.append(spec)
            tables[spec.name] = costs_s
        if written:
            tables = {name: tables[name] for name in dict.fromkeys([*known, *tables]) if name in tables}
            write_machine(folder, _machine(settings, tables))
        parts.remove()
    if not written:
        raise UserError(f"{folder}: no profile has been written")
    print(f"{folder}: {_names(written)}")


def checkout_profiles() -> Path:
    """The folder of profiles in this checkout. Raises UserError for an installed coadapt: its profiles belong
    to the package, and the next installation would replace them."""
    if not (PROFILES.parents[1] / "pyproject.toml").is_file():
        raise UserError("--out DIR: needed, because coadapt does not run from a checkout")
    return PROFILES


def why_unreadable(
    spec: ApplicationSpec,
    slots: int,
    costs_s: Mapping[str, float],
    grid: Mapping[tuple[int, ...], MeasuredPlacement],
    curves: Mapping[int, Sequence[CurveRow]],
) -> str:
    """Why a reader would refuse the profile that has been measured; empty if it would not."""
    with TemporaryDirectory(prefix="coadapt-calibrate-") as draft:
        folder = Path(draft) / spec.name
        write_profile(folder, slots, grid, curves)
        try:
            MeasuredProfile(folder, spec, msgspec.convert(costs_s, Costs))
        except UserError as error:
            return str(error).removeprefix(f"{folder}/")
        except msgspec.ValidationError as error:
            return f"some of its costs were never observed: {error}"
    return ""


def _leave_out(spec: ApplicationSpec, reason: str) -> None:
    print(f"calibrate: {spec.name} is left out: {reason}", file=sys.stderr, flush=True)


class Calibration:
    """All parts of one calibration, finished or not."""

    def __init__(
        self,
        config: Config,
        specs: Sequence[ApplicationSpec],
        background: Sequence[ApplicationSpec],
        seeds: Sequence[int],
        parts: FinishedParts,
    ) -> None:
        """Measures `specs`; jobs of the applications `background` keep the rest of the cluster busy."""
        self._config, self._specs, self._background = config, specs, background
        self._seeds, self._parts = seeds, parts
        self._placements = placements(len(NODES), config.agent.slots)
        # At least one job of every application.
        self._jobs = max(round(JOBS_PER_SLOT * len(NODES) * config.agent.slots), len(specs))

    def count_missing(self) -> int:
        grids = sum(len(list(self._missing_placements(spec))) for spec in self._specs)
        return grids + (LIFECYCLES not in self._parts) + len(list(self._missing_trainings()))

    def measure(self) -> None:
        """Measure all parts that are missing."""
        self._progress = Progress("calibrate", self.count_missing())
        if any(True for spec in self._specs for _ in self._missing_placements(spec)):
            with_retries(self._measure_grids)
        if LIFECYCLES not in self._parts:
            with_retries(self._measure_lifecycles)
        for training, curve in in_processes(train, list(self._missing_trainings())):
            name, multiple, seed = training.application, training.multiple, training.seed
            self._parts.add(_curve_part(name, multiple, seed), curve)
            self._progress.step(f"{name}, {multiple} M0, seed {seed}")

    def grid(self, spec: ApplicationSpec) -> dict[tuple[int, ...], MeasuredPlacement]:
        return {
            placement: self._parts.get(_placement_part(spec, placement), MeasuredPlacement)
            for placement in self._placements
            if batch_configs(spec, sum(placement))
        }

    def curves(self, spec: ApplicationSpec) -> dict[int, list[CurveRow]]:
        return {
            batch: merge_curves(
                [
                    self._parts.get(_curve_part(spec.name, batch // spec.initial_batch_size, seed), Curve)
                    for seed in self._seeds
                ],
                spec.metric_mode,
            )
            for batch in total_batch_sizes(spec)
        }

    def costs(self, spec: ApplicationSpec) -> dict[str, float]:
        lifecycles = self._parts.get(LIFECYCLES, dict[str, list[LifecycleTimes]])[spec.name]
        return cost_table(self.grid(spec), lifecycles)

    def _measure_grids(self) -> None:
        with GridMeasurement(self._config, self._background) as grid:
            for spec in self._specs:
                if missing := list(self._missing_placements(spec)):
                    grid.begin(spec)
                    for placement in missing:
                        measured = grid.measure(placement, batch_configs(spec, sum(placement)))
                        self._parts.add(_placement_part(spec, placement), measured)
                        self._progress.step(f"{spec.name}, placement {placement_code(placement)}")

    def _measure_lifecycles(self) -> None:
        self._parts.add(LIFECYCLES, measure_lifecycles(self._config, self._specs, self._jobs))
        self._progress.step("starts and ends of jobs")

    def _missing_placements(self, spec: ApplicationSpec) -> Iterator[tuple[int, ...]]:
        for placement in self._placements:
            name = _placement_part(spec, placement)
            if batch_configs(spec, sum(placement)) and name not in self._parts:
                yield placement

    def _missing_trainings(self) -> Iterator[PlannedTraining]:
        for spec in self._specs:
            for training in plan_trainings(spec, self._seeds, self._config.applications.modules):
                if _curve_part(spec.name, training.multiple, training.seed) not in self._parts:
                    yield training


def with_retries(measure: Callable[[], None]) -> None:
    """Measure again if a replica or a service is lost, so that this does not end the whole calibration."""
    for _ in range(ATTEMPTS - 1):
        try:
            measure()
            return
        except (BenchError, StackError) as error:
            print(f"\ncalibrate: measures again, because {error}", file=sys.stderr, flush=True)
    measure()


def train(training: PlannedTraining) -> tuple[PlannedTraining, Curve]:
    """Runs in its own process."""
    from workloads.trainer.standalone.curves import evaluations
    from workloads.trainer.standalone.train_alone import TrainingCase

    seen, reached = evaluations(TrainingCase(rule="adascale", **msgspec.structs.asdict(training)))
    return training, Curve(rows=tuple(CurveRow(**row._asdict()) for row in seen), reached=reached)


def _placement_part(spec: ApplicationSpec, placement: Sequence[int]) -> str:
    return f"{spec.name}/placement/{'-'.join(map(str, placement))}"


def _curve_part(application: str, multiple: int, seed: int) -> str:
    return f"{application}/{multiple}/{seed}"


# --------------------------------------------------------------------------- the machine


def measurement_conditions(config: Config, seeds: int) -> dict[str, Any]:
    """What must be the same for all measurements in one folder."""
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
    return {
        "date": time.strftime("%Y-%m-%d"),
        **settings,
        "versions": {
            "python": platform.python_version(),
            "coadapt": machine()["coadapt"],
            **{name: version(name) for name in ("torch", "numpy")},
        },
        "applications": tables,
    }


def _is_complete(
    former: Mapping[str, Any], settings: Mapping[str, Any], chosen: Sequence[ApplicationSpec]
) -> bool:
    """Whether machine.toml has all the chosen applications, measured under the same conditions."""
    same = all(former.get(key) == value for key, value in settings.items())
    return same and all(spec.name in former.get("applications", {}) for spec in chosen)


def _kept(
    folder: Path,
    former: Mapping[str, Any],
    settings: Mapping[str, Any],
    chosen: Sequence[ApplicationSpec],
) -> dict[str, dict[str, float]]:
    """The costs of the applications that are not measured now. Raises UserError if they were measured under
    other conditions."""
    names = {spec.name for spec in chosen}
    former_costs = former.get("applications", {})
    others = {name: costs_s for name, costs_s in former_costs.items() if name not in names}
    for key, value in settings.items():
        if others and former.get(key) != value:
            raise UserError(
                f"{folder}: {', '.join(others)} measured with {key} {former.get(key)!r}, which is "
                f"{value!r} now: measure all of them again, or use another --out"
            )
    return others


def _names(specs: Sequence[ApplicationSpec]) -> str:
    return ", ".join(spec.name for spec in specs)
