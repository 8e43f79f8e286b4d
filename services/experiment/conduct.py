"""Conduct an experiment: check everything that can be checked first, then do the runs that are missing.

A run is done when its folder has a record. So the same experiment can be carried out again at any time: it
continues after an interruption, and does nothing when all runs are done.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from common.config import Config, load_config
from services.bench.quiet_machine import require_quiet
from services.experiment.folder import ExperimentFolder, code_digest
from services.experiment.parallel_runs import check_engine, outcomes
from services.experiment.plan import (
    ISOLATED_S,
    PlannedRun,
    expected_s,
    plan_isolated_runs,
    plan_runs,
    read_definition,
    select_runs,
    with_cluster,
    with_seeds,
    workload_maker,
)
from services.experiment.runner import RunOutcome, RunTask, check_cluster, check_policies
from workloads.applications import applications


class PreparedExperiment:
    """An experiment whose definition, policies and workloads have been checked."""

    def __init__(
        self,
        folder: ExperimentFolder,
        config: Config,
        engine: str,
        plan: Sequence[PlannedRun],
        runs: Sequence[PlannedRun],
        workload_texts: Mapping[tuple[str, int], str],
    ) -> None:
        """`plan` has all runs of the definition; `runs` those that are asked for, in the order in which they
        are done. `workload_texts`: the workload file of each set and seed of `runs`."""
        self.folder, self.runs = folder, runs
        self._config, self._engine, self._plan, self._workload_texts = config, engine, plan, workload_texts

    def remaining(self) -> list[PlannedRun]:
        """The runs without a record. Raises UserError, as everything here that reads records."""
        records = self.folder.records(self.runs)
        return [run for run in self.runs if run not in records]

    def states(self) -> Iterator[tuple[str, str]]:
        """The name and the state of each run, for people."""
        records = self.folder.records(self.runs)
        for run in self.runs:
            record = records.get(run)
            if record is None:
                yield run.name, "to do"
            else:
                yield run.name, "done" if record.clean else f"done, not clean: {record.reason}"

    def unclean(self) -> dict[str, str]:
        """The names of the runs that are done and not clean, and why they are not."""
        records = self.folder.records(self.runs)
        return {run.name: record.reason for run, record in records.items() if not record.clean}

    def expected_s(self) -> float:
        """Seconds that the remaining runs will take, one after the other."""
        records = self.folder.records(self.runs)
        remaining = [run for run in self.runs if run not in records]
        run_s = ISOLATED_S if remaining and remaining[0].is_isolated else self.folder.definition.run_s
        walls_s = {run: record.wall_s for run, record in records.items() if record.wall_s is not None}
        watches_s = len(remaining) * self.folder.definition.guard.watch_s
        return expected_s(remaining, walls_s, run_s) + watches_s

    def carry_out(
        self,
        parallel: int,
        *,
        repeat_unclean: bool,
        report: Callable[[str], None],
        progress: Callable[[], AbstractContextManager[Callable[[], None]]],
    ) -> None:
        """Do the remaining runs, `parallel` at a time; with `repeat_unclean` also those that are done and not
        clean. `report` gets a line on each event. `progress` is entered before the first run; the function
        that it yields is called after each run.

        Raises UserError where the folder cannot be used or its runs were made under other conditions, and
        MachineBusy."""
        folder = self.folder
        with folder.claimed():
            if count := folder.end_leftovers():
                report(f"ended {count} processes that a killed experiment had left running")
            for name in folder.set_aside_interrupted(self._plan):
                report(f"{name}: was interrupted; moved to lost/, will be repeated")
            folder.record_conditions(self._config)
            folder.check_workloads(self._plan, self._workload_texts)
            if repeat_unclean:
                folder.set_aside_unclean(self.runs)
            try:
                self._do_remaining(parallel, report, progress)
            except KeyboardInterrupt:
                report("interrupted: the same command continues from here")
                raise
            finally:  # the engine's processes may have been killed in the middle of a run
                folder.end_leftovers()
                folder.set_aside_interrupted(self.runs)

    def _do_remaining(
        self,
        parallel: int,
        report: Callable[[str], None],
        progress: Callable[[], AbstractContextManager[Callable[[], None]]],
    ) -> None:
        tasks = self._tasks()
        if not tasks:
            return
        require_quiet(self.folder.definition.guard, "raise the bounds of [guard]")
        done, total = len(self.runs) - len(tasks), len(self.runs)
        with progress() as advance:
            for number, outcome in enumerate(outcomes(tasks, self._engine, parallel), start=done + 1):
                report(f"{number}/{total} {_description(outcome)}")
                advance()

    def _tasks(self) -> list[RunTask]:
        code = code_digest()
        return [
            RunTask(
                run=run,
                workload=self._workload_texts[run.set, run.seed],
                folder=str(self.folder.path),
                definition=self.folder.definition,
                config=self._config,
                command_pid=os.getpid(),
                code_digest=code,
            )
            for run in self.remaining()
        ]


def prepare(
    file: Path,
    environment: Mapping[str, str],
    *,
    policies: Sequence[str] = (),
    sets: Sequence[str] = (),
    seeds: int | None = None,
    isolated_jobs: bool = False,
    engine: str = "sequential",
) -> PreparedExperiment:
    """Read the definition and check all that a run needs: cluster, policies, engine, workloads.

    Empty `policies` and `sets` mean all of the definition; `seeds` is their number. With `isolated_jobs` the
    runs are those of single jobs. Raises UserError and ConfigError."""
    definition = read_definition(file)
    definition = with_seeds(definition, seeds) if seeds else definition
    config = with_cluster(load_config(environment), definition)
    known = applications(config.applications.modules)
    if isolated_jobs:
        plan, workloads = plan_isolated_runs(definition, known)
    else:
        plan, workloads = plan_runs(definition), workload_maker(definition, known)
    runs = select_runs(plan, policies, sets)
    if policies and not isolated_jobs:  # the chosen policies rotate among themselves
        runs = select_runs(plan_runs(definition, policies), [], sets)
    check_cluster(definition)
    check_policies({run.policy: None for run in runs})
    check_engine(engine)
    folder = ExperimentFolder(Path(config.run.logs_dir) / definition.name, definition)
    texts = {(run.set, run.seed): workloads(run.set, run.seed)[1] for run in runs}
    return PreparedExperiment(folder, config, engine, plan, runs, texts)


def _description(outcome: RunOutcome) -> str:
    record = outcome.record
    jct = "no job completed" if outcome.mean_jct_s is None else f"mean JCT {outcome.mean_jct_s:.1f} s"
    verdict = "clean" if record.clean else f"NOT CLEAN, kept: {record.reason}"
    return f"{outcome.run.name}: {jct}, {record.wall_s or 0.0:.0f} s in all, {verdict}"
