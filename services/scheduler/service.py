"""The scheduler's process: sockets and timers around the pure core.

It stamps every input with the monotonic clock, writes it to the journal, passes it to the core and carries
out the commands. The service itself watches whether agents are alive and times the rounds; the core decides
everything else.
"""

import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from common import __version__
from common.config import Config, new_run_id
from common.lifecycle import UserError, get_logger
from common.messaging.curve_keys import load_keys
from common.messaging.publish_subscribe import EventPublisher, OrdersPublisher
from common.messaging.reactor import Reactor
from common.messaging.request_reply import ReplyServer, RequestClient
from common.protocol import (
    AgentSilent,
    BadMessage,
    CancelJob,
    CoreInput,
    Done,
    Event,
    GetJobs,
    GetProfiles,
    GetRun,
    Heartbeat,
    LeaveAgent,
    Profiles,
    Refused,
    RegisterAgent,
    Reply,
    Report,
    Request,
    RoundDecided,
    RoundDue,
    RunEnded,
    RunInfo,
    RunStarted,
    SubmitJob,
)
from services.scheduler.commands import Answer, Command, Emit, SendOrders, WantRound
from services.scheduler.core import CoreSettings, SchedulerCore
from services.scheduler.journal import JOURNAL_FILE, JournalWriter, read_journal
from services.scheduler.policies.interface import Policy
from services.scheduler.resume import SOURCE, check_config, published_events, write_config_copy
from services.scheduler.state import State, job_table, orders_of
from workloads.applications import applications

PROFILES_TIMEOUT_S = 0.3
"""A round waits this long for the collector, then uses the profiles of the round before."""
AGENTS_LEAVE_S = 1.5
"""How long a stopping scheduler waits for the agents to leave."""
FLUSH_S = 2.0
"""How long a stopping scheduler waits for the logger to take its last events."""

log = get_logger()


