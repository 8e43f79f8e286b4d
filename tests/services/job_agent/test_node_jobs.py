"""The jobs of a node in memory: which facts follow from orders, messages and exits."""

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
from common.types import Allocation, Placement
from services.job_agent.node_jobs import NodeJobs, tail
from services.job_agent.replicas import Exit
from tests.fixtures.job_orders import job_order, orders, verify_order

SAVE_S = 10.0
LEAVE_S = 60.0
VERIFY_S = 300.0
HANG_S = 1000.0
KILLED = Exit(-signal.SIGKILL, finished=False)
LEFT = Exit(0, finished=True)
A: Allocation = (Placement(node="a", replicas=1),)
TWO: Allocation = (Placement(node="a", replicas=2),)

CLAIM = verify_order("j", node="a")
RUNNING = GenerationRunning(job_id="j", generation=1, progress=1.0)
REACHED = TargetReached(job_id="j", generation=1, checkpoint="final", metric=0.5, progress=5.0)
RAISED = JobRaised(job_id="j", generation=1, reason="ValueError: bad", output_tail="bad")
VERDICT = VerificationDone(job_id="j", metric=0.5)


def saved(generation: int, progress: float = 3.0) -> JobSaved:
    return JobSaved(job_id="j", generation=generation, checkpoint="saved", progress=progress)


def job(generation: int, allocation: Allocation, leaving: Allocation = ()) -> JobOrder:
    return job_order("j", generation, allocation, leaving=leaving)


class NamedProcesses:
    """Processes that exist only by name. Unread messages of a process are delivered when it is killed."""

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
    """The `NodeJobs` of one node, and what it reports and publishes; the test moves the clock."""

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
        self.processes = NamedProcesses(lambda name, data: self.jobs.on_message(name, data))
        processes: Any = self.processes
        self.jobs = NodeJobs(
            node, slots, config, processes, self.events.append, self.facts.append, lambda: self.now_s
        )
        self.jobs.begin(orders(version=0), "first")

    def follow(self, version: int, *jobs: JobOrder, claims: tuple[VerifyOrder, ...] = ()) -> None:
        self.jobs.follow(orders(*jobs, verifications=claims, version=version))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.jobs.on_tick()

    def says(self, name: str, message: ReplicaMessage) -> None:
        self.jobs.on_message(name, encode(message))

    def leave_unread(self, name: str, message: ReplicaMessage) -> None:
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


# --------------------------------------------------------------------------- preempted jobs


def kinds(facts: list[Fact]) -> list[str]:
    return [type(fact).__name__ for fact in facts]


@pytest.mark.parametrize("message", [RUNNING, saved(1), ReplicaLost(job_id="j", generation=1, reason="r")])
def test_a_fact_about_an_earlier_generation_does_not_count_as_saved(
    agent: Agent, message: ReplicaMessage
) -> None:
    agent.follow(1, job(1, A))
    (name,) = agent.names
    agent.follow(2, job(2, (), leaving=A))
    agent.says(name, message)
    agent.exits(name, LEFT)
    agent.wait(1.0)
    answers = [f for f in agent.facts if isinstance(f, ReplicaLost) and f.generation == 2]
    assert len(answers) == 1
    assert answers[0].reason == "it had no running replica when it was preempted"


@pytest.mark.parametrize("message", [saved(2), REACHED, RAISED])
def test_a_job_that_reports_its_own_end_is_not_reported_as_lost(agent: Agent, message: Any) -> None:
    agent.follow(1, job(1, A))
    (name,) = agent.names
    agent.follow(2, job(2, (), leaving=A))
    agent.says(name, message)
    agent.exits(name, LEFT)
    agent.wait(1000.0)
    assert agent.facts == [message]


def test_a_save_is_reported_when_all_replicas_have_left_and_with_the_newest_state(agent: Agent) -> None:
    agent.follow(1, job(1, TWO))
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


def test_the_death_of_a_leaving_replica_is_not_reported(agent: Agent) -> None:
    agent.follow(1, job(1, TWO))
    _, second = agent.names
    agent.follow(2, job(2, A))
    agent.exits(second, KILLED)
    assert agent.facts == []


def test_a_leaving_replica_that_stays_is_killed_and_not_reported(agent: Agent) -> None:
    agent.follow(1, job(1, TWO))
    _, second = agent.names
    agent.follow(2, job(2, A))
    agent.wait(LEAVE_S)
    assert agent.processes.killed == []
    agent.wait(1.0)
    assert agent.processes.killed == [second]
    agent.exits(second, KILLED)
    assert agent.facts == []


def test_the_death_of_a_leaving_replica_does_not_interrupt_the_save_of_rank_0(agent: Agent) -> None:
    agent.follow(1, job(1, TWO))
    first, second = agent.names
    agent.follow(2, job(2, (), leaving=A))
    agent.exits(second, KILLED)
    agent.wait(1.0)
    assert agent.facts == []
    agent.says(first, saved(2))
    agent.exits(first, LEFT)
    assert agent.facts == [saved(2)]


def test_a_preempted_job_whose_replicas_all_die_is_reported_as_lost(agent: Agent) -> None:
    agent.follow(1, job(1, A))
    agent.follow(2, job(2, (), leaving=A))
    agent.exits(agent.names[0], KILLED)
    assert [(type(f), getattr(f, "generation", 0)) for f in agent.facts] == [(ReplicaLost, 2)]


