"""The metrics-collector: hears the trainers' samples, keeps every job's profile, answers GetProfiles.

It belongs to one run at a time, which the scheduler names (GetRun, asked again and again: a scheduler may be
started later, or anew with another run, and then the collector starts afresh). What it knew before a crash
it reads back from the run's event log, since trainers only repeat their present configuration.
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
"""Between two questions which run it is."""
CLOSE_S = 2.0

log = get_logger()


class Collector:
    def __init__(self, config: Config, reactor: Reactor) -> None:
        self._config = config
        self._reactor = reactor
        self._run_id = ""
        self._publisher: EventPublisher | None = None
        self._memory = load_memory(config.memory_file) if config.collector.memory else None
        self._histories = ObservedJobs()
        self._heard: dict[tuple[str, str], int] = {}
        """The newest event of every (source, incarnation): what was read back is not counted twice."""
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
                self._take_part(reply.run_id)
            again()

        self._scheduler.post(GetRun(), on_reply, again, attempts=1)

    def _take_part(self, run_id: str) -> None:
        former, self._publisher = self._publisher, None
        if former:
            former.close(CLOSE_S)
        self._run_id = run_id
        self._histories = ObservedJobs(run_id, self._memory)
        self._heard = {}
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
        events = self._read_back(folder / EVENTS_FILE)
        for job in self._histories.active():
            self._fit_where_needed(job)
        log.info("takes part", run=run_id, events_read_back=events)

    def _read_back(self, path: Path) -> int:
        """Events taken from the log; a line that cannot be read ends it, for the logger may be writing it."""
        taken = 0
        if not path.exists():
            return taken
        try:
            for record in read_events(path):
                self._heard[record.source, record.incarnation] = record.seq
                taken += 1
                self._histories.add(record.event)
        except EventLogError as error:
            log.warning("read back only a part of the log", error=str(error))
        return taken

    # ---------------------------------------------------------------- what comes in

    def _take(self, record: EventRecord) -> None:
        origin = record.source, record.incarnation
        if record.run_id != self._run_id or record.seq <= self._heard.get(origin, 0):
            return
        self._heard[origin] = record.seq
        job = self._histories.add(record.event)
        if job:
            self._fit_where_needed(job)
        elif isinstance(record.event, JobCompleted | JobFailed | JobCancelled):
            self._save_memory()

    def _save_memory(self) -> None:
        if self._memory is not None:
            save_memory(self._config.memory_file, self._memory)

    def _fit_where_needed(self, job: ObservedJob) -> None:
        if not job.needs_fit or not self._publisher:
            return
        start_s = time.perf_counter()
        fit = self._histories.fit(job)
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
        """The points themselves stay here: a policy needs the model, and a reply has to stay small."""
        match request:
            case GetProfiles(job_ids=job_ids, applications=applications, targets=targets):
                if not applications and not targets:
                    applications, targets = ("",) * len(job_ids), (0.0,) * len(job_ids)
                if not len(job_ids) == len(applications) == len(targets):
                    return Refused(
                        reason="GetProfiles: applications and targets: as many as job_ids, or none"
                    )
                named = zip(job_ids, applications, targets, strict=True)
                profiles = (self._histories.profile(*one) for one in named)
                return Profiles(profiles=tuple(structs.replace(p, points=()) for p in profiles))
            case _:
                return Refused(reason=f"{type(request).__name__}: not a request for the metrics-collector")

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