class SchedulerService:
    def __init__(
        self,
        config: Config,
        core: SchedulerCore,
        reactor: Reactor,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.core = core
        self.reactor = reactor
        self.clock = clock
        self.closing = False
        run_id = config.run.run_id or self._new_run_id(wall())
        self.run_dir = config.run_dir(run_id)
        self.state = State(run_id=run_id)
        self.heard_s: dict[str, float] = {}
        self.last_beat_s = clock()
        self.round_wanted = ""
        self.round_under_way = False
        self.collector_silent = False

        endpoints = config.endpoints
        keys = load_keys(endpoints.keys_dir)
        self.server = ReplyServer(
            reactor,
            endpoints.scheduler_requests,
            self.handle,
            keys=keys,
            on_bad=self.on_bad_message,
            limits=config.limits,
        )
        self.orders = OrdersPublisher(reactor, endpoints.scheduler_orders, keys, config.limits)
        self.collector = RequestClient(endpoints.collector_requests, keys, reactor, config.limits)
        resumed = self._open_run()
        self.journal = JournalWriter(self.run_dir)
        self.published = published_events(self.run_dir)
        """Events published in this run so far, also by earlier schedulers."""
        missing = self._replay() if resumed else []
        self.publisher = EventPublisher(
            reactor,
            run_id=run_id,
            source=SOURCE,
            incarnation=uuid.uuid4().hex[:12],
            endpoints=endpoints,
            outbox_dir=self.run_dir / "outbox",
            limits=config.limits,
        )
        for event in missing:  # before any other event, so that the count is right even if killed here
            self.publish(event)
        self.publish(
            RunStarted(
                policy=core.policy.name,
                workload=config.run.workload,
                seed=config.run.seed,
                round_s=config.scheduler.round_s,
                version=__version__,
            )
        )
        log.info("run started", run=run_id, policy=core.policy.name, requests=endpoints.scheduler_requests)
        self.timers = (
            reactor.every(config.scheduler.heartbeat_s, self.on_heartbeat_due),
            reactor.every(config.scheduler.round_s, lambda: self.want_round("interval")),
        )

    def _new_run_id(self, wall_s: float) -> str:
        try:
            return new_run_id(Path(self.config.run.logs_dir), self.core.policy.name, wall_s)
        except OSError as error:
            raise UserError(f"run.logs_dir {self.config.run.logs_dir}: {error.strerror}") from error

    def _open_run(self) -> bool:
        """Whether the run exists and is resumed. If it does not exist, creates its folder. Raises
        UserError."""
        if (self.run_dir / JOURNAL_FILE).exists():
            check_config(self.run_dir, self.config)
            return True
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            write_config_copy(self.run_dir, self.config)
        except OSError as error:
            raise UserError(f"{self.run_dir}: cannot be written: {error.strerror}") from error
        return False

    def _replay(self) -> list[Event]:
        """Rebuild the state from the journal. Returns the events of the last input that were not published:
        the previous scheduler may have been killed between writing the journal and publishing."""
        entries = before = 0
        commands: tuple[Command, ...] = ()
        for entry in read_journal(self.run_dir):
            self.state, commands = self.core.step(self.state, entry.input, entry.now_s)
            entries, before = entries + 1, entry.events
        self.heard_s = dict.fromkeys(self.state.agents, self.clock())
        events = [command.event for command in commands if isinstance(command, Emit)]
        missing = events[max(self.published - before, 0) :]
        log.info("journal replayed", entries=entries, jobs=len(self.state.jobs), missing_events=len(missing))
        return missing

    # ------------------------------------------------------------------ requests

    def handle(self, request: Request) -> Reply:
        match request:
            case SubmitJob() | CancelJob() | Report() | LeaveAgent():
                return self.feed(request) or Done()
            case RegisterAgent():
                return self.register(request)
            case Heartbeat():
                return self.heartbeat(request)
            case GetJobs():
                return job_table(self.state, self.clock(), self.core.policy.name, request.ended)
            case GetRun():
                return RunInfo(
                    run_id=self.state.run_id, policy=self.core.policy.name, seed=self.core.settings.seed
                )
            case _:
                return Refused(reason=f"{type(request).__name__} is not a request for the scheduler")

    def register(self, request: RegisterAgent) -> Reply:
        """A second agent with the same name has to wait until the first one is silent. Otherwise the two
        would replace each other forever."""
        name, now_s = request.node.name, self.clock()
        known = self.state.agents.get(name)
        silent_s = now_s - self.heard_s.get(name, now_s)
        timeout_s = self.config.scheduler.agent_timeout_s
        if known and known.incarnation != request.incarnation and silent_s < timeout_s:
            return Refused(
                reason=f"node {name!r} already has an agent, last heard {silent_s:.1f} s ago; give "
                f"each agent its own --node, or wait until the other one has been silent for {timeout_s:g} s"
            )
        self.heard_s[name] = now_s
        return self.feed(request) or Done()

    def heartbeat(self, beat: Heartbeat) -> Reply:
        agent = self.state.agents.get(beat.node)
        if not agent or agent.incarnation != beat.incarnation:
            return Refused(reason=f"node {beat.node!r} is not registered; register first")
        self.heard_s[beat.node] = self.clock()
        return Done() if beat.orders_version == self.state.orders_version else orders_of(self.state)

    def on_bad_message(self, error: str) -> None:
        log.warning("bad message refused", error=error)
        self.publish(BadMessage(service="scheduler", error=error))

    # ------------------------------------------------------------------ the core

    def feed(self, given: CoreInput) -> Reply | None:
        """Journal an input, pass it to the core and carry out the commands. Returns the reply, if there is
        one."""
        now_s = self.clock()
        self.journal.append(now_s, given, self.published)
        start_s = time.perf_counter()
        self.state, commands = self.core.step(self.state, given, now_s)
        took_s = time.perf_counter() - start_s
        reply = None
        for command in commands:
            reply = self.carry_out(command, took_s) or reply
        return reply

    def carry_out(self, command: Command, took_s: float) -> Reply | None:
        match command:
            case Answer(reply):
                return reply
            case Emit(event):
                if isinstance(event, RoundDecided):
                    event = msgspec.structs.replace(event, decision_s=took_s)
                self.publish(event)
            case SendOrders():
                self.orders.publish(orders_of(self.state))
            case WantRound(trigger):
                self.want_round(trigger)
        return None

    def publish(self, event: Event) -> None:
        self.publisher.publish(event)
        self.published += 1

    # ------------------------------------------------------------------ timers

    def on_heartbeat_due(self) -> None:
        self.orders.publish(orders_of(self.state))
        now_s = self.clock()
        late_s = now_s - self.last_beat_s - self.config.scheduler.heartbeat_s
        self.last_beat_s = now_s
        if late_s > 0.5 * self.config.scheduler.agent_timeout_s:
            # This process itself stood still: messages of the agents may be waiting to be read.
            self.heard_s = dict.fromkeys(self.state.agents, now_s)
        for name, agent in list(self.state.agents.items()):
            if now_s - self.heard_s.get(name, now_s) > self.config.scheduler.agent_timeout_s:
                log.warning("agent is silent", node=name)
                self.feed(AgentSilent(node=name, incarnation=agent.incarnation))

    def want_round(self, trigger: str) -> None:
        """Ask the collector for profiles, then decide. Triggers that come meanwhile cause one more round."""
        if self.round_under_way:
            self.round_wanted = trigger if trigger != "interval" else self.round_wanted
            return
        if not self.state.jobs or self.closing:
            return
        self.round_under_way = True
        specs = [job.spec for job in self.state.jobs.values()]
        self.collector.post(
            GetProfiles(
                job_ids=tuple(spec.id for spec in specs),
                applications=tuple(spec.application for spec in specs),
                targets=tuple(spec.target for spec in specs),
            ),
            on_reply=lambda reply: self.decide(trigger, reply),
            on_silence=lambda: self.decide(trigger, None),
            timeout_s=PROFILES_TIMEOUT_S,
            attempts=1,
        )

    def decide(self, trigger: str, reply: Reply | None) -> None:
        if isinstance(reply, Profiles):
            self.feed(reply)
        if (reply is None) != self.collector_silent:
            self.collector_silent = reply is None
            if self.collector_silent:
                log.warning("the collector does not answer; using the profiles of the last round")
            else:
                log.info("the collector answers again")
        self.feed(RoundDue(trigger=trigger))
        self.round_under_way = False
        if self.round_wanted:
            again, self.round_wanted = self.round_wanted, ""
            self.want_round(again)

    def close(self, reason: str) -> None:
        """Wait for the agents to leave, then end the run. After its last event nothing is received or
        decided."""
        self.closing = True
        self.reactor.run_until(lambda: not self.state.agents, AGENTS_LEAVE_S)
        for timer in self.timers:
            timer.cancel()
        self.collector.close()
        self.server.close()
        self.publish(RunEnded(reason=reason, active=tuple(self.state.jobs)))
        flushed = self.publisher.close(FLUSH_S)
        self.journal.close()
        log.info("stopped", flushed=flushed)


def make_core(config: Config, policy: Policy) -> SchedulerCore:
    return SchedulerCore(
        policy,
        applications(config.applications.modules),
        CoreSettings(
            seed=config.run.seed,
            restart_penalty_s=config.scheduler.restart_penalty_s,
            max_failures=config.scheduler.max_failures,
            leave_timeout_s=2 * config.trainer.order_timeout_s,
        ),
    )