def test_a_replica_that_does_not_read_is_killed_and_reported_once(agent: Agent) -> None:
    agent.follow(1, job(1, A))
    (name,) = agent.names
    agent.leave_unread(name, ReplicaLost(job_id="j", generation=1, reason="its group failed"))
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


def test_a_verifier_that_dies_by_a_signal_is_lost_and_does_not_refute_the_claim(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    (name,) = agent.names
    agent.exits(name, KILLED)
    reason = f"verifier {name} was ended by signal SIGKILL"
    assert agent.facts == [VerifierLost(job_id="j", reason=reason)]
    assert not [event for event in agent.events if isinstance(event, Verified)]


def test_another_verifier_starts_only_when_newer_orders_ask_for_it(agent: Agent) -> None:
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


def test_a_hanging_replica_is_killed_and_reported_once(agent: Agent) -> None:
    agent.follow(1, job(1, TWO))
    working, hangs = agent.names
    agent.wait(HANG_S)
    agent.says(working, ReplicaAlive())
    agent.wait(SAVE_S)  # The other replica may have waited this long in a collective.
    assert agent.processes.killed == []
    agent.wait(1.0)
    assert agent.processes.killed == [hangs]
    agent.wait(1.0)
    agent.exits(hangs, KILLED)
    (lost,) = agent.facts
    assert isinstance(lost, ReplicaLost)
    assert lost.reason == f"replica {hangs} has not read its orders for 1010 s; killed"


def test_a_verifier_that_takes_too_long_is_killed_and_reported_once(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    (name,) = agent.names
    agent.wait(VERIFY_S)
    assert agent.processes.killed == []
    agent.wait(1.0)
    assert agent.processes.killed == [name]
    agent.wait(1.0)
    lost = VerifierLost(job_id="j", reason=f"verifier {name} had no verdict after 300 s; killed")
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


def test_an_unread_verdict_of_a_verifier_that_took_too_long_counts(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    agent.leave_unread(agent.names[0], VERDICT)
    agent.wait(VERIFY_S + 1.0)
    assert agent.facts == [VERDICT]


def test_a_verifier_that_has_reported_its_verdict_may_exit_slowly_or_die(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    agent.says(agent.names[0], VERDICT)
    agent.wait(VERIFY_S + 1.0)
    agent.exits(agent.names[0], KILLED)
    assert agent.facts == [VERDICT]


def test_a_verifier_that_exits_without_a_verdict_refutes_the_claim(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    agent.exits(agent.names[0], Exit(1, finished=False))
    finding = "the verifier exited with code 1 before it had a verdict"
    assert agent.facts == [VerificationDone(job_id="j", metric=0.5, findings=(finding,))]
    assert [event.ok for event in agent.events if isinstance(event, Verified)] == [False]
    agent.follow(2, claims=(CLAIM,))
    assert verifications(agent) == 1


def test_a_withdrawn_verification_ends_without_a_report(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    agent.follow(2)
    agent.exits(agent.names[0], KILLED)
    assert agent.facts == []


# --------------------------------------------------------------------------- the end of the agent's part in a
# run


@pytest.mark.parametrize("message", [REACHED, RAISED])
def test_an_unread_end_of_a_job_is_reported_when_the_agent_ends(agent: Agent, message: Any) -> None:
    agent.follow(1, job(1, A))
    (name,) = agent.names
    agent.leave_unread(name, message)
    agent.jobs.end()
    assert agent.processes.killed == [name]
    agent.exits(name, KILLED)
    assert agent.facts == [message]


def test_an_unread_verdict_is_reported_when_the_agent_ends(agent: Agent) -> None:
    agent.follow(1, claims=(CLAIM,))
    agent.leave_unread(agent.names[0], VERDICT)
    agent.jobs.end()
    assert agent.facts == [VERDICT]


def test_an_unread_save_is_reported_when_the_agent_ends(agent: Agent) -> None:
    agent.follow(1, job(1, TWO))
    agent.follow(2, job(2, (), leaving=A))
    agent.leave_unread(agent.names[0], saved(2))
    agent.jobs.end()
    assert agent.facts == [saved(2)]


def test_replicas_that_the_agent_ends_are_not_reported_as_lost(agent: Agent) -> None:
    agent.follow(1, job(1, TWO))
    for name in agent.names:
        agent.leave_unread(name, ReplicaLost(job_id="j", generation=1, reason="its group failed"))
    agent.jobs.end()
    for name in list(agent.names):
        agent.exits(name, KILLED)
    agent.wait(1000.0)
    assert agent.facts == []


def test_an_agent_that_joins_again_starts_all_processes_again(agent: Agent) -> None:
    agent.follow(1, job(1, A), claims=(CLAIM,))
    agent.wait(VERIFY_S + 1.0)
    agent.jobs.end()
    for name in list(agent.names):
        agent.exits(name, KILLED)
    agent.jobs.begin(orders(job(1, A), verifications=(CLAIM,)), "second")
    assert verifications(agent) == 2
    assert sum(isinstance(event, ReplicaStarted) for event in agent.events) == 2


def test_the_tail_of_long_output_is_its_last_lines_within_2_kb(tmp_path: Path) -> None:
    output = tmp_path / "output.log"
    output.write_text("".join(f"line {number}\n" for number in range(1000)) + "\x1b[31mred\n")
    assert tail(output).splitlines() == [*(f"line {number}" for number in range(981, 1000)), " [31mred"]
    output.write_bytes(b"\xff" * 10_000)
    assert len(tail(output)) == 2000
    assert tail(tmp_path / "missing") == ""
