"""The metrics-collector: receives the trainers' samples, keeps every job's profile, and answers GetProfiles.

It belongs to one run at a time, which the scheduler names. It asks for the run (GetRun) again and again,
because a scheduler may start later, or start another run, for which the collector begins with no profiles.
After a crash it reads the run's event log to recover what it knew: trainers repeat only their present
configuration.
"""

import time
import uuid
from pathlib import Path

from msgspec import structs

from common.config import Config
from common.eventlog import EVENTS_FILE, EventLogError, read_events
from common.lifecycle import StopFlag, get_logger
from common.messaging.curve_keys import load_keys
from common.messaging.publish_subscribe import EventPublisher, EventSubscriber
from common.messaging.reactor import Reactor
from common.messaging.request_reply import ReplyServer, RequestClient
from common.protocol import (
    BadMessage,
    EventRecord,
    GenerationStarted,
    GetProfiles,
    GetRun,
    JobCancelled,
    JobCompleted,
    JobFailed,
    ModelFitted,
    Profiles,
    Refused,
    Reply,
    Request,
    RunInfo,
    TrainingSample,
)
from services.metrics_collector.memory_file import load_memory, save_memory
from services.metrics_collector.profiles import ObservedJob, ObservedJobs

SERVICE = "metrics-collector"
SOURCE = "collector"
TOPICS = tuple(
    kind.__name__ for kind in (TrainingSample, GenerationStarted, JobCompleted, JobFailed, JobCancelled)
)
ASK_RUN_S = 1.0
"""Time between two questions for the run."""
CLOSE_S = 2.0
"""How long a publisher tries to deliver its last events."""

log = get_logger()


class Collector:
    def __init__(self, config: Config, reactor: Reactor) -> None:
        self._config = config
        self._reactor = reactor
        self._run_id = ""
        self._publisher: EventPublisher | None = None
        self._memory = load_memory(config.memory_file) if config.collector.memory else None
        self._jobs = ObservedJobs()
        self._newest: dict[tuple[str, str], int] = {}
        """Number of the newest event of each (source, incarnation), so that no event counts twice."""
        endpoints, limits = config.endpoints, config.limits
        keys = load_keys(endpoints.keys_dir)
        self._server = ReplyServer(
            reactor, endpoints.collector_requests, self._answer, keys, self._on_bad, limits
        )
        self._events = EventSubscriber(
            reactor, endpoints.collector_events, TOPICS, self._take, self._on_bad, keys, limits
        )
        self._scheduler = RequestClient(endpoints.scheduler_requests, keys, reactor, limits)
        self._ask_run()

    def close(self) -> None:
        self._scheduler.close()
        self._server.close()
        self._events.close()
        self._save_memory()
        if self._publisher:
            flushed = self._publisher.close(CLOSE_S)
            log.info("stopped", flushed=flushed)

    # ---------------------------------------------------------------- which run

    def _ask_run(self) -> None:
        def again() -> None:
            self._reactor.call_later(ASK_RUN_S, self._ask_run)

        def on_reply(reply: Reply) -> None:
            if isinstance(reply, RunInfo) and reply.run_id != self._run_id:
                self._join(reply.run_id)
            again()

        self._scheduler.post(GetRun(), on_reply, again, attempts=1)

    def _join(self, run_id: str) -> None:
        previous, self._publisher = self._publisher, None
        if previous:
            previous.close(CLOSE_S)
        self._run_id = run_id
        self._jobs = ObservedJobs(run_id, self._memory)
        self._newest = {}
        folder = self._config.run_dir(run_id)
        self._publisher = EventPublisher(
            self._reactor,
            run_id,
            SOURCE,
            uuid.uuid4().hex[:8],
            self._config.endpoints,
            folder / "outbox",
            limits=self._config.limits,
        )
        events = self._recover(folder / EVENTS_FILE)
        for job in self._jobs.active():
            self._fit_if_needed(job)
        log.info("joined", run=run_id, events_recovered=events)

    def _recover(self, path: Path) -> int:
        """Take the events from the log. Stops at a line that cannot be read: the logger may be writing it.
        Returns the number of events."""
        taken = 0
        if not path.exists():
            return taken
        try:
            for record in read_events(path):
                self._newest[record.source, record.incarnation] = record.seq
                taken += 1
                self._jobs.add(record.event)
        except EventLogError as error:
            log.warning("only a part of the event log was recovered", error=str(error))
        return taken

    # ---------------------------------------------------------------- events and requests

    def _take(self, record: EventRecord) -> None:
        origin = record.source, record.incarnation
        if record.run_id != self._run_id or record.seq <= self._newest.get(origin, 0):
            return
        self._newest[origin] = record.seq
        job = self._jobs.add(record.event)
        if job:
            self._fit_if_needed(job)
        elif isinstance(record.event, JobCompleted | JobFailed | JobCancelled):
            self._save_memory()

    def _save_memory(self) -> None:
        if self._memory is not None:
            save_memory(self._config.memory_file, self._memory)

    def _fit_if_needed(self, job: ObservedJob) -> None:
        if not job.needs_fit or not self._publisher:
            return
        start_s = time.perf_counter()
        fit = self._jobs.fit(job)
        self._publisher.publish(
            ModelFitted(
                job_id=job.job_id,
                parameters=fit.parameters,
                statistics=job.statistics,
                error=fit.error,
                points=len(job.times),
                fit_s=time.perf_counter() - start_s,
            )
        )

    def _answer(self, request: Request) -> Reply:
        """Profiles are sent without their points: a policy needs only the model, and a reply has to be
        small."""
        match request:
            case GetProfiles(job_ids=job_ids, applications=applications, targets=targets):
                if not applications and not targets:
                    applications, targets = ("",) * len(job_ids), (0.0,) * len(job_ids)
                if not len(job_ids) == len(applications) == len(targets):
                    return Refused(
                        reason=f"GetProfiles: {len(applications)} applications and {len(targets)} targets "
                        f"for {len(job_ids)} job_ids; allowed: one of each per job, or none"
                    )
                profiles = map(self._jobs.profile, job_ids, applications, targets)
                return Profiles(profiles=tuple(structs.replace(p, points=()) for p in profiles))
            case _:
                return Refused(reason=f"{type(request).__name__} is not a request for the metrics-collector")

    def _on_bad(self, text: str) -> None:
        log.warning("bad message", error=text)
        if self._publisher:
            self._publisher.publish(BadMessage(service=SERVICE, error=text))


def run(config: Config, stop: StopFlag) -> int:
    """Serve until the stop flag is set, then close in order."""
    reactor = Reactor(stop)
    try:
        collector = Collector(config, reactor)
        log.info("ready", requests=config.endpoints.collector_requests)
        reactor.run()
        collector.close()
    finally:
        reactor.close()
    return stop.exit_code
