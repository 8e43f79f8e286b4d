"""An agent's jobs in memory: which facts come of orders, of what processes say, and of how they end."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.codec import encode
from common.config import Config, RunConfig, TrainerConfig
from common.protocol import (
    Event,
    Fact,
    GenerationRunning,
    JobOrder,
    JobRaised,
    JobSaved,
    Orders,
    ReplicaAlive,
    ReplicaLost,
    ReplicaMessage,
    ReplicaStarted,
    TargetReached,
    VerificationDone,
    VerificationStarted,
    Verified,
    VerifierLost,
    VerifyOrder,
)
from common.types import Allocation, JobConfig, JobSpec, Placement
from services.job_agent.node_jobs import NodeJobs
from services.job_agent.replicas import Exit

SAVE_S = 10.0
LEAVE_S = 60.0
VERIFY_S = 300.0
HANG_S = 1000.0
KILLED = Exit(-signal.SIGKILL, finished=False)
LEFT = Exit(0, finished=True)
A: Allocation = (Placement(node="a", replicas=1),)
B: Allocation = (Placement(node="b", replicas=1),)

SPEC = JobSpec(
    id="j",
    application="tiny",
    seed=0,
    target=1.0,
    max_progress=10.0,
    replicas=1,
    batch_size=8,
    min_batch_size=8,
    max_batch_size=64,
    min_atomic_batch=1,
    max_atomic_batch=8,
    max_replicas=4,
)
CLAIM = VerifyOrder(spec=SPEC, node="a", checkpoint="final", metric=0.5, progress=5.0)
RUNNING = GenerationRunning(job_id="j", generation=1, progress=1.0)
REACHED = TargetReached(job_id="j", generation=1, checkpoint="final", metric=0.5, progress=5.0)
RAISED = JobRaised(job_id="j", generation=1, reason="ValueError: bad", output_tail="bad")
VERDICT = VerificationDone(job_id="j", metric=0.5)


def saved(generation: int, progress: float = 3.0) -> JobSaved:
    return JobSaved(job_id="j", generation=generation, checkpoint="saved", progress=progress)


def job(generation: int, allocation: Allocation, leaving: Allocation = ()) -> JobOrder:
    return JobOrder(
        spec=SPEC,
        generation=generation,
        group=generation,
        allocation=allocation,
        config=JobConfig(atomic_batch=8),
        store_host="127.0.0.1",
        store_port=4242,
        leaving=leaving,
    )


class PipesAndPids:
    """Processes that only exist by name. What lies unread in a pipe comes out when its process is killed."""

    def __init__(self, on_message: Callable[[str, bytes], None]) -> None:
        self.on_message = on_message
        self.started: list[str] = []
        self.killed: list[str] = []
        self.unread: dict[str, list[bytes]] = {}
        self.pipes_are_full = False

    def start(self, name: str, _target: object, _start: bytes, _output: Path) -> int:
        self.started.append(name)
        return 1000 + len(self.started)

    def send(self, _name: str, _data: bytes) -> bool:
        return not self.pipes_are_full

    def kill(self, name: str) -> None:
        if name not in self.killed:
            self.killed.append(name)
            for data in self.unread.pop(name, []):
                self.on_message(name, data)


class Agent:
    """`Jobs` of one node, with all that it reports and publishes; the clock is the test's."""

    def __init__(self, node: str, logs_dir: Path, slots: int = 2) -> None:
        config = Config(
            run=RunConfig(logs_dir=str(logs_dir)),
            trainer=TrainerConfig(
                collective_timeout_s=SAVE_S,
                order_timeout_s=LEAVE_S,
                verify_timeout_s=VERIFY_S,
                hang_timeout_s=HANG_S,
            ),
        )
        self.now_s = 0.0
        self.facts: list[Fact] = []
        self.events: list[Event] = []
        self.processes = PipesAndPids(lambda name, data: self.jobs.on_message(name, data))
        processes: Any = self.processes
        self.jobs = NodeJobs(
            node, slots, config, processes, self.events.append, self.facts.append, lambda: self.now_s
        )
        self.jobs.begin(Orders(run_id="run", version=0, jobs=()), "first")

    def follow(self, version: int, *jobs: JobOrder, claims: tuple[VerifyOrder, ...] = ()) -> None:
        self.jobs.follow(Orders(run_id="run", version=version, jobs=jobs, verifications=claims))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.jobs.on_tick()

    def says(self, name: str, message: ReplicaMessage) -> None:
        self.jobs.on_message(name, encode(message))

    def left_unread(self, name: str, message: ReplicaMessage) -> None:
        self.processes.unread.setdefault(name, []).append(encode(message))

    def exits(self, name: str, exited: Exit) -> None:
        self.jobs.on_exit(name, exited)

    @property
    def names(self) -> list[str]:
        return self.processes.started

    def take_facts(self) -> list[Fact]:
        """What was reported since the last call."""
        facts, self.facts[:] = list(self.facts), []
        return facts


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent("a", tmp_path)


