"""What commands ask of a scheduler: submit the jobs of a workload when they are due, report job states."""

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

REPLY_TIMEOUT_S = 0.7
ATTEMPTS = 3
Answer = TypeVar("Answer")


def print_line(line: str) -> None:
    print(line, flush=True)


class Client:
    """A context: requests to the configured scheduler.

    A request raises ServerUnavailable if the scheduler does not reply in time to any of its attempts."""

    def __init__(self, config: Config) -> None:
        keys = load_keys(config.endpoints.keys_dir)
        self._client = RequestClient(config.endpoints.scheduler_requests, keys, limits=config.limits)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def ask(
        self,
        request: Request,
        kind: type[Answer],
        timeout_s: float = REPLY_TIMEOUT_S,
        attempts: int = ATTEMPTS,
    ) -> Answer:
        """The reply, which is of type `kind`. Raises UserError with the scheduler's reason if it refuses."""
        reply = self._client.request(request, timeout_s=timeout_s, attempts=attempts)
        if isinstance(reply, kind):
            return reply
        reason = reply.reason if isinstance(reply, Refused) else f"unexpected reply {type(reply).__name__}"
        raise UserError(f"the scheduler refused: {reason}")

    def jobs(self) -> JobTable:
        return self.ask(GetJobs(), JobTable)

    def slots(self) -> int | None:
        """Number of slots in the cluster; None before the first agent has registered."""
        nodes = self.jobs().nodes
        return sum(node.slots for node in nodes) if nodes else None


class Arrivals:
    """Submits each job of a workload when its arrival time has come, counted from now.

    A job table has all active jobs but only the newest of the ended ones. So jobs that have ended are
    remembered here, and an accepted job that is not in the table has ended. `say` gets one line for each
    submission."""

    def __init__(self, client: Client, workload: Workload, say: Callable[[str], None] = print_line) -> None:
        self.job_ids = {row.spec.id for row in workload.rows}
        self._client = client
        self._say = say
        self._submitted: set[str] = set()
        self._ended: dict[str, JobRow] = {}
        self._waiting = deque(workload.rows)
        self._start_s = time.monotonic()

    def submit_due(self) -> float:
        """Submit the jobs that are due; returns the seconds to the next arrival, inf after the last one."""
        while self._waiting:
            wait_s = self._waiting[0].at_s - (time.monotonic() - self._start_s)
            if wait_s > 0:
                return wait_s
            spec = self._waiting.popleft().spec
            accepted = self._client.ask(SubmitJob(spec=spec), JobAccepted)
            self._submitted.add(spec.id)
            self._say(f"{spec.id}: {'already accepted' if accepted.duplicate else 'submitted'}")
        return math.inf

    def over(self, timeout_s: float = math.inf) -> Callable[[JobTable], bool]:
        """A function that submits due jobs each time it gets a job table, and returns whether all jobs have
        ended or `timeout_s`, counted from now, has passed."""
        deadline_s = time.monotonic() + timeout_s

        def over(table: JobTable) -> bool:
            if self.all_ended(table) or time.monotonic() > deadline_s:
                return True
            self.submit_due()
            return False

        return over

    def all_ended(self, table: JobTable) -> bool:
        """Whether all jobs had been submitted before the table was requested, and have ended."""
        self._remember(table)
        active = {row.id for row in table.jobs if not row.state.terminal}
        return self.job_ids == self._submitted and not self.job_ids & active

    def failures(self, table: JobTable) -> list[str]:
        """One line for each job of the workload that was not completed and verified."""
        self._remember(table)
        rows = {row.id: row for row in table.jobs} | self._ended
        lines = []
        for job_id in sorted(self.job_ids):
            row = rows.get(job_id)
            if job_id not in self._submitted:
                lines.append(f"{job_id}: not submitted before the timeout")
            elif row is None:
                lines.append(f"{job_id}: ended too long ago; only the event log says how")
            elif row.state is not JobState.COMPLETED:
                lines.append(f"{job_id}: {row.state}: {row.reason}")
        return lines

    def _remember(self, table: JobTable) -> None:
        self._ended |= {row.id: row for row in table.jobs if row.state.terminal and row.id in self.job_ids}


def workload_reader(
    config: Config, file: Path | None, fields: dict[str, Any]
) -> Callable[[int | None], Workload]:
    """A function that reads and checks the workload of `file`, or the single job of `fields`.

    Its argument is the number of slots of the cluster; None if it is not known."""
    known = applications(config.applications.modules)
    if file is not None:
        return lambda slots: read_workload(file, known, slots)
    default_id = f"{fields['application']}-{secrets.token_hex(3)}"
    return lambda slots: single_job(fields, default_id, known, slots)
