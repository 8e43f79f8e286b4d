"""Drives the core in memory: keeps the state, the clock and all that the core commanded."""

from typing import Any, TypeVar

from common.protocol import (
    AgentSilent,
    CoreInput,
    Fact,
    GenerationRunning,
    RegisterAgent,
    Reply,
    Report,
    RoundDue,
    SubmitJob,
)
from common.types import Allocation, ApplicationSpec, JobConfig, JobSpec, Node, Placement
from services.scheduler.commands import Answer, Command, Emit
from services.scheduler.core import SchedulerCore, Settings
from services.scheduler.policies.interface import ClusterView, Decision, Policy
from services.scheduler.state import JobRecord, State

Kind = TypeVar("Kind")
LEAVE_TIMEOUT_S = 100.0

APPLICATION = ApplicationSpec(
    name="digits-cnn",
    optimizer="sgd",
    metric="accuracy",
    metric_mode="max",
    target=0.9,
    target_min=0.5,
    target_max=0.99,
    initial_batch_size=16,
    max_batch_size=256,
    min_atomic_batch=4,
    max_atomic_batch=64,
    examples=1000,
    max_progress=1000.0,
    evaluate_every=10.0,
)


def make_spec(job_id: str, **changes: Any) -> JobSpec:
    values: dict[str, Any] = {
        "id": job_id,
        "application": "digits-cnn",
        "seed": 1,
        "target": 0.9,
        "max_progress": 1000.0,
        "replicas": 1,
        "batch_size": 16,
        "min_batch_size": 16,
        "max_batch_size": 256,
        "min_atomic_batch": 4,
        "max_atomic_batch": 64,
        "max_replicas": 8,
    }
    return JobSpec(**{**values, **changes})


def make_node(name: str, slots: int) -> Node:
    return Node(name=name, slots=slots, slot_speed=0.2, store_port=4000 + ord(name[0]))


class ScriptedPolicy:
    """Repeats what it was told for each job, and nothing for the others."""

    name = "scripted"

    def __init__(self) -> None:
        self.script: dict[str, tuple[Allocation, JobConfig | None]] = {}
        self.views: list[ClusterView] = []

    def give(self, job_id: str, allocation: Allocation, config: JobConfig | None) -> None:
        self.script[job_id] = (allocation, config)

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        self.views.append(view)
        given = {job.spec.id: self.script.get(job.spec.id, ((), None)) for job in view.jobs}
        return Decision(
            allocations={job_id: allocation for job_id, (allocation, _) in given.items()},
            configs={job_id: config for job_id, (_, config) in given.items() if config},
            reasons=dict.fromkeys(given, "by script"),
            memory=memory,
        )


class Driver:
    def __init__(self, policy: Any, max_failures: int = 3) -> None:
        self.policy = policy
        checked: Policy = policy
        settings = Settings(
            seed=1, restart_penalty_s=1.0, max_failures=max_failures, leave_timeout_s=LEAVE_TIMEOUT_S
        )
        self.core = SchedulerCore(checked, {APPLICATION.name: APPLICATION}, settings)
        self.state = State(run_id="run-1")
        self.now_s = 0.0
        self.commands: list[Command] = []
        self.reports = 0

    def give(self, given: CoreInput) -> Reply | None:
        self.state, commands = self.core.step(self.state, given, self.now_s)
        self.commands += commands
        return next((c.reply for c in commands if isinstance(c, Answer)), None)

    def submit(self, spec: JobSpec) -> Reply | None:
        return self.give(SubmitJob(spec=spec))

    def register(self, node: Node, incarnation: str = "first") -> Reply | None:
        return self.give(RegisterAgent(node=node, incarnation=incarnation))

    def silence(self, node: str) -> None:
        self.give(AgentSilent(node=node, incarnation=self.state.agents[node].incarnation))

    def round(self) -> None:
        self.give(RoundDue(trigger="interval"))

    def fact(self, fact: Fact, node: str = "a", number: int | None = None) -> Reply | None:
        self.reports = number or self.reports + 1
        return self.give(Report(node=node, incarnation="first", number=self.reports, facts=(fact,)))

    def job(self, job_id: str) -> JobRecord:
        return self.state.jobs.get(job_id) or self.state.ended[job_id]

    def events(self, kind: type[Kind]) -> list[Kind]:
        return [c.event for c in self.commands if isinstance(c, Emit) and isinstance(c.event, kind)]


def two_nodes() -> Driver:
    """Of four slots each, and a policy that does what the test tells it."""
    driver = Driver(ScriptedPolicy())
    driver.register(make_node("a", slots=4))
    driver.register(make_node("b", slots=4))
    return driver


def placed(**replicas: int) -> tuple[Placement, ...]:
    return tuple(Placement(node=node, replicas=count) for node, count in replicas.items())


def run_job(driver: Driver, job_id: str = "job-1", **replicas: int) -> None:
    driver.submit(make_spec(job_id))
    driver.policy.give(job_id, placed(**(replicas or {"a": 1})), JobConfig(atomic_batch=16))
    driver.round()
    driver.fact(GenerationRunning(job_id=job_id, generation=driver.job(job_id).generation, progress=0.0))