@pytest.fixture
def full(tmp_path: Path) -> tuple[Agent, Agent]:
    """Two nodes on which nothing can start."""
    return Agent("a", tmp_path, slots=0), Agent("b", tmp_path, slots=0)


# --------------------------------------------------------------------------- who answers for a preempted job


def kinds(facts: list[Fact]) -> list[str]:
    return [type(fact).__name__ for fact in facts]


def test_one_node_answers_for_a_preempted_job_when_another_has_missed_an_order(
    full: tuple[Agent, Agent],
) -> None:
    a, b = full
    for agent in full:
        agent.follow(1, job(1, A))
    a.follow(2, job(2, B))  # b hears of the next one only
    for agent in full:
        agent.follow(3, job(3, (), leaving=B))
    b.wait(SAVE_S + 1.0)
    a.wait(SAVE_S + 1.0)
    assert a.facts == []
    assert kinds(b.facts) == ["ReplicaLost"]
    assert b.facts[0].job_id == "j"
    for agent in full:
        agent.wait(1000.0)
    assert len(b.facts) == 1, "answered once"


def test_rank_0_that_has_moved_here_is_answered_for_when_its_former_node_has_had_time_to_save(
    full: tuple[Agent, Agent],
) -> None:
    _, b = full
    b.follow(1, job(1, A))
    b.follow(2, job(2, B))
    b.follow(3, job(3, (), leaving=B))
    b.wait(SAVE_S - 1.0)
    assert b.facts == []
    b.wait(1.0)
    assert kinds(b.facts) == ["ReplicaLost"]


def test_a_second_preemption_is_answered_though_the_orders_between_were_missed(
    full: tuple[Agent, Agent],
) -> None:
    a, _ = full
    a.follow(1, job(1, A))
    a.follow(2, job(2, (), leaving=A))
    assert [fact.generation for fact in a.take_facts() if isinstance(fact, ReplicaLost)] == [2]
    a.follow(5, job(4, (), leaving=A))
    assert [fact.generation for fact in a.take_facts() if isinstance(fact, ReplicaLost)] == [4]


@pytest.mark.parametrize("message", [RUNNING, saved(1), ReplicaLost(job_id="j", generation=1, reason="r")])
def test_old_news_is_no_answer_for_a_job_that_could_not_save(agent: Agent, message: ReplicaMessage) -> None:
    agent.follow(1, job(1, A))
    (name,) = agent.names
    agent.follow(2, job(2, (), leaving=A))
    agent.says(name, message)
    agent.exits(name, LEFT)
    agent.wait(1.0)
    answers = [f for f in agent.facts if isinstance(f, ReplicaLost) and f.generation == 2]
    assert len(answers) == 1
    assert answers[0].reason == "nothing of it was running when it had to leave"


@pytest.mark.parametrize("message", [saved(2), REACHED, RAISED])
def test_a_job_that_says_what_became_of_it_is_not_answered_for(agent: Agent, message: Any) -> None:
    agent.follow(1, job(1, A))
    (name,) = agent.names
    agent.follow(2, job(2, (), leaving=A))
    agent.says(name, message)
    agent.exits(name, LEFT)
    agent.wait(1000.0)
    assert agent.facts == [message]


def test_a_job_is_saved_when_all_of_it_has_left_and_by_its_newest_state(agent: Agent) -> None:
    agent.follow(1, job(1, (Placement(node="a", replicas=2),)))
    first, second = agent.names
    agent.follow(2, job(2, (), leaving=A))
    agent.says(first, saved(2, progress=4.0))
    agent.says(second, saved(2, progress=3.0))
    agent.exits(first, LEFT)
    assert agent.facts == []
    agent.exits(second, LEFT)
    assert agent.facts == [saved(2, progress=4.0)]


# --------------------------------------------------------------------------- processes that die


def test_a_replica_that_dies_by_a_signal_is_lost(agent: Agent) -> None:
    agent.follow(1, job(1, A))
    (name,) = agent.names
    agent.exits(name, KILLED)
    reason = f"replica {name} was ended by signal SIGKILL"
    assert agent.facts == [ReplicaLost(job_id="j", generation=1, reason=reason)]


