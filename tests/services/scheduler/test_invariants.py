"""The core keeps its invariants in any order of inputs: capacity, one terminal state per job, no lost job."""

from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.protocol import (
    CancelJob,
    GenerationRunning,
    JobAccepted,
    JobCancelled,
    JobCompleted,
    JobFailed,
    JobRaised,
    JobSaved,
    JobStateChanged,
    JobSubmitted,
    LeaveAgent,
    Profiles,
    ReplicaLost,
    RoundDecided,
    TargetReached,
    VerificationDone,
    VerifierLost,
)
from common.types import GradientStatistics, JobConfig, JobState, Placement
from services.scheduler.policies.interface import ClusterView, Decision
from services.scheduler.policies.registry import BUILT_IN, make_policy
from services.scheduler.state import orders_of
from tests.fixtures.known_models import CLEAN, NOISY
from tests.fixtures.policy_views import profile
from tests.fixtures.scheduler_driver import Driver, make_node, make_spec

JOBS = [f"job-{n}" for n in range(4)]
NODES = ["a", "b", "c"]


class RandomPolicy:
    """Decides at random within the rules, so that the tests reach every path of the core."""

    name = "random"

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        allocations, configs = {}, {}
        free = {node.name: node.slots for node in view.nodes}
        state = seed
        for job in view.jobs:
            placements = []
            for node in free:
                state = (state * 1_103_515_245 + 12_345) % 2**31
                count = min((state >> 8) % 3, free[node], 8 - sum(p.replicas for p in placements))
                if count > 0:
                    placements.append(Placement(node=node, replicas=count))
                    free[node] -= count
            allocations[job.spec.id] = tuple(placements)
            if placements:
                configs[job.spec.id] = JobConfig(atomic_batch=16, accumulation=(state >> 4) % 2)
        reasons = {job.spec.id: "at random" for job in view.jobs}
        return Decision(allocations=allocations, configs=configs, reasons=reasons, memory=memory)


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(RandomPolicy(), max_failures=2)
        self.accepted: set[str] = set()

    def tick(self) -> None:
        self.driver.now_s += 1.0

    @rule(job_id=st.sampled_from(JOBS), seed=st.integers(0, 1))
    def submit(self, job_id: str, seed: int) -> None:
        self.tick()
        if isinstance(self.driver.submit(make_spec(job_id, seed=seed)), JobAccepted):
            self.accepted.add(job_id)

    @rule(job_id=st.sampled_from(JOBS))
    def cancel(self, job_id: str) -> None:
        self.tick()
        self.driver.give(CancelJob(job_id=job_id))

    @rule(name=st.sampled_from(NODES), slots=st.integers(1, 4))
    def register(self, name: str, slots: int) -> None:
        self.tick()
        known = self.driver.state.agents.get(name)
        self.driver.register(known.node if known else make_node(name, slots))

    @precondition(lambda self: self.driver.state.agents)
    @rule(data=st.data())
    def silence(self, data: st.DataObject) -> None:
        self.tick()
        self.driver.silence(data.draw(st.sampled_from(sorted(self.driver.state.agents))))

    @precondition(lambda self: self.driver.state.agents)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.tick()
        name = data.draw(st.sampled_from(sorted(self.driver.state.agents)))
        self.driver.give(LeaveAgent(node=name, incarnation=self.driver.state.agents[name].incarnation))

    @rule()
    def decide(self) -> None:
        self.tick()
        self.driver.round()

    @precondition(lambda self: self.driver.state.agents and self.driver.state.jobs)
    @rule(data=st.data(), age=st.integers(0, 2), kind=st.sampled_from(range(8)))
    def fact(self, data: st.DataObject, age: int, kind: int) -> None:
        """Any fact about any job in any state, including late facts."""
        self.tick()
        job_id = data.draw(st.sampled_from(sorted(self.driver.state.jobs)))
        node = data.draw(st.sampled_from(sorted(self.driver.state.agents)))
        generation = max(self.driver.job(job_id).generation - age, 0)
        facts = (
            GenerationRunning(job_id=job_id, generation=generation, progress=1.0),
            ReplicaLost(job_id=job_id, generation=generation, reason="lost"),
            JobSaved(job_id=job_id, generation=generation, checkpoint="c", progress=1.0),
            TargetReached(job_id=job_id, generation=generation, checkpoint="c", metric=0.9, progress=2.0),
            JobRaised(job_id=job_id, generation=generation, reason="raised"),
            VerificationDone(job_id=job_id, metric=0.9),
            VerificationDone(job_id=job_id, metric=0.1, findings=("no",)),
            VerifierLost(job_id=job_id, reason="lost"),
        )
        self.driver.fact(facts[kind], node=node)

    @invariant()
    def decisions_fit_the_nodes(self) -> None:
        used: dict[str, int] = {}
        for job in self.driver.state.jobs.values():
            if job.state in (JobState.STARTING, JobState.RUNNING):
                for placement in job.allocation:
                    used[placement.node] = used.get(placement.node, 0) + placement.replicas
        for node, replicas in used.items():
            assert replicas <= self.driver.state.agents[node].node.slots

    @invariant()
    def allocations_name_living_nodes_only(self) -> None:
        for job in self.driver.state.jobs.values():
            assert {p.node for p in job.allocation} <= set(self.driver.state.agents)

    @invariant()
    def no_accepted_job_is_lost(self) -> None:
        state = self.driver.state
        assert self.accepted == set(state.jobs) | set(state.ended)
        assert not set(state.jobs) & set(state.ended)
        assert {event.spec.id for event in self.driver.events(JobSubmitted)} == self.accepted

    @invariant()
    def every_ended_job_has_one_end(self) -> None:
        ends = [
            event.job_id
            for kind in (JobCompleted, JobFailed, JobCancelled)
            for event in self.driver.events(kind)
        ]
        assert sorted(ends) == sorted(self.driver.state.ended)
        for job in self.driver.state.ended.values():
            assert job.state.terminal
            assert job.allocation == ()

    @invariant()
    def states_form_a_chain(self) -> None:
        last = dict.fromkeys(self.accepted, JobState.PENDING)
        for event in self.driver.events(JobStateChanged):
            assert event.old is last[event.job_id]
            last[event.job_id] = event.new
        for job_id, state in last.items():
            assert self.driver.job(job_id).state is state

    @invariant()
    def orders_match_the_states(self) -> None:
        orders = orders_of(self.driver.state)
        for order in orders.jobs:
            job = self.driver.job(order.spec.id)
            assert order.group <= order.generation
            assert bool(order.allocation) == (job.state is not JobState.PREEMPTING)
        ordered = {order.spec.id for order in orders.jobs}
        ordered |= {verification.spec.id for verification in orders.verifications}
        for job in self.driver.state.jobs.values():
            if job.state in (JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING):
                assert job.spec.id in ordered

    @invariant()
    def every_decision_was_valid(self) -> None:
        for event in self.driver.events(RoundDecided):
            assert not [reason for reason in event.reasons.values() if "no valid decision" in reason]


class PolicyMachine(CoreMachine):
    """The same invariants with the built-in policies and with profiles."""

    @initialize(name=st.sampled_from([name for name in BUILT_IN if not make_policy(name).needs_oracle]))
    def choose(self, name: str) -> None:
        self.driver = Driver(make_policy(name), max_failures=2)

    @rule(
        job_id=st.sampled_from(JOBS),
        statistics=st.sampled_from([None, CLEAN, NOISY]),
        profiled=st.integers(0, 4),
        progress=st.sampled_from([0.0, 500.0, 2000.0]),
        fitted=st.booleans(),
    )
    def profiles(
        self,
        job_id: str,
        statistics: GradientStatistics | None,
        profiled: int,
        progress: float,
        fitted: bool,
    ) -> None:
        self.tick()
        known = profile(job_id, profiled, statistics, progress=progress)
        if not fitted:
            known = msgspec.structs.replace(known, parameters=None)
        self.driver.give(Profiles(profiles=(known,)))


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)
TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
