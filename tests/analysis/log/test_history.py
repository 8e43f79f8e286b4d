from analysis.log.frames import from_records
from analysis.log.history import history, integral
from common.protocol import (
    AgentJoined,
    AgentLeft,
    JobFailed,
    RunEnded,
    RunStarted,
    TrainingSample,
)
from common.types import JobState
from tests.fixtures.logs import (
    add,
    changed,
    decided,
    good_run,
    history_of,
    joined,
    only,
    sample,
    spec,
    swap,
    without,
)


def test_a_jobs_slots_follow_decisions_while_it_starts_or_runs():
    run = history_of(good_run())
    assert run.jobs["a"].slots == [(112.0, 1), (116.0, 2), (122.0, 0)]
    assert run.jobs["a"].verifier == [(122.0, 1), (124.0, 0)]
    assert run.jobs["b"].slots == [(116.0, 1), (126.0, 0)]


def test_a_preempted_job_holds_no_slots():
    happenings = add(
        good_run(), "scheduler", 123.0, decided(4, {"b": ()}), changed("b", "running", "preempting")
    )
    happenings = swap(
        happenings, changed("b", "running", "cancelled"), changed("b", "preempting", "cancelled")
    )
    assert history_of(happenings).jobs["b"].slots == [(116.0, 1), (123.0, 0)]


def test_ends_and_reasons_are_known():
    run = history_of(good_run())
    assert (run.jobs["a"].end, run.jobs["a"].ended_s) == (JobState.COMPLETED, 124.0)
    assert (run.jobs["b"].end, run.jobs["b"].ended_s) == (JobState.CANCELLED, 126.0)
    cancelled = good_run()[-3].event
    failed = JobFailed(job_id="b", reason="loss is nan")
    run = history_of(swap(good_run(), cancelled, failed))
    assert (run.jobs["b"].end, run.jobs["b"].reason) == (JobState.FAILED, "loss is nan")


def test_samples_are_ordered_by_generation_whatever_the_clocks_say():
    happenings = good_run()
    first = only(happenings, TrainingSample, "a", 0)
    late = add(without(happenings, first), "agent-n1", 125.0, first)
    assert history_of(late).jobs["a"].samples["progress"].to_list() == [20.0, 50.0, 80.0]


def test_capacity_follows_nodes_that_come_and_go():
    left = AgentLeft(node="n1", incarnation="i1", reason="it fell silent")
    run = history_of(add(good_run(), "scheduler", 125.0, left))
    assert run.capacity == [(100.0, 2), (100.0, 4), (125.0, 2)]
    assert run.largest_node == 2


def test_a_resumed_run_has_not_ended():
    again = RunStarted(policy="pollux", workload="", seed=0, round_s=2.0, version="0")
    assert history_of(good_run()).ended
    assert not history_of(add(good_run(), "scheduler", 130.0, again)).ended


def test_jobs_under_way_at_the_end_are_known():
    end = RunEnded(reason="stopped")
    run = history_of(swap(good_run(), end, RunEnded(reason="stopped", active=("b",))))
    assert run.active_at_end == {"b"}


def test_nodes_are_known_as_they_joined_last():
    again = AgentJoined(node=joined("n1", slots=3).node, incarnation="i2")
    run = history_of(add(good_run(), "scheduler", 125.0, again))
    assert [(node.name, node.slots) for node in run.nodes] == [("n0", 2), ("n1", 3)]


def test_the_frames_of_a_job_have_its_rows_alone():
    run = history_of(good_run())
    a, b = run.jobs["a"], run.jobs["b"]
    assert a.spec == spec("a")
    assert (a.samples["progress"].to_list(), b.samples["progress"].to_list()) == ([20.0, 50.0, 80.0], [30.0])
    assert (a.generations["generation"].to_list(), b.generations["generation"].to_list()) == ([1, 2], [1])
    assert (len(a.evaluations), len(b.evaluations)) == (2, 0)
    assert (len(a.models), len(b.models)) == (1, 0)


def test_events_of_a_job_that_was_never_submitted_are_ignored():
    stranger = sample("ghost", 1, 2.0, total_steps=1, total_examples=16, progress=1.0)
    run = history_of(add(good_run(), "agent-n0", 120.0, stranger, changed("ghost", "pending", "starting")))
    assert list(run.jobs) == ["a", "b"]
    assert run.jobs["b"].samples["progress"].to_list() == [30.0]


def test_an_empty_log_is_a_run_without_jobs():
    run = history(from_records([]))
    assert (run.jobs, run.started, run.ended, run.capacity, run.last_s) == ({}, None, False, [], 0.0)


def test_an_integral_of_steps_is_what_a_sum_of_rectangles_gives():
    steps = [(2.0, 3), (4.0, 0), (5.0, 1)]
    assert integral(steps, 0.0, 10.0) == 2 * 3 + 5 * 1
    assert integral(steps, 3.0, 5.5) == 1 * 3 + 0.5 * 1
    assert integral(steps, 0.0, 2.0) == 0.0
    assert integral([], 0.0, 2.0) == 0.0
