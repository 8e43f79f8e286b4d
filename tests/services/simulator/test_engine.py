"""The virtual clock: when rounds happen, that no job is lost, and that the log is valid."""

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
    JobCompleted,
    JobRefused,
    JobSubmitted,
    Orders,
    RoundDecided,
)
from common.types import JobState
from services.scheduler.policies.interface import ClusterView, Decision
from services.scheduler.policies.registry import make_policy
from services.simulator.worlds.interface import WorldEvent
from services.simulator.worlds.synthetic import SyntheticWorld
from tests.fixtures.countdown import Countdown
from tests.fixtures.scheduler_driver import make_spec
from tests.fixtures.simulation_runs import NODES, TakesTurns, drive, events, short_jobs
from workloads.files.workload_file import Arrival

ARRIVALS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 60.0, 61.0, 7200.0, 1e7]), st.integers(1, 8)), min_size=1, max_size=5
)


@settings(max_examples=15, deadline=None)
@given(ARRIVALS, st.sampled_from(["fixed", "dynamic", "pollux", "tiresias", "srtf", "optimus"]))
def test_for_any_arrivals_every_job_completes_within_capacity_and_the_audit_is_clean(
    jobs: list[tuple[float, int]], policy: str
) -> None:
    world = SyntheticWorld(seed=1)
    run, records = drive(short_jobs(world, jobs), world, policy, round_s=600.0)
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
        _, records = drive(short_jobs(world, jobs), world, "pollux", round_s=600.0)
        logs.append(b"".join(encode_line(record) for record in records))
    assert logs[0] == logs[1]


def test_a_log_on_disk_reads_back_as_it_was_written(tmp_path: Path) -> None:
    world = SyntheticWorld(seed=1)
    _, records = drive(short_jobs(world, [(0.0, 2), (30.0, 1)]), world, "pollux", round_s=600.0)
    writer = EventLogWriter(tmp_path)
    assert writer.append(records) == len(records)
    writer.close()
    read = list(read_events(tmp_path / "events.jsonl"))
    assert [record.event for record in read if isinstance(record.event, RoundDecided)] == [
        event for _, event in events(records, RoundDecided)
    ]
    assert all(event.decision_s == 0.0 for _, event in events(records, RoundDecided))


def test_a_world_that_is_not_event_driven_has_rounds_at_fixed_intervals() -> None:
    world = SyntheticWorld(seed=1)
    _, records = drive(short_jobs(world, [(1.0, 1), (61.0, 1)]), world)
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


def test_a_preempted_job_saves_and_continues() -> None:
    jobs = [Arrival(at_s=0.0, spec=make_spec(name, replicas=8, batch_size=64)) for name in ("a", "b")]
    _, records = drive(jobs, Countdown({"a": 100.0, "b": 100.0}), TakesTurns(), round_s=10.0)
    verdict = audit(history(from_records(records)))
    assert verdict.ok, verdict.findings
    ended = {event.job_id: t_s for t_s, event in events(records, JobCompleted)}
    assert set(ended) == {"a", "b"}
    assert max(ended.values()) >= 200.0


def test_an_idle_cluster_has_no_rounds_until_the_next_arrival() -> None:
    world = SyntheticWorld(seed=1)
    run, records = drive(short_jobs(world, [(0.0, 1), (1e7, 1)]), world, round_s=600.0)
    busy = sum(job.ended_s - job.submitted_s for job in run.state.ended.values() if job.ended_s)
    assert run.state.rounds <= busy / 600.0 + 2
    assert len(events(records, JobCompleted)) == 2


def test_orders_go_to_the_world_once_for_all_registrations() -> None:
    class Counting(Countdown):
        applied = 0

        def apply(self, orders: Orders, now_s: float) -> Sequence[WorldEvent]:
            self.applied += 1
            return super().apply(orders, now_s)

    world = Counting({})
    _, records = drive([], world)
    assert world.applied == 1
    assert len(events(records, AgentJoined)) == len(NODES)


def test_rounds_in_which_a_policy_fails_change_nothing_and_are_counted() -> None:
    class Raises:
        name = "raises"

        def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
            if seed % 2 == 0:
                raise ZeroDivisionError("by zero")
            return make_policy("fixed").decide(view, memory, seed)

    world = SyntheticWorld(seed=1)
    run, _ = drive(short_jobs(world, [(0.0, 1), (0.0, 2)]), world, Raises())
    assert len(run.state.ended) == 2
    assert run.state.rounds // 2 <= len(run.invalid_decisions) <= run.state.rounds // 2 + 1
    (reason,) = set(run.invalid_decisions)
    assert reason.startswith("unchanged: policy 'raises' gave no valid decision: ZeroDivisionError: by zero")


def test_a_policys_own_reason_does_not_count_as_a_failure() -> None:
    class Keeps:
        name = "keeps"

        def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
            decision = make_policy("fixed").decide(view, memory, seed)
            reasons = dict.fromkeys(decision.reasons, "unchanged: no better place")
            return Decision(allocations=decision.allocations, configs=decision.configs, reasons=reasons)

    run, _ = drive([Arrival(at_s=0.0, spec=make_spec("a"))], Countdown({"a": 5.0}), Keeps())
    assert not run.invalid_decisions


def test_an_impossible_job_is_refused_and_the_others_run() -> None:
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


def test_a_run_without_jobs_ends_at_once() -> None:
    run, records = drive([], Countdown({}))
    assert run.state.rounds == 0
    assert [record.source for record in records] == ["scheduler"] * 4