def test_a_leaver_that_dies_costs_its_job_nothing(agent: Agent) -> None:
    agent.follow(1, job(1, (Placement(node="a", replicas=2),)))
    _, second = agent.names
    agent.follow(2, job(2, A))
    agent.exits(second, KILLED)
    assert agent.facts == []


def test_a_leaver_that_stays_is_killed_and_costs_its_job_nothing(agent: Agent) -> None:
    agent.follow(1, job(1, (Placement(node="a", replicas=2),)))
    _, second = agent.names
    agent.follow(2, job(2, A))
    agent.wait(LEAVE_S)
    assert agent.processes.killed == []
    agent.wait(1.0)
    assert agent.processes.killed == [second]
    agent.exits(second, KILLED)
    assert agent.facts == []


def test_a_leaver_that_dies_beside_rank_0_does_not_interrupt_its_save(agent: Agent) -> None:
    agent.follow(1, job(1, (Placement(node="a", replicas=2),)))
    first, second = agent.names
    agent.follow(2, job(2, (), leaving=A))
    agent.exits(second, KILLED)
    agent.wait(1.0)
    assert agent.facts == []
    agent.says(first, saved(2))
    agent.exits(first, LEFT)
    assert agent.facts == [saved(2)]


def test_a_preempted_job_of_which_all_die_is_answered_for(agent: Agent) -> None:
    agent.follow(1, job(1, A))
    agent.follow(2, job(2, (), leaving=A))
    agent.exits(agent.names[0], KILLED)
    assert [(type(f), getattr(f, "generation", 0)) for f in agent.facts] == [(ReplicaLost, 2)]


def test_a_replica_that_does_not_read_is_killed_and_lost_once(agent: Agent) -> None:
    agent.follow(1, job(1, A))
    (name,) = agent.names
    agent.left_unread(name, ReplicaLost(job_id="j", generation=1, reason="its group is broken"))
    agent.processes.pipes_are_full = True
    agent.follow(2, job(2, A))
    assert agent.processes.killed == [name]
    agent.exits(name, KILLED)
    reason = f"replica {name} has stopped reading its orders; killed"
    assert agent.facts == [ReplicaLost(job_id="j", generation=2, reason=reason)]


def test_a_replica_that_exits_before_its_work_is_done_fails_the_job(agent: Agent) -> None:
    agent.follow(1, job(1, A))
    agent.exits(agent.names[0], Exit(3, finished=False))
    assert kinds(agent.facts) == ["JobRaised"]


# --------------------------------------------------------------------------- verifiers


def verifications(agent: Agent) -> int:
    return sum(isinstance(event, VerificationStarted) for event in agent.events)


