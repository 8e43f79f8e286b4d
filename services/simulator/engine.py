"""The simulator: a virtual clock around the scheduler's core.

A heap holds the upcoming arrivals and world events, ordered by time. The clock jumps from one to the next,
because nothing changes in between. The core gets its inputs, the world gets the core's orders. The real clock
is read only to measure decisions, and its readings go into no log.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from common import __version__
from common.protocol import (
    CoreInput,
    Event,
    Fact,
    JobRefused,
    Profiles,
    RegisterAgent,
    Report,
    RoundDecided,
    RoundDue,
    RunEnded,
    RunStarted,
    SubmitJob,
)
from common.types import JobSpec, Node
from services.scheduler.commands import Emit, SendOrders, WantRound
from services.scheduler.core import CoreSettings, SchedulerCore
from services.scheduler.decisions import unchanged_because
from services.scheduler.policies.interface import Policy
from services.scheduler.state import State, orders_of
from services.simulator.event_recorder import INCARNATION, SCHEDULER, EventRecorder, Log
from services.simulator.stall_detector import StallDetector
from services.simulator.worlds.interface import World, WorldEvent
from workloads.files.workload_file import Arrival


@dataclass(frozen=True)
class SimulationPlan:
    """A run, apart from its world and policy."""

    run_id: str
    workload: str
    arrivals: Sequence[Arrival]
    nodes: Sequence[Node]
    round_s: float
    seed: int


@dataclass
class SimulatedRun:
    """The outcome: the core's last state, and what was counted on the way."""

    state: State
    decisions_s: list[float] = field(default_factory=list)
    """What each decision took, by the clock of the simulation."""
    values_and_bounds: list[tuple[float, float]] = field(default_factory=list)
    """Of each decision that has them."""
    invalid_decisions: list[str] = field(default_factory=list)
    """The reason, for each round in which the policy gave no valid decision."""
    refused: dict[str, str] = field(default_factory=dict)
    """The reason, by job."""
    stalled: str = ""
    """Why the run was given up; empty if it was not."""


