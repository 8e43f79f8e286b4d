"""One run of an experiment: wait for a quiet machine, run the jobs, write the record, repeat if it went
wrong.

It may run in another process than the command, and on another machine with the same files.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from msgspec import structs

from analysis.compare.experiment_files import RUN_FILE, WORKLOAD_FILE, RunRecord
from analysis.log.frames import read
from analysis.summarize import summarize
from common.config import Config
from common.eventlog import EVENTS_FILE
from common.lifecycle import EXIT_FAILED, UserError
from common.messaging.request_reply import ServerUnavailable
from common.protocol import JobTable
from common.types import Struct
from services.bench.quiet_machine import MachineBusy, Meter, noise, wait_until_quiet
from services.experiment.folder import MEMORY_FILE, ExperimentFolder, code_digest, write_json
from services.experiment.plan import Definition, PlannedRun
from services.launcher.client import Arrivals, Client, workload_reader
from services.launcher.stack import Stack, StackError, current_procfile
from services.monitor.service import follow
from services.scheduler.policies.registry import UnknownPolicy, make_live_policy


class _CommandGone(BaseException):
    """The command that waits for the run no longer exists."""


class RunTask(Struct, frozen=True):
    """A run to do."""

    run: PlannedRun
    workload: str
    """The text of the workload file."""
    folder: str
    """The experiment's folder."""
    definition: Definition
    config: Config
    """The experiment's configuration."""
    command_pid: int
    """Process id of the command that waits for the run."""
    code_digest: str
    """The digest of the code that the command runs."""


class RunOutcome(Struct, frozen=True):
    run: PlannedRun
    record: RunRecord
    mean_jct_s: float | None


def check_policies(names: Iterable[str]) -> None:
    """Raises UserError for a policy that cannot schedule real jobs."""
    for name in names:
        try:
            make_live_policy(name)
        except UnknownPolicy as error:
            raise UserError(str(error)) from error


def check_cluster(definition: Definition) -> None:
    """Raises UserError if the stack does not have the number of nodes that the experiment needs."""
    procfile = current_procfile()
    if definition.nodes != (nodes := len(procfile.nodes)):
        raise UserError(f"nodes {definition.nodes}: allowed: {nodes}, the agents of {procfile.source}")


def perform(task: RunTask) -> RunOutcome:
    """Do the run, in at most `attempts` attempts. Raises MachineBusy, StackError if the stack does not come
    up in the last attempt either, and UserError if the code has changed since the command started."""
    try:
        return _perform(task)
    except _CommandGone:  # this process belongs to an engine: nothing else in it has work to do
        os._exit(EXIT_FAILED)


def _perform(task: RunTask) -> RunOutcome:
    folder = ExperimentFolder(Path(task.folder), task.definition)
    bounds = task.definition.guard
    report = _reporter(task.run)
    check = _command_check(task.command_pid)
    for left in reversed(range(task.definition.attempts)):
        if problem := wait_until_quiet(bounds, report, bounds.wait_s):
            raise MachineBusy(
                f"{task.run.name}: the machine is busy: {problem}; the same command continues from here"
            )
        check()
        start_s = time.monotonic()
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        attempt = folder.next_attempt(task.run)
        record = folder.new_record(task.run, attempt, started=started)
        try:
            values, mean_jct_s = _attempt(task, check)
        except StackError as error:
            reason = f"the stack did not come up: {str(error).splitlines()[0]}"
            record = structs.replace(record, wall_s=time.monotonic() - start_s, reason=reason)
            folder.set_aside(task.run, record)
            if not left:
                raise
        else:
            if code_digest() != task.code_digest:  # each stack loads the code again
                raise UserError(
                    f"{task.run.name}: the code of coadapt was changed during the experiment: the run does "
                    "not count; the same command continues with the former code"
                )
            record = structs.replace(record, wall_s=time.monotonic() - start_s, **values)
            if record.clean or not left:
                write_json(folder.run_folder(task.run) / RUN_FILE, record)
                return RunOutcome(run=task.run, record=record, mean_jct_s=mean_jct_s)
            folder.set_aside(task.run, record)
        report(f"attempt {attempt} is set aside in lost/, {left} left: {record.reason}")
    raise AssertionError("a definition has at least one attempt")


def _configured(task: RunTask) -> Config:
    """The configuration of the run, with its own folder, policy and memory."""
    config, run = task.config, task.run
    place = ExperimentFolder(Path(task.folder), task.definition).run_folder(run)
    return structs.replace(
        config,
        run=structs.replace(
            config.run, logs_dir=str(place.parent), run_id=run.name, workload=run.set, seed=run.seed
        ),
        scheduler=structs.replace(config.scheduler, policy=run.policy),
        collector=structs.replace(
            config.collector,
            memory=run.policy in task.definition.memory,
            memory_file=str(place / MEMORY_FILE),
        ),
    )


def _attempt(task: RunTask, check: Callable[[], None]) -> tuple[dict[str, object], float | None]:
    """Returns the values for the record, and the mean JCT. Raises StackError if the stack does not come
    up."""
    stack = Stack(_configured(task), os.environ)
    (stack.run_dir / WORKLOAD_FILE).write_text(task.workload, encoding="utf-8")
    meter = Meter(stack.processes)
    with stack:
        failures = _train(task, stack, meter, check)
        measures = meter.measures()
    _, summary = summarize(read(stack.run_dir / EVENTS_FILE))
    noisy = noise(measures, task.definition.guard)
    reasons = [
        *failures,
        *(f"had to be killed: {process}" for process in stack.killed),
        *(f"audit: {finding}" for finding in summary.audit.findings),
        *([noisy] if noisy else []),
    ]
    values = {
        **structs.asdict(measures),
        "verified": not failures and summary.jobs.verified == summary.jobs.submitted,
        "audit_clean": summary.audit.ok,
        "noisy": bool(noisy),
        "reason": "; ".join(reasons),
    }
    return values, summary.jct_s.mean


def _train(task: RunTask, stack: Stack, meter: Meter, check: Callable[[], None]) -> list[str]:
    """Submit the jobs at their times and wait until they end; returns what went wrong."""
    read = workload_reader(stack.config, stack.run_dir / WORKLOAD_FILE, {})

    def show(table: JobTable) -> None:
        check()
        meter.sample()

    try:
        with Client(stack.config) as client:
            arrivals = Arrivals(client, read(client.slots()), say=lambda line: None)
            return arrivals.failures(follow(stack.jobs, show, arrivals.over(task.definition.timeout_s)))
    except (StackError, ServerUnavailable) as error:
        return [str(error).splitlines()[0]]


def _command_check(command: int) -> Callable[[], None]:
    """A function that raises _CommandGone if the command started this process and no longer exists."""
    started_by_command = os.getppid() == command

    def check() -> None:
        if started_by_command and os.getppid() != command:
            raise _CommandGone

    return check


def _reporter(run: PlannedRun) -> Callable[[str], None]:
    return lambda text: print(f"{run.name}: {text}", file=sys.stderr, flush=True)