def test_a_verifier_that_dies_by_a_signal_is_lost_and_refutes_nothing(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    (name,) = agent.names
    agent.exits(name, KILLED)
    reason = f"verifier {name} was ended by signal SIGKILL"
    assert agent.facts == [VerifierLost(job_id="j", reason=reason)]
    assert not [event for event in agent.events if isinstance(event, Verified)]


def test_another_verifier_tries_when_newer_orders_ask_for_it_and_not_before(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    for version in (2, 3):
        agent.exits(agent.names[-1], KILLED)
        agent.follow(version - 1, claims=(CLAIM,))
        agent.wait(1000.0)
        assert verifications(agent) == version - 1
        agent.follow(version, claims=(CLAIM,))
        assert verifications(agent) == version
    assert kinds(agent.facts) == ["VerifierLost"] * 2
    agent.says(agent.names[-1], VERDICT)
    agent.exits(agent.names[-1], LEFT)
    agent.follow(4, claims=(CLAIM,))
    assert verifications(agent) == 3
    assert agent.facts[2:] == [VERDICT]


def test_a_replica_that_hangs_is_killed_and_lost_once(agent: Agent) -> None:
    agent.follow(1, job(1, (Placement(node="a", replicas=2),)))
    working, hangs = agent.names
    agent.wait(HANG_S)
    agent.says(working, ReplicaAlive())
    agent.wait(SAVE_S)  # So long the other one may have waited in a collective.
    assert agent.processes.killed == []
    agent.wait(1.0)
    assert agent.processes.killed == [hangs]
    agent.wait(1.0)
    agent.exits(hangs, KILLED)
    (lost,) = agent.facts
    assert isinstance(lost, ReplicaLost)
    assert lost.reason == f"replica {hangs} has not looked at its orders for 1010 s; killed"


def test_a_verifier_that_takes_too_long_is_killed_and_lost_once(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    (name,) = agent.names
    agent.wait(VERIFY_S)
    assert agent.processes.killed == []
    agent.wait(1.0)
    assert agent.processes.killed == [name]
    agent.wait(1.0)
    lost = VerifierLost(job_id="j", reason=f"verifier {name} had no answer in 300 s; killed")
    assert agent.facts == [lost]
    agent.exits(name, KILLED)
    assert agent.facts == [lost]
    assert verifications(agent) == 1
    agent.follow(2, claims=(CLAIM,))
    assert verifications(agent) == 2


def test_the_next_verifier_waits_for_the_slot_of_one_that_is_being_killed(tmp_path: Path) -> None:
    agent = Agent("a", tmp_path, slots=1)
    agent.follow(1, claims=(CLAIM,))
    agent.wait(VERIFY_S + 1.0)
    agent.follow(2, claims=(CLAIM,))
    assert verifications(agent) == 1
    agent.exits(agent.names[0], KILLED)
    assert verifications(agent) == 2


def test_a_verdict_that_lies_in_the_pipe_of_a_verifier_that_took_too_long_counts(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    agent.left_unread(agent.names[0], VERDICT)
    agent.wait(VERIFY_S + 1.0)
    assert agent.facts == [VERDICT]


def test_a_verifier_that_has_answered_may_take_its_time_to_exit_and_die(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    agent.says(agent.names[0], VERDICT)
    agent.wait(VERIFY_S + 1.0)
    agent.exits(agent.names[0], KILLED)
    assert agent.facts == [VERDICT]


def test_a_verifier_that_exits_without_an_answer_refutes_the_claim(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    agent.exits(agent.names[0], Exit(1, finished=False))
    finding = "the verifier exited with code 1 before it had an answer"
    assert agent.facts == [VerificationDone(job_id="j", metric=0.5, findings=(finding,))]
    assert [event.ok for event in agent.events if isinstance(event, Verified)] == [False]
    agent.follow(2, claims=(CLAIM,))
    assert verifications(agent) == 1


def test_a_withdrawn_verification_ends_without_a_word(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    agent.follow(2)
    agent.exits(agent.names[0], KILLED)
    assert agent.facts == []


# --------------------------------------------------------------------------- the end of a membership


@pytest.mark.parametrize("message", [REACHED, RAISED])
def test_the_end_of_a_job_that_lies_in_a_pipe_is_reported_when_the_agent_ends(
    agent: Agent, message: Any
) -> None:
    agent.follow(1, job(1, A))
    (name,) = agent.names
    agent.left_unread(name, message)
    agent.jobs.end()
    assert agent.processes.killed == [name]
    agent.exits(name, KILLED)
    assert agent.facts == [message]


def test_a_verdict_that_lies_in_a_pipe_is_reported_when_the_agent_ends(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    agent.left_unread(agent.names[0], VERDICT)
    agent.jobs.end()
    assert agent.facts == [VERDICT]


def test_a_job_that_has_saved_is_reported_when_the_agent_ends(agent: Agent) -> None:
    agent.follow(1, job(1, (Placement(node="a", replicas=2),)))
    agent.follow(2, job(2, (), leaving=A))
    agent.left_unread(agent.names[0], saved(2))
    agent.jobs.end()
    assert agent.facts == [saved(2)]


def test_replicas_that_the_agent_ends_are_not_lost_whatever_they_say(agent: Agent) -> None:
    agent.follow(1, job(1, (Placement(node="a", replicas=2),)))
    for name in agent.names:
        agent.left_unread(name, ReplicaLost(job_id="j", generation=1, reason="its group is broken"))
    agent.jobs.end()
    for name in list(agent.names):
        agent.exits(name, KILLED)
    agent.wait(1000.0)
    assert agent.facts == []


def test_an_agent_that_begins_again_starts_anew(agent: Agent) -> None:
    agent.follow(1, job(1, A), claims=(CLAIM,))
    agent.wait(VERIFY_S + 1.0)
    agent.jobs.end()
    for name in list(agent.names):
        agent.exits(name, KILLED)
    agent.jobs.begin(Orders(run_id="run", version=1, jobs=(job(1, A),), verifications=(CLAIM,)), "second")
    assert verifications(agent) == 2
    assert sum(isinstance(event, ReplicaStarted) for event in agent.events) == 2