class Simulation:
    """One run. `clock` measures decisions; `log` takes the records of the run, if any are wanted."""

    def __init__(
        self,
        plan: SimulationPlan,
        world: World,
        policy: Policy,
        clock: Callable[[], float],
        log: Log | None = None,
    ) -> None:
        settings = CoreSettings(
            seed=plan.seed,
            restart_penalty_s=world.restart_s,
            max_failures=3,
            leave_timeout_s=math.inf,
            accumulates_alone=world.accumulates_alone,
        )
        self._plan, self._world, self._clock = plan, world, clock
        self._core = SchedulerCore(policy, world.applications, settings, world.oracle)
        self._run = SimulatedRun(State(run_id=plan.run_id))
        self._recorder = EventRecorder(plan.run_id, log)
        self._stall_detector = StallDetector(world)
        self._now_s = 0.0
        self._rounds = 0
        """Intervals that have passed."""
        self._requested_round = ""
        """What asks for a round before the interval ends; empty if nothing does."""
        self._upcoming: list[tuple[float, int, JobSpec | WorldEvent]] = []
        self._order = count()
        self._reports = dict.fromkeys((node.name for node in plan.nodes), 0)

    def run(self) -> SimulatedRun:
        self._start()
        while self._run.state.jobs or self._upcoming:
            self._advance()
            if self._run.stalled:
                break
        self._end()
        return self._run

    def _start(self) -> None:
        plan = self._plan
        started = RunStarted(
            policy=self._core.policy.name,
            workload=plan.workload,
            seed=plan.seed,
            round_s=plan.round_s,
            version=__version__,
        )
        self._record(started)
        # Every registration asks for orders to all nodes. Sending them once keeps large clusters fast.
        wants_orders = [self._step(RegisterAgent(node=node, incarnation=INCARNATION)) for node in plan.nodes]
        if any(wants_orders):
            self._send_orders()
        for arrival in plan.arrivals:
            self._push(arrival.at_s, arrival.spec)
        self._requested_round = ""

    def _advance(self) -> None:
        """Jump to the next event or round, and handle all that is due."""
        round_s, next_s = self._next_round_s(), self._upcoming[0][0] if self._upcoming else math.inf
        until_s = min(round_s, next_s) if self._world.event_driven else round_s
        reached_s, events = self._world.advance(until_s)
        self._push_events(events)
        while self._upcoming and self._upcoming[0][0] <= reached_s:
            self._now_s, _, due = heapq.heappop(self._upcoming)
            self._handle(due)
        self._now_s = reached_s
        if reached_s >= round_s:
            self._rounds += 1
            self._decide(self._requested_round or "interval")
        elif self._requested_round:
            self._decide(self._requested_round)

    def _next_round_s(self) -> float:
        if not self._run.state.jobs:  # an idle cluster skips the rounds before the next arrival
            idle_rounds = math.ceil(self._upcoming[0][0] / self._plan.round_s) - 1
            self._rounds = max(self._rounds, idle_rounds)
        return (self._rounds + 1) * self._plan.round_s

    def _handle(self, due: JobSpec | WorldEvent) -> None:
        if isinstance(due, JobSpec):
            self._feed(SubmitJob(spec=due))
        elif isinstance(due.content, Fact):
            node = due.source
            self._reports[node] += 1
            number = self._reports[node]
            self._feed(Report(node=node, incarnation=INCARNATION, number=number, facts=(due.content,)))
        else:
            self._record(due.content, due.source)

    def _decide(self, trigger: str) -> None:
        self._requested_round = ""
        if profiles := self._world.profiles(tuple(self._run.state.jobs)):
            self._feed(Profiles(profiles=profiles))
        self._feed(RoundDue(trigger=trigger))
        self._run.stalled = self._stall_detector.problem(self._run.state, self._now_s)
        self._recorder.flush()

    def _end(self) -> None:
        reason = self._run.stalled or "every job has ended"
        self._record(RunEnded(reason=reason, active=tuple(self._run.state.jobs)))
        self._recorder.flush()

    # ------------------------------------------------------------------ core and world

    def _feed(self, given: CoreInput) -> None:
        """Give the core an input, and the world the orders that follow from it."""
        if self._step(given):
            self._send_orders()

    def _step(self, given: CoreInput) -> bool:
        """Give the core an input and carry out its commands. Returns whether orders must be sent."""
        start_s = self._clock()
        self._run.state, commands = self._core.step(self._run.state, given, self._now_s)
        took_s = self._clock() - start_s
        wants_orders = False
        for command in commands:
            match command:
                case Emit(event):
                    self._count(event, took_s)
                    self._record(event)
                case WantRound(trigger):
                    self._requested_round = trigger if self._world.event_driven else ""
                case SendOrders():
                    wants_orders = True
                case _:
                    pass  # replies to requests: nobody waits for them here
        return wants_orders

    def _count(self, event: Event, took_s: float) -> None:
        run = self._run
        if isinstance(event, RoundDecided):
            run.decisions_s.append(took_s)
            reason = next(iter(event.reasons.values()))
            if reason.startswith(unchanged_because(self._core.policy.name)):
                run.invalid_decisions.append(reason)
            if event.value is not None and event.bound is not None:
                run.values_and_bounds.append((event.value, event.bound))
        elif isinstance(event, JobRefused):
            run.refused[event.job_id] = event.reason

    def _send_orders(self) -> None:
        self._push_events(self._world.apply(orders_of(self._run.state), self._now_s))

    def _push_events(self, events: Iterable[WorldEvent]) -> None:
        for event in events:
            self._push(event.t_s, event)

    def _push(self, t_s: float, item: JobSpec | WorldEvent) -> None:
        heapq.heappush(self._upcoming, (t_s, next(self._order), item))

    def _record(self, event: Event, source: str = SCHEDULER) -> None:
        self._recorder.add(self._now_s, source, event)
