"""Simulate every run of a real experiment and compare the two: what `coadapt fidelity` does."""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.compare.experiment_runs import gather
from analysis.fidelity.agreement import Fidelity, compare_folders, encoded
from analysis.fidelity.run_pairs import Pair
from analysis.log.find_logs import NoRuns
from analysis.log.frames import read
from analysis.log.history import history
from analysis.report.fidelity_report import draw, markdown
from analysis.run.step_times import step_factors, step_times
from common.config import load_config
from common.eventlog import EVENTS_FILE
from common.lifecycle import UserError
from common.types import Struct
from services.simulator.case_from_run import case_from_run
from services.simulator.cases import SimulationCase
from services.simulator.parallel import simulate_all
from services.simulator.run_case import check_cases
from workloads.applications import applications
from workloads.files.measured_profile import PROFILES, read_profiles

NAME = "fidelity"
OWN_STEPS = "-own-steps"
"""Suffix of results and simulated folders whose step times are scaled to those of the real runs."""
OWN_STEPS_NOTE = "Step times are scaled, by run and application, to those that the real run has shown."

StepFactors = tuple[tuple[str, float], ...]
"""By application: step time of the run over that of the profile."""


class Replication(Struct, frozen=True):
    """The comparison of an experiment with its simulation. `name` is the stem of its files; `problems` lists
    the runs that could not be simulated and what went wrong in the others."""

    name: str
    comparison: Fidelity
    pairs: list[Pair]
    note: str
    problems: list[str]

    def as_json(self) -> str:
        return encoded(self.comparison)

    def as_markdown(self) -> str:
        return markdown(self.comparison, self.note)

    def write(self, folder: Path) -> None:
        """Write <name>.json, <name>.md and <name>.svg. Raises OSError."""
        (folder / f"{self.name}.json").write_text(self.as_json(), encoding="utf-8")
        (folder / f"{self.name}.md").write_text(self.as_markdown(), encoding="utf-8")
        draw(self.pairs, folder / f"{self.name}.svg")


def replicate(
    experiment: Path, profiles: Path | None, *, own_steps: bool = False, processes: int | None = None
) -> Replication:
    """Simulate the workload, policy, seed, rounds and nodes of every run in `experiment`, with the measured
    profiles in that folder or ours, and compare. The simulated runs go to <experiment>-simulated, where they
    replace those of an earlier call. With `own_steps` step times are scaled to those of each real run.

    Raises UserError where no run can be simulated or a file cannot be written."""
    place = experiment.resolve()
    measured = read_profiles(profiles or PROFILES, applications(load_config(os.environ).applications.modules))

    def factors(run: Path) -> StepFactors:
        return step_factors(step_times(history(read(run / EVENTS_FILE))), measured)

    suffix = OWN_STEPS if own_steps else ""
    simulations = place.with_name(f"{place.name}-simulated{suffix}")
    try:
        runs = [place / run.name for run in gather(place).runs]
        if not runs:
            raise NoRuns(f"{experiment}: no run that counts")
        with tempfile.TemporaryDirectory(prefix=f".{simulations.name}-", dir=place.parent) as folder:
            draft = Path(folder)
            cases, left_out = twins(runs, profiles, draft, factors if own_steps else lambda run: ())
            if not cases:
                raise UserError(next(iter(left_out.values())))
            results = list(simulate_all(cases, processes))
            _replace(draft, simulations)
        for name in left_out:
            shutil.rmtree(simulations / name, ignore_errors=True)
        comparison, pairs = compare_folders(place, simulations, measured, left_out)
    except OSError as error:
        raise UserError(f"{error.filename or place}: cannot be written: {error.strerror}") from error
    found = [f"{run}: {why}" for run, why in left_out.items()]
    found += [f"{result.run_id}, simulated: {problem}" for result in results for problem in result.problems]
    return Replication(NAME + suffix, comparison, pairs, OWN_STEPS_NOTE if own_steps else "", found)


def twins(
    runs: Sequence[Path], profiles: Path | None, out: Path, factors: Callable[[Path], StepFactors]
) -> tuple[list[SimulationCase], dict[str, str]]:
    """The cases that simulate these real runs, and by name why the others cannot be simulated."""
    cases: list[SimulationCase] = []
    left_out = {}
    for run in runs:
        try:
            case = case_from_run(run, profiles, out, factors(run))
            check_cases([case])
            cases.append(case)
        except UserError as error:
            left_out[run.name] = str(error)
    return cases, left_out


def _replace(draft: Path, place: Path) -> None:
    """Move the run folders in `draft` to `place`; folders of the same names are replaced."""
    place.mkdir(exist_ok=True)
    for run in sorted(draft.iterdir()):
        if not run.name.startswith("."):
            shutil.rmtree(place / run.name, ignore_errors=True)
            run.rename(place / run.name)
