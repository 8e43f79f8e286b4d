"""The virtual clock around the scheduler's core: it gives the core its inputs, and a world its orders.

A heap holds what is to come, by time: arrivals, and what the world says will happen. Between two of them
nothing changes, so the clock jumps. The real clock is read only to measure decisions, and goes into no log.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from common import __version__
from common.protocol import (
    CoreInput,
    Event,
    EventRecord,
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
from services.simulator.worlds.interface import COLLECTOR, Happening, World
from workloads.files.workload_file import Arrival

SCHEDULER = "scheduler"
INCARNATION = "simulated"
STALLED_ROUNDS = 1000
STALLED_RESTARTS = 10
"""So many rounds in a row, and seconds as of so many restarts and starts, in which no job gets on: they never
will. Nor when there are so many rounds at one instant."""
MAX_ROUNDS = 1_000_000
MAX_NAMED = 10
"""So many of the jobs of a run that is given up are named."""
Log = Callable[[Sequence[EventRecord]], object]
"""Takes the records of a run, in order."""


@dataclass(frozen=True)
class Plan:
    """What is simulated, but for the world and the policy."""

    run_id: str
    workload: str
    arrivals: Sequence[Arrival]
    nodes: Sequence[Node]
    round_s: float
    seed: int


@dataclass
class SimulatedRun:
    """What came of it: the core's last state, and each decision's cost in seconds of this process."""

    state: State
    decisions_s: list[float] = field(default_factory=list)
    decided: list[tuple[float, float]] = field(default_factory=list)
    """Value and bound of each decision that has them."""
    undecided: list[str] = field(default_factory=list)
    """Why, of each round in which the policy gave no valid decision."""
    refused: dict[str, str] = field(default_factory=dict)
    stalled: str = ""


class Simulation:
    """One run. `clock` measures decisions; without a `log` no records are made."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        policy: Policy,
        clock: Callable[[], float],
        log: Log | None = None,
    ) -> None:
        self.plan, self.world, self.clock, self.log = plan, world, clock, log
        settings = CoreSettings(
            seed=plan.seed,
            restart_penalty_s=world.restart_s,
            max_failures=3,
            leave_timeout_s=math.inf,
            accumulates_alone=world.accumulates_alone,
        )
        self.core = SchedulerCore(policy, world.applications, settings, world.oracle)
        self.unchanged_because = unchanged_because(policy.name)
        self.run_so_far = SimulatedRun(State(run_id=plan.run_id))
        self.now_s = 0.0
        self.to_come: list[tuple[float, int, JobSpec | Happening]] = []
        self.order = count()
        self.round_wanted = ""
        self.reports = dict.fromkeys((node.name for node in plan.nodes), 0)
        self.numbers: dict[str, int] = {}
        self.records: list[EventRecord] = []
        self.mark: tuple[int, float] = (-1, 0.0)
        self.idle_rounds = 0
        self.idle_since_s = 0.0
        self.instant_s = -math.inf
        self.instant_rounds = 0

    def run(self) -> SimulatedRun:
        plan = self.plan
        self.publish(
            SCHEDULER,
            RunStarted(
                policy=self.core.policy.name,
                workload=plan.workload,
                seed=plan.seed,
                round_s=plan.round_s,
                version=__version__,
            ),
        )
        # Each asks that orders be sent to all: once is enough, and many nodes would take quadratic time.
        asked = [self.act(RegisterAgent(node=node, incarnation=INCARNATION)) for node in plan.nodes]
        if any(asked):
            self.send_orders()
        for arrival in plan.arrivals:
            self.expect(arrival.at_s, arrival.spec)
        self.round_wanted = ""
        rounds = 0
        while not self.run_so_far.stalled and (self.state.jobs or self.to_come):
            if not self.state.jobs:  # nothing to decide before somebody comes
                rounds = max(rounds, math.ceil(self.to_come[0][0] / plan.round_s) - 1)
            round_s = (rounds + 1) * plan.round_s
            first_s = self.to_come[0][0] if self.to_come else math.inf
            reached_s, happened = self.world.advance(
                min(round_s, first_s) if self.world.event_driven else round_s
            )
            for happening in happened:
                self.expect(happening.t_s, happening)
            while self.to_come and self.to_come[0][0] <= reached_s:
                self.take(*heapq.heappop(self.to_come))
            self.now_s = reached_s
            if reached_s >= round_s:
                rounds += 1
                self.decide(self.round_wanted or "interval")
            elif self.round_wanted:
                self.decide(self.round_wanted)
        self.publish(
            SCHEDULER,
            RunEnded(reason=self.run_so_far.stalled or "every job has ended", active=tuple(self.state.jobs)),
        )
        self.write()
        return self.run_so_far

    @property
    def state(self) -> State:
        return self.run_so_far.state

    def expect(self, t_s: float, what: JobSpec | Happening) -> None:
        heapq.heappush(self.to_come, (t_s, next(self.order), what))

    def take(self, t_s: float, number: int, what: JobSpec | Happening) -> None:
        self.now_s = t_s
        if isinstance(what, JobSpec):
            self.feed(SubmitJob(spec=what))
        elif isinstance(what.what, Fact):
            self.reports[what.source] += 1
            self.feed(
                Report(
                    node=what.source,
                    incarnation=INCARNATION,
                    number=self.reports[what.source],
                    facts=(what.what,),
                )
            )
        else:
            self.publish(what.source, what.what)

    def decide(self, trigger: str) -> None:
        self.round_wanted = ""
        if profiles := self.world.profiles(tuple(self.state.jobs)):
            self.feed(Profiles(profiles=profiles))
        self.feed(RoundDue(trigger=trigger))
        self._watch()
        self.write()

    def _watch(self) -> None:
        """Give a run up in which no job gets on."""
        state = self.state
        mark = (len(state.ended), sum(profile.progress for profile in state.profiles.values()))
        if mark != self.mark:
            self.mark, self.idle_rounds, self.idle_since_s = mark, 0, self.now_s
        self.idle_rounds += 1
        if self.now_s != self.instant_s:
            self.instant_s, self.instant_rounds = self.now_s, 0
        self.instant_rounds += 1
        idle_s = self.now_s - self.idle_since_s
        if self.idle_rounds > STALLED_ROUNDS and idle_s > self._stalled_s():
            problem = f"no job got on for {idle_s:g} s"
        elif self.instant_rounds > STALLED_ROUNDS:
            problem = f"there were more than {STALLED_ROUNDS} rounds at this instant"
        elif state.rounds >= MAX_ROUNDS:
            problem = f"there were {MAX_ROUNDS} rounds"
        else:
            return
        some = islice(state.jobs.values(), MAX_NAMED)
        waiting = "; ".join(f"{job.spec.id} ({job.state}): {job.reason}" for job in some)
        more = f"; and {len(state.jobs) - MAX_NAMED} more" if len(state.jobs) > MAX_NAMED else ""
        self.run_so_far.stalled = f"given up at {self.now_s:g} s, when {problem}: {waiting}{more}"

    def _stalled_s(self) -> float:
        """No job need get on for so long: with short rounds that is many of them."""
        fixed_s = max((self.world.fixed_s(job.spec) for job in self.state.jobs.values()), default=0.0)
        return STALLED_RESTARTS * (self.world.restart_s + fixed_s)

    def feed(self, given: CoreInput) -> None:
        """Let the core act on an input at the present time, and the world on the orders that it sends."""
        if self.act(given):
            self.send_orders()

    def act(self, given: CoreInput) -> bool:
        """Carry out what the core commands, but for orders: whether there are any to be sent."""
        start_s = self.clock()
        self.run_so_far.state, commands = self.core.step(self.state, given, self.now_s)
        took_s = self.clock() - start_s
        send = False
        for command in commands:
            match command:
                case Emit(event):
                    if isinstance(event, RoundDecided):
                        self.run_so_far.decisions_s.append(took_s)
                        why = next(iter(event.reasons.values()))
                        if why.startswith(self.unchanged_because):
                            self.run_so_far.undecided.append(why)
                        if event.value is not None and event.bound is not None:
                            self.run_so_far.decided.append((event.value, event.bound))
                    elif isinstance(event, JobRefused):
                        self.run_so_far.refused[event.job_id] = event.reason
                    self.publish(SCHEDULER, event)
                case WantRound(trigger):
                    self.round_wanted = trigger if self.world.event_driven else ""
                case SendOrders():
                    send = True
                case _:
                    pass
        return send

    def send_orders(self) -> None:
        for happening in self.world.apply(orders_of(self.state), self.now_s):
            self.expect(happening.t_s, happening)

    def publish(self, source: str, event: Event) -> None:
        if self.log is None:
            return
        source = source if source in (SCHEDULER, COLLECTOR) else f"agent-{source}"
        self.numbers[source] = self.numbers.get(source, 0) + 1
        self.records.append(
            EventRecord(
                run_id=self.plan.run_id,
                source=source,
                incarnation=INCARNATION,
                seq=self.numbers[source],
                t_s=self.now_s,
                wall_s=self.now_s,
                event=event,
            )
        )

    def write(self) -> None:
        if self.log is not None and self.records:
            self.log(self.records)
            self.records = []
