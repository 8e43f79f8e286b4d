"""`coadapt fidelity`: every real run of an experiment is simulated, and the two are compared."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import path_of, whole
from services.cli.sensitivity_command import writable

if TYPE_CHECKING:
    from services.simulator.results import Result

NAME = "fidelity"
OWN_STEPS = "-own-steps"
"""What the names of results and simulated runs end with whose step times are those of the runs themselves."""


def fidelity(
    experiment: Annotated[
        Path,
        typer.Argument(
            parser=path_of, metavar="DIR", help="Folder of real runs, as `coadapt experiment` writes it."
        ),
    ],
    profiles: Annotated[
        Path | None,
        typer.Option(
            parser=path_of, metavar="DIR", help="Measured profiles, instead of those that come with coadapt."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_of, metavar="DIR", help=f"For {NAME}.json, {NAME}.md and {NAME}.svg, instead of DIR."
        ),
    ] = None,
    own_steps: Annotated[
        bool,
        typer.Option(
            "--own-steps",
            help="Scale the step times of the profiles, by application, to those that each run has shown: "
            f"what is left is not the machine's speed of the day. Results are named {NAME}{OWN_STEPS}.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what the JSON file holds, not the tables.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            "--jobs-parallel", "-j", parser=whole(1, 1024), metavar="N", help="At most so many at once."
        ),
    ] = None,
) -> int:
    """Simulate every run of an experiment with measured profiles, and say how near it comes to the real one.

    Who wins a set is decided by the geometric mean over the seeds that all policies have, on both sides.
    Each run's own workload, policy, seed, rounds and nodes are simulated into DIR-simulated, in the place of
    what a former call has left there.

    Exit 1 when a run was left out, a simulated job failed, or a simulated run was given up."""
    from services.simulator.parallel import one_thread_each

    one_thread_each()
    from analysis.compare.experiment_runs import gather
    from analysis.fidelity.fidelity import compare_folders, encoded
    from analysis.log.find_logs import NoRuns
    from analysis.log.frames import read
    from analysis.log.history import history
    from analysis.report.fidelity_report import draw, markdown
    from analysis.run.step_times import step_factors, step_times
    from common.config import load_config
    from common.eventlog import EVENTS_FILE
    from common.lifecycle import UserError, signals_as_interrupt
    from services.simulator.cases import check
    from services.simulator.parallel import simulated
    from services.simulator.twins import twin
    from workloads.applications import applications
    from workloads.files.measured_profile import PROFILES, read_profiles

    if out is not None:
        writable(out)
    place = experiment.resolve()
    known = applications(load_config(os.environ).applications.modules)
    suffix, scaled, of_profiles = "", "", read_profiles(profiles or PROFILES, known)
    if own_steps:
        suffix = OWN_STEPS
        scaled = "Step times are scaled, by run and application, to those that the real run has shown."
    name, simulations = NAME + suffix, place.with_name(f"{place.name}-simulated{suffix}")

    def factors(run: Path) -> tuple[tuple[str, float], ...]:
        if not own_steps:
            return ()
        return step_factors(step_times(history(read(run / EVENTS_FILE))), of_profiles)

    try:
        runs = gather(place).runs
        if not runs:
            raise NoRuns(f"{experiment}: no run that counts")
        draft = Path(tempfile.mkdtemp(prefix=f".{simulations.name}-", dir=place.parent))
        try:
            cases, lacking = [], {}
            for folder in (place / run.name for run in runs):
                try:
                    case = twin(folder, profiles, draft, factors(folder))
                    check([case])
                    cases.append(case)
                except UserError as error:
                    lacking[folder.name] = str(error)
            if not cases:
                raise UserError(next(iter(lacking.values())))
            with signals_as_interrupt():
                results = list(simulated(cases, processes))
                _replace(draft, simulations)
                for left_out in lacking:
                    shutil.rmtree(simulations / left_out, ignore_errors=True)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        found, pairs = compare_folders(place, simulations, of_profiles, lacking)
        results_in = out or place
        (results_in / f"{name}.json").write_text(encoded(found), encoding="utf-8")
        (results_in / f"{name}.md").write_text(markdown(found, scaled), encoding="utf-8")
        draw(pairs, results_in / f"{name}.svg")
    except NoRuns as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{error.filename or place}: cannot be written: {error.strerror}") from error
    print(encoded(found) if as_json else markdown(found, scaled), end="")
    problems = [
        *(f"{run}: {why}" for run, why in lacking.items()),
        *(problem for result in results for problem in _problems(result)),
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems or found.left_out))


def _replace(draft: Path, place: Path) -> None:
    """Put the folders in `draft` in the place of those of the same names."""
    place.mkdir(exist_ok=True)
    for run in sorted(draft.iterdir()):
        if not run.name.startswith("."):
            shutil.rmtree(place / run.name, ignore_errors=True)
            run.rename(place / run.name)


def _problems(result: "Result") -> Iterator[str]:
    """What did not go well."""
    for what, jobs in (("failed", result.failed), ("refused", result.refused)):
        for job_id, reason in jobs.items():
            yield f"{result.run_id}, simulated: {job_id} {what}: {reason}"
    for problem in (result.undecided, result.stalled, result.idle):
        if problem:
            yield f"{result.run_id}, simulated: {problem}"
