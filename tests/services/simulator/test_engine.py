"""The virtual clock: when rounds come, what is never lost, and what a log of it is worth."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.log.audit import audit
from analysis.log.frames import from_records
from analysis.log.history import history
from analysis.run.measures import summary
from common.eventlog import EventLogWriter, encode_line, read_events
from common.protocol import (
    AgentJoined,
    EventRecord,
    JobCompleted,
    JobRefused,
    JobSubmitted,
    Orders,
    RoundDecided,
    RunEnded,
)
from common.types import JobSpec, JobState, Node
from services.scheduler.policies import make_policy
from services.scheduler.policies.interface import ClusterView, Decision, Policy
from services.simulator.engine import Plan, SimulatedRun, Simulation
from services.simulator.worlds.interface import Happening, World
from services.simulator.worlds.synthetic import APPLICATIONS, SyntheticWorld
from tests.fixtures.countdown import Countdown
from tests.fixtures.scheduler_driver import make_spec
from workloads.files.workload_file import Arrival, JobFields, complete_spec

NODES = [Node(name=f"node-{number}", slots=4, slot_speed=1.0) for number in (1, 2)]


def drive(
    arrivals: Sequence[Arrival], world: World, policy: Policy | str = "fixed", round_s: float = 60.0
) -> tuple[SimulatedRun, list[EventRecord]]:
    records: list[EventRecord] = []
    plan = Plan(run_id="run", workload="w", arrivals=arrivals, nodes=NODES, round_s=round_s, seed=3)
    policy = make_policy(policy) if isinstance(policy, str) else policy
    run = Simulation(plan, world, policy, lambda: 0.0, records.extend).run()
    return run, records


def events(records: Sequence[EventRecord], kind: type[Any]) -> list[tuple[float, Any]]:
    return [(record.t_s, record.event) for record in records if isinstance(record.event, kind)]


def made_up(world: SyntheticWorld, jobs: Sequence[tuple[float, int]]) -> list[Arrival]:
    """Jobs of minutes, each given by its time and the replicas that it asks for, in the order given."""
    rows = []
    for number, (at_s, replicas) in enumerate(jobs):
        fields = JobFields(application="small", id=f"job-{number}", replicas=replicas)
        rows.append(Arrival(at_s=at_s, spec=world.complete(complete_spec(fields, APPLICATIONS, "", 0))))
    return rows


ARRIVALS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 60.0, 61.0, 7200.0, 1e7]), st.integers(1, 8)), min_size=1, max_size=5
)


@settings(max_examples=15, deadline=None)
@given(ARRIVALS, st.sampled_from(["fixed", "dynamic", "pollux", "tiresias", "srtf", "optimus"]))
def test_whatever_comes_when_every_job_ends_once_within_capacity_and_the_audit_is_clean(
    jobs: list[tuple[float, int]], policy: str
) -> None:
    world = SyntheticWorld(seed=1)
    run, records = drive(made_up(world, jobs), world, policy, round_s=600.0)
    assert Counter(job.state for job in run.state.ended.values()) == {JobState.COMPLETED: len(jobs)}
    submitted = {event.spec.id: t_s for t_s, event in events(records, JobSubmitted)}
    assert submitted == {f"job-{number}": at_s for number, (at_s, _) in enumerate(jobs)}
    for _, decided in events(records, RoundDecided):
        given_away = Counter[str]()
        for allocation in decided.allocations.values():
            given_away.update({p.node: p.replicas for p in allocation})
        assert all(given_away[node.name] <= node.slots for node in NODES)
    log = history(from_records(records))
    verdict = audit(log)
    assert verdict.ok, verdict.findings
    figures = summary(log, verdict)
    assert figures.jobs.verified == len(jobs)
    assert figures.jct_s.mean == pytest.approx(
        sum(job.ended_s - job.submitted_s for job in run.state.ended.values() if job.ended_s) / len(jobs)
    )


@settings(max_examples=5, deadline=None)
@given(ARRIVALS)
def test_the_same_seed_gives_the_same_bytes(jobs: list[tuple[float, int]]) -> None:
    logs = []
    for _ in range(2):
        world = SyntheticWorld(seed=2)
        _, records = drive(made_up(world, jobs), world, "pollux", round_s=600.0)
        logs.append(b"".join(encode_line(record) for record in records))
    assert logs[0] == logs[1]


def test_a_log_on_disk_reads_back_as_it_was_written(tmp_path: Path) -> None:
    world = SyntheticWorld(seed=1)
    _, records = drive(made_up(world, [(0.0, 2), (30.0, 1)]), world, "pollux", round_s=600.0)
    writer = EventLogWriter(tmp_path)
    assert writer.append(records) == len(records)
    writer.close()
    read = list(read_events(tmp_path / "events.jsonl"))
    assert [record.event for record in read if isinstance(record.event, RoundDecided)] == [
        event for _, event in events(records, RoundDecided)
    ]
    assert all(event.decision_s == 0.0 for _, event in events(records, RoundDecided))


def test_rounds_wait_for_their_time_where_the_world_is_not_event_driven() -> None:
    world = SyntheticWorld(seed=1)
    _, records = drive(made_up(world, [(1.0, 1), (61.0, 1)]), world)
    times_s = [t_s for t_s, _ in events(records, RoundDecided)]
    assert times_s == [60.0 * number for number in range(1, len(times_s) + 1)]


def test_arrivals_and_finishes_start_a_round_at_once_in_an_event_driven_world() -> None:
    jobs = [
        Arrival(at_s=7.0, spec=make_spec("a", replicas=8, batch_size=64)),
        Arrival(at_s=9.0, spec=make_spec("b")),
    ]
    run, records = drive(jobs, Countdown({"a": 20.0, "b": 5.0}))
    rounds = [(t_s, event.trigger) for t_s, event in events(records, RoundDecided)]
    assert rounds == [(7.0, "arrival"), (9.0, "arrival"), (27.0, "finish"), (27.25, "finish")]
    ended = {event.job_id: t_s for t_s, event in events(records, JobCompleted)}
    assert ended == {"a": 27.25, "b": 32.25}
    assert not run.state.jobs


class TakesTurns:
    """Gives all slots to one job a round, so that each round preempts."""

    name = "takes-turns"

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        turn = (memory or 0) + 1
        chosen = view.jobs[turn % len(view.jobs)].spec
        decision = make_policy("fixed").decide(
            ClusterView(
                now_s=view.now_s,
                nodes=view.nodes,
                jobs=tuple(job for job in view.jobs if job.spec.id == chosen.id),
                restart_penalty_s=view.restart_penalty_s,
            ),
            None,
            seed,
        )
        others = {job.spec.id for job in view.jobs} - {chosen.id}
        return Decision(
            allocations={**dict.fromkeys(others, ()), **decision.allocations},
            configs=decision.configs,
            reasons={**dict.fromkeys(others, "not its turn"), **decision.reasons},
            memory=turn,
        )


def test_a_preempted_job_saves_and_goes_on_with_what_it_had_left() -> None:
    jobs = [Arrival(at_s=0.0, spec=make_spec(name, replicas=8, batch_size=64)) for name in ("a", "b")]
    _, records = drive(jobs, Countdown({"a": 100.0, "b": 100.0}), TakesTurns(), round_s=10.0)
    verdict = audit(history(from_records(records)))
    assert verdict.ok, verdict.findings
    ended = {event.job_id: t_s for t_s, event in events(records, JobCompleted)}
    assert set(ended) == {"a", "b"}
    assert max(ended.values()) >= 200.0


def test_an_idle_cluster_costs_no_rounds_until_the_next_job_comes() -> None:
    world = SyntheticWorld(seed=1)
    run, records = drive(made_up(world, [(0.0, 1), (1e7, 1)]), world, round_s=600.0)
    busy = sum(job.ended_s - job.submitted_s for job in run.state.ended.values() if job.ended_s)
    assert run.state.rounds <= busy / 600.0 + 2
    assert len(events(records, JobCompleted)) == 2


def test_jobs_that_can_never_end_are_given_up_with_the_reason() -> None:
    class Never:
        name = "never"

        def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
            ids = [job.spec.id for job in view.jobs]
            return Decision(
                allocations=dict.fromkeys(ids, ()), configs={}, reasons=dict.fromkeys(ids, "not today")
            )

    run, records = drive(
        [Arrival(at_s=0.0, spec=make_spec("a"))], Countdown({"a": 1.0}), Never(), round_s=1.0
    )
    assert "a (pending): not today" in run.stalled
    (_, end) = events(records, RunEnded)[0]
    assert end.active == ("a",)
    verdict = audit(history(from_records(records)))
    assert verdict.ok, verdict.findings


def test_a_start_that_lasts_many_short_rounds_is_waited_for() -> None:
    class Starting(Countdown):
        def fixed_s(self, spec: JobSpec) -> float:
            return 20.0

    run, records = drive([Arrival(at_s=0.0, spec=make_spec("a"))], Starting({"a": 25.0}), round_s=0.01)
    assert not run.stalled
    assert len(events(records, JobCompleted)) == 1


def test_orders_go_to_the_world_once_however_many_nodes_register() -> None:
    class Counting(Countdown):
        applied = 0

        def apply(self, orders: Orders, now_s: float) -> Sequence[Happening]:
            self.applied += 1
            return super().apply(orders, now_s)

    world = Counting({})
    _, records = drive([], world)
    assert world.applied == 1
    assert len(events(records, AgentJoined)) == len(NODES)


class AtOnce(Countdown):
    """Saves take no time, so that each one is followed by a round at the same instant."""

    restart_s = 30.0

    def apply(self, orders: Orders, now_s: float) -> Sequence[Happening]:
        happened = super().apply(orders, now_s)
        return [Happening(now_s, h.source, h.what) for h in happened]


def test_a_policy_that_flips_at_one_instant_is_given_up() -> None:
    jobs = [Arrival(at_s=1.0, spec=make_spec(name, replicas=8, batch_size=64)) for name in ("a", "b")]
    run, _ = drive(jobs, AtOnce({"a": 100.0, "b": 100.0}), TakesTurns())
    assert "given up at 60 s, when there were more than 1000 rounds at this instant" in run.stalled


def test_rounds_in_which_a_policy_fails_change_nothing_and_are_told() -> None:
    class Raises:
        name = "raises"

        def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
            if seed % 2 == 0:
                raise ZeroDivisionError("by zero")
            return make_policy("fixed").decide(view, memory, seed)

    world = SyntheticWorld(seed=1)
    run, _ = drive(made_up(world, [(0.0, 1), (0.0, 2)]), world, Raises())
    assert len(run.state.ended) == 2
    assert run.state.rounds // 2 <= len(run.undecided) <= run.state.rounds // 2 + 1
    (told,) = set(run.undecided)
    assert told.startswith(
        "kept as it was: policy 'raises' gave no valid decision: ZeroDivisionError: by zero"
    )


def test_what_a_policy_says_of_a_job_it_keeps_is_not_taken_for_a_failure() -> None:
    class Keeps:
        name = "keeps"

        def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
            decision = make_policy("fixed").decide(view, memory, seed)
            reasons = dict.fromkeys(decision.reasons, "kept as it was: no better place")
            return Decision(allocations=decision.allocations, configs=decision.configs, reasons=reasons)

    run, _ = drive([Arrival(at_s=0.0, spec=make_spec("a"))], Countdown({"a": 5.0}), Keeps())
    assert not run.undecided


def test_a_job_that_is_impossible_is_refused_and_the_rest_go_on() -> None:
    jobs = [
        Arrival(at_s=0.0, spec=make_spec("too-many", replicas=9, max_replicas=64, batch_size=64)),
        Arrival(at_s=0.0, spec=make_spec("nan", target=float("nan"))),
        Arrival(at_s=0.0, spec=make_spec("fine")),
    ]
    run, records = drive(jobs, Countdown({"fine": 5.0}))
    assert set(run.refused) == {"too-many", "nan"}
    assert "the slots of the cluster" in run.refused["too-many"]
    assert len(events(records, JobRefused)) == 2
    assert [job.spec.id for job in run.state.ended.values()] == ["fine"]


def test_no_jobs_end_at_once() -> None:
    run, records = drive([], Countdown({}))
    assert run.state.rounds == 0
    assert [record.source for record in records] == ["scheduler"] * 4
