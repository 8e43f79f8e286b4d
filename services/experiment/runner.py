"""One run of an experiment, from a watch of the machine to its record, repeated where it went wrong.

It may be called in another process than the command's, and on another machine with the same files.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from msgspec import structs

from analysis.log.frames import read
from analysis.summarize import summarize
from common.config import Config
from common.eventlog import EVENTS_FILE
from common.lifecycle import EXIT_FAILED, UserError
from common.messaging.request_reply import ServerUnavailable
from common.protocol import JobTable
from common.types import Struct
from services.bench.quiet_machine import MachineBusy, Meter, noise, wait_until_quiet
from services.experiment.folder import (
    MEMORY_FILE,
    RUN_FILE,
    WORKLOAD_FILE,
    Folder,
    RunRecord,
    code_digest,
    write_json,
)
from services.experiment.plan import Definition, PlannedRun
from services.launcher.client import Arrivals, Client, workload_reader
from services.launcher.stack import PROCFILE, Stack, StackError, expected_nodes
from services.monitor.service import follow
from services.scheduler.policies import UnknownPolicy, make_live_policy


class _CommandGone(BaseException):
    """Nobody waits for the run any more."""


class RunTask(Struct, frozen=True):
    """A run to do. `workload` is the text of its file, `config` the experiment's, `command` the process that
    asks for it, and `code` the digest of the code that it runs."""

    run: PlannedRun
    workload: str
    folder: str
    definition: Definition
    config: Config
    command: int
    code: str


class RunOutcome(Struct, frozen=True):
    run: PlannedRun
    record: RunRecord
    mean_jct_s: float | None


def check_policies(names: Iterable[str]) -> None:
    """Raises UserError for one that real jobs cannot be scheduled by."""
    for name in names:
        try:
            make_live_policy(name)
        except UnknownPolicy as error:
            raise UserError(str(error)) from error


def check_cluster(definition: Definition) -> None:
    """Raises UserError where the stack has not as many nodes as the experiment wants."""
    nodes = len(expected_nodes(PROCFILE))
    if definition.nodes != nodes:
        raise UserError(f"nodes {definition.nodes}: allowed: {nodes}, the agents of {PROCFILE}")


def perform(task: RunTask) -> RunOutcome:
    """Do the run, at most `attempts` times. Raises Busy where the machine is, StackError where the stack does
    not come up, even in the last attempt, and UserError where the code is no longer the command's."""
    try:
        return _perform(task)
    except _CommandGone:  # an engine's process, and so is what else would wait for more work in it
        os._exit(EXIT_FAILED)


def _perform(task: RunTask) -> RunOutcome:
    folder = Folder(Path(task.folder), task.definition)
    bounds = task.definition.guard
    tell = _tell(task.run)
    check = _command_check(task.command)
    for left in reversed(range(task.definition.attempts)):
        if problem := wait_until_quiet(bounds, tell, bounds.wait_s):
            raise MachineBusy(
                f"{task.run.name}: the machine is busy: {problem}; the same command goes on from here"
            )
        check()
        start_s = time.monotonic()
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        attempt = folder.attempt(task.run)
        record = folder.record(task.run, attempt, started=started)
        try:
            values, mean_jct_s = _attempt(task, check)
        except StackError as error:
            reason = f"the stack did not come up: {str(error).splitlines()[0]}"
            record = structs.replace(record, wall_s=time.monotonic() - start_s, reason=reason)
            folder.lose(task.run, record)
            if not left:
                raise
        else:
            if code_digest() != task.code:  # each stack loads it anew
                raise UserError(
                    f"{task.run.name}: the code of coadapt was changed while the experiment went on: the run "
                    "does not count; with the former code the same command goes on"
                )
            record = structs.replace(record, wall_s=time.monotonic() - start_s, **values)
            if record.clean or not left:
                write_json(folder.of(task.run) / RUN_FILE, record)
                return RunOutcome(run=task.run, record=record, mean_jct_s=mean_jct_s)
            folder.lose(task.run, record)
        tell(f"attempt {attempt} is put aside in lost/, {left} left: {record.reason}")
    raise AssertionError("a definition has at least one attempt")


def _configured(task: RunTask) -> Config:
    """The configuration of the run: its own folder, policy, and memory."""
    config, run = task.config, task.run
    place = Folder(Path(task.folder), task.definition).of(run)
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
    """What is to be recorded, and the mean JCT. Raises StackError where the stack does not come up."""
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
    """Submit the jobs in their time and wait for their end; returns what went wrong."""
    read = workload_reader(stack.config, stack.run_dir / WORKLOAD_FILE, {})

    def show(table: JobTable) -> None:
        check()
        meter.sample()

    try:
        with Client(stack.config) as client:
            arrivals = Arrivals(client, read(client.slots()), tell=lambda line: None)
            return arrivals.failures(follow(stack.jobs, show, arrivals.over(task.definition.timeout_s)))
    except (StackError, ServerUnavailable) as error:
        return [str(error).splitlines()[0]]


def _command_check(command: int) -> Callable[[], None]:
    """What raises _CommandGone when the command has started this process, and is no longer there."""
    started_by_it = os.getppid() == command

    def check() -> None:
        if started_by_it and os.getppid() != command:
            raise _CommandGone

    return check


def _tell(run: PlannedRun) -> Callable[[str], None]:
    return lambda text: print(f"{run.name}: {text}", file=sys.stderr, flush=True)
