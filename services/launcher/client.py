"""What the commands say to a scheduler: submit the jobs of a workload in their time, ask how they are."""

import math
import secrets
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from common.config import Config
from common.lifecycle import UserError
from common.messaging.curve_keys import load_keys
from common.messaging.request_reply import RequestClient
from common.protocol import GetJobs, JobAccepted, JobRow, JobTable, Refused, Request, SubmitJob
from common.types import JobState
from workloads.applications import applications
from workloads.files.workload_file import Workload, read_workload, single_job

SILENCE_S = 0.7
"""Three times so long without a sign of the scheduler, and nobody is there."""
Answer = TypeVar("Answer")


def say(line: str) -> None:
    print(line, flush=True)


class Client:
    """Questions to the scheduler that the configuration names, as a context."""

    def __init__(self, config: Config) -> None:
        keys = load_keys(config.endpoints.keys_dir)
        self._client = RequestClient(config.endpoints.scheduler_requests, keys, limits=config.limits)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, request: Request, kind: type[Answer]) -> Answer:
        """The reply, of this kind. Raises UserError with the scheduler's reason when it refuses."""
        reply = self._client.request(request, timeout_s=SILENCE_S, attempts=3)
        if isinstance(reply, kind):
            return reply
        reason = reply.reason if isinstance(reply, Refused) else f"unexpected reply {type(reply).__name__}"
        raise UserError(f"the scheduler refused: {reason}")

    def jobs(self) -> JobTable:
        return self.ask(GetJobs(), JobTable)

    def slots(self) -> int | None:
        """Slots of the cluster; None while no agent has registered."""
        nodes = self.jobs().nodes
        return sum(node.slots for node in nodes) if nodes else None


class Arrivals:
    """The jobs of a workload, each submitted when its time has come; time starts now.

    A job table has all active jobs but only the newest of the others, so what was seen to end is remembered,
    and a job that was accepted and is not in the table has ended. `tell` gets a line on each submission."""

    def __init__(self, client: Client, workload: Workload, tell: Callable[[str], None] = say) -> None:
        self.job_ids = {row.spec.id for row in workload.rows}
        self._client = client
        self._tell = tell
        self._submitted: set[str] = set()
        self._ended: dict[str, JobRow] = {}
        self._waiting = deque(workload.rows)
        self._start_s = time.monotonic()

    def submit_due(self) -> float:
        """Submit what is due; returns the seconds to the next arrival, inf when all have been submitted."""
        while self._waiting:
            wait_s = self._waiting[0].at_s - (time.monotonic() - self._start_s)
            if wait_s > 0:
                return wait_s
            spec = self._waiting.popleft().spec
            accepted = self._client.ask(SubmitJob(spec=spec), JobAccepted)
            self._submitted.add(spec.id)
            self._tell(f"{spec.id}: {'already accepted' if accepted.duplicate else 'submitted'}")
        return math.inf

    def over(self, timeout_s: float = math.inf) -> Callable[[JobTable], bool]:
        """What submits, at each table that it is shown, what is due, and says whether all have ended, or the
        time is over, which counts from now."""
        deadline_s = time.monotonic() + timeout_s

        def over(table: JobTable) -> bool:
            if self.all_ended(table) or time.monotonic() > deadline_s:
                return True
            self.submit_due()
            return False

        return over

    def all_ended(self, table: JobTable) -> bool:
        """Whether all were submitted, before the table was asked for, and have ended."""
        self._remember(table)
        active = {row.id for row in table.jobs if not row.state.terminal}
        return self.job_ids == self._submitted and not self.job_ids & active

    def failures(self, table: JobTable) -> list[str]:
        """A line on each of these jobs that was not completed and verified."""
        self._remember(table)
        rows = {row.id: row for row in table.jobs} | self._ended
        lines = []
        for job_id in sorted(self.job_ids):
            row = rows.get(job_id)
            if job_id not in self._submitted:
                lines.append(f"{job_id}: not submitted before the time was over")
            elif row is None:
                lines.append(f"{job_id}: has ended long ago; only the event log still says how")
            elif row.state is not JobState.COMPLETED:
                lines.append(f"{job_id}: {row.state}: {row.reason}")
        return lines

    def _remember(self, table: JobTable) -> None:
        self._ended |= {row.id: row for row in table.jobs if row.state.terminal and row.id in self.job_ids}


def workload_reader(
    config: Config, file: Path | None, fields: dict[str, Any]
) -> Callable[[int | None], Workload]:
    """What reads and checks the workload, given the number of slots of the cluster."""
    known = applications(config.applications.modules)
    if file is not None:
        return lambda slots: read_workload(file, known, slots)
    default_id = f"{fields['application']}-{secrets.token_hex(3)}"
    return lambda slots: single_job(fields, default_id, known, slots)
