"""A good run is clean; each change below breaks one rule and only that one."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from analysis.log.audit import MAX_FINDINGS_A_RULE, RULES, audit, count_gaps
from analysis.log.frames import from_records, read
from analysis.log.history import history
from common.protocol import (
    AgentJoined,
    AgentLeft,
    BatchChanged,
    CheckpointSaved,
    Evaluated,
    EventsDropped,
    GenerationStarted,
    JobCancelled,
    JobCompleted,
    JobRefused,
    JobSubmitted,
    ReplicaExited,
    ReplicaStarted,
    RunEnded,
    TrainingSample,
    VerificationStarted,
    Verified,
)
from common.types import Placement
from tests.fixtures.logs import (
    BATCH_16,
    N0,
    N1,
    RUN_ID,
    Happening,
    add,
    changed,
    decided,
    evaluated,
    exited,
    good_run,
    history_of,
    joined,
    only,
    sample,
    save,
    saved,
    scheduler_happenings,
    spec,
    started,
    swap,
    verified,
    without,
    written,
)


def broken(records) -> dict[str, list[str]]:
    """Findings by rule."""
    run = history(from_records(records))
    found = {rule.__name__: list(rule(run)) for rule in RULES}
    return {name: findings for name, findings in found.items() if findings}


def assert_breaks(records, rule: str, *texts: str) -> None:
    """Only that rule finds something, one thing, and says these texts."""
    found = broken(records)
    assert list(found) == [rule]
    (finding,) = found[rule]
    for text in texts:
        assert text in finding


def edited(event, **fields):
    """The good run with fields of one of its events changed."""
    return swap(good_run(), event, replace(event, **fields))


A_SAMPLES = [only(good_run(), TrainingSample, "a", n) for n in range(3)]
A_COMPLETED = only(good_run(), JobCompleted, "a")
A_VERIFIED = only(good_run(), Verified, "a")
A_SAVED = only(good_run(), CheckpointSaved, "a")
A_SECOND_GENERATION = only(good_run(), GenerationStarted, "a", 1)
B_CANCELLED = only(good_run(), JobCancelled, "b")


def test_a_good_run_is_clean():
    records = written(good_run())
    verdict = audit(history(from_records(records)))
    assert verdict.findings == ()
    assert verdict.ok
    assert (verdict.events, verdict.gaps) == (len(records), 0)


def test_a_simulated_run_with_one_source_is_clean():
    happenings = add(scheduler_happenings(), "scheduler", 123.0, verified("a", 0.96, 0.96))
    happenings = add(happenings, "scheduler", 121.0, A_SAMPLES[2], evaluated("a", 80.0, 0.96, True))
    assert broken(written(happenings)) == {}


def test_bad_lines_are_findings_and_so_are_the_events_that_they_took_away(tmp_path):
    path = save(written(good_run()), tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], b"not JSON\n", *lines[5:], b"{}\n"]))
    verdict = audit(history(read(path)))
    assert (verdict.ok, verdict.events, verdict.gaps) == (False, 37, 1)
    first, second, *others = verdict.findings
    assert first.startswith(f"{path}:5: not JSON")
    assert second == f"{path}:39: not an event of coadapt"
    assert "scheduler (i1): event 5 is missing" in others


def test_a_log_without_events_has_no_other_finding_than_that(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b"")
    verdict = audit(history(read(tmp_path)))
    assert (verdict.ok, verdict.findings) == (False, (f"{tmp_path}/events.jsonl:1: empty: no event in it",))


def test_a_line_of_another_run_is_found():
    records = written(good_run())
    records[-1] = replace(records[-1], run_id="other")
    assert_breaks(records, "one_run", f"line {len(records)}", "other", RUN_ID)


def test_missing_events_are_found_and_counted():
    full = written(good_run())
    gone = [r for r in full if r.event not in (A_SAVED, only(good_run(), Evaluated, "a", 1))]
    assert_breaks(gone, "complete_sequences", "agent-n0 (i1): events 11 to 12 are missing")
    assert audit(history(from_records(gone))).gaps == 2


def test_an_event_number_below_one_is_found():
    records = written([*good_run(), Happening("agent-n2", 127.0, saved("a", 80.0))])
    records[-1] = replace(records[-1], seq=0)
    assert_breaks(records, "complete_sequences", "agent-n2", "number 0", f"line {len(records)}")


def test_dropped_events_at_the_end_of_a_source_are_found_and_counted():
    lost = EventsDropped(source="agent-n1", incarnation="i1", first_seq=3, last_seq=5)
    records = written(add(good_run(), "logger", 128.0, lost))
    assert_breaks(records, "complete_sequences", "agent-n1 (i1): events 3 to 5 were dropped", "logger #1")
    assert count_gaps(history(from_records(records))) == 3


def test_dropped_events_that_leave_a_gap_are_counted_once():
    # agent-n1 has 2 events; its first is missing.
    lost = EventsDropped(source="agent-n1", incarnation="i1", first_seq=1, last_seq=1)
    records = written(add(good_run(), "logger", 128.0, lost))
    first = next(record for record in records if record.source == "agent-n1")
    assert count_gaps(history(from_records(record for record in records if record is not first))) == 1


def test_a_repeated_event_is_found():
    records = written(good_run())
    assert_breaks([*records, records[5]], "no_repetitions", f"line {len(records) + 1}")


def test_events_that_arrive_late_are_no_finding():
    records = written(good_run())
    assert broken([*records[:20], *records[21:], records[20]]) == {}


def test_a_clock_that_goes_back_is_found():
    records = written(good_run())
    at = next(n for n, record in enumerate(records) if record.event == A_SAVED)
    records[at] = replace(records[at], t_s=records[at].t_s - 3)
    assert_breaks(records, "steady_clocks", "agent-n0 (i1)", "2.5 s", f"line {at + 1}")


# --------------------------------------------------------------------------- slots


def test_a_node_over_capacity_is_found():
    extra = add(good_run(), "agent-n0", 118.0, started("b", "n0", "n0-9", 1))
    extra = add(extra, "agent-n0", 118.2, exited("b", "n0", "n0-9"))
    assert_breaks(written(extra), "nodes_within_capacity", "node n0: 3 processes in 2 slots", "n0-9", "job b")


def test_a_verifier_takes_a_slot_as_well():
    verifier = VerificationStarted(job_id="a", node="n0", replica="n0-9", pid=1)
    extra = add(good_run(), "agent-n0", 118.0, verifier)
    extra = add(extra, "agent-n0", 118.2, exited("a", "n0", "n0-9"))
    assert_breaks(written(extra), "nodes_within_capacity", "node n0: 3 processes in 2 slots")


def test_an_exit_without_a_start_is_found():
    extra = add(good_run(), "agent-n1", 118.0, exited("a", "n1", "n1-9"))
    assert_breaks(written(extra), "nodes_within_capacity", "n1-9 exits without having been started")


def test_a_replica_that_is_started_twice_is_found():
    first = only(good_run(), ReplicaStarted, "a", 1)
    extra = add(good_run(), "agent-n1", 118.0, first)
    assert_breaks(written(extra), "nodes_within_capacity", "n1-1 is started while it lives")


def test_a_node_that_never_joined_is_found():
    extra = add(good_run(), "agent-n7", 118.0, started("b", "n7", "n7-1", 1))
    assert_breaks(written(extra), "nodes_within_capacity", "node n7: runs n7-1 but never joined")


def test_an_agent_that_was_restarted_begins_with_no_replicas():
    """No event reports the exits of the killed agent's replicas."""
    happenings = without(good_run(), only(good_run(), ReplicaExited, "a", 1))
    happenings = add(happenings, "scheduler", 123.0, AgentJoined(node=joined("n1").node, incarnation="i2"))
    records = written(happenings)
    fresh = written([Happening("agent-n1", 124.0 + n, started("b", "n1", f"n1-{n}", 2)) for n in (8, 9)])
    assert broken([*records, *(replace(record, incarnation="i2") for record in fresh)]) == {}


def test_a_decision_over_capacity_is_found():
    over = add(
        good_run(), "scheduler", 118.0, decided(9, {"a": (N0, N1), "b": (Placement(node="n0", replicas=2),)})
    )
    assert_breaks(
        written(over), "decisions_within_capacity", "round 9 gives away 3 slots of node n0", "has 2"
    )


def test_a_decision_about_a_node_that_has_left_is_found():
    happenings = add(
        good_run(), "scheduler", 125.0, AgentLeft(node="n1", incarnation="i1", reason="it stopped")
    )
    happenings = add(happenings, "scheduler", 125.5, decided(9, {"b": (N1,)}))
    assert_breaks(written(happenings), "decisions_within_capacity", "1 slots of node n1", "has 0")


# --------------------------------------------------------------------------- the life of a job


@pytest.mark.parametrize(
    "event",
    [
        BatchChanged(job_id="ghost", generation=1, config=BATCH_16, total_batch=16, step=1),
        decided(9, {"ghost": ()}),
    ],
)
def test_a_job_that_was_never_submitted_is_found(event):
    assert_breaks(written(add(good_run(), "scheduler", 125.0, event)), "only_submitted_jobs", "job ghost")


def test_a_refused_job_is_no_finding():
    refused = JobRefused(job_id="ghost", reason="application: unknown")
    assert broken(written(add(good_run(), "scheduler", 125.0, refused))) == {}


def test_a_second_submission_is_found():
    twice = add(good_run(), "scheduler", 125.0, JobSubmitted(spec=spec("b")))
    assert_breaks(written(twice), "submitted_once", "job b", "submitted again")


def test_a_broken_chain_of_states_is_found():
    happenings = swap(good_run(), changed("b", "running", "cancelled"), changed("b", "starting", "cancelled"))
    assert_breaks(written(happenings), "legal_transitions", "job b", "leave starting, but it was running")


def test_a_transition_that_is_not_in_the_table_is_found():
    happenings = swap(good_run(), changed("b", "pending", "starting"), changed("b", "pending", "running"))
    happenings = without(happenings, changed("b", "starting", "running"))
    assert_breaks(written(happenings), "legal_transitions", "job b", "from pending to running")


def test_two_ends_are_found():
    happenings = add(good_run(), "scheduler", 126.5, B_CANCELLED)
    assert_breaks(written(happenings), "one_end_a_job", "job b", "2 times", "cancelled, cancelled")


def test_a_job_without_an_end_is_found_only_when_the_run_has_ended():
    going_on = without(good_run(), B_CANCELLED, changed("b", "running", "cancelled"))
    assert_breaks(written(going_on), "one_end_a_job", "job b", "no end", "it is running")
    assert broken(written(without(going_on, RunEnded(reason="stopped")))) == {}


def test_a_job_under_way_when_the_stack_was_stopped_needs_no_end():
    going_on = without(good_run(), B_CANCELLED, changed("b", "running", "cancelled"))
    end = RunEnded(reason="stopped")
    assert broken(written(swap(going_on, end, replace(end, active=("b",))))) == {}


def test_an_end_that_contradicts_the_state_is_found():
    happenings = swap(good_run(), changed("b", "running", "cancelled"), changed("b", "running", "failed"))
    assert_breaks(written(happenings), "one_end_a_job", "job b", "ends as cancelled but is failed")


def test_progress_that_goes_back_is_found():
    happenings = edited(A_SAMPLES[2], progress=49.0)
    assert_breaks(written(happenings), "monotone_progress", "job a", "back from 50 to 49")


def test_a_generation_that_starts_behind_is_found():
    happenings = edited(A_SECOND_GENERATION, progress=19.0)
    assert_breaks(written(happenings), "monotone_progress", "job a", "back from 20 to 19")


def test_steps_or_examples_that_go_back_are_found():
    happenings = edited(A_SAMPLES[2], total_examples=900)
    assert_breaks(written(happenings), "monotone_progress", "examples go back", "960", "900")


def test_progress_that_is_not_a_number_is_found():
    happenings = edited(A_SAMPLES[1], progress=float("nan"))
    assert_breaks(written(happenings), "monotone_progress", "progress is nan")


@pytest.mark.parametrize(
    "why", [{"progress_lost": 8.0}, {"state_from": "checkpoint"}, {"state_from": "scratch"}]
)
def test_progress_may_go_back_when_a_generation_reports_lost_work(why):
    happenings = edited(A_SECOND_GENERATION, progress=12.0, **why)
    happenings = swap(
        happenings, A_SAMPLES[1], replace(A_SAMPLES[1], progress=15.0, total_examples=200, total_steps=19)
    )
    assert broken(written(happenings)) == {}


def test_after_lost_work_progress_counts_from_the_checkpoint():
    happenings = edited(A_SECOND_GENERATION, progress=12.0, state_from="checkpoint")
    happenings = swap(happenings, A_SAMPLES[1], replace(A_SAMPLES[1], progress=11.0))
    assert_breaks(written(happenings), "monotone_progress", "back from 12 to 11")


def test_a_batch_change_within_a_group_resets_no_totals():
    happenings = add(
        good_run(), "agent-n0", 120.5, sample("b", 2, 0.5, total_steps=29, total_examples=490, progress=31.0)
    )
    assert_breaks(written(happenings), "monotone_progress", "job b", "go back from 30 and 480 to 29 and 490")


# --------------------------------------------------------------------------- completions


def test_a_completion_without_verification_is_found():
    happenings = edited(A_COMPLETED, verified=False)
    assert_breaks(written(happenings), "completions_verified", "job a", "completed without verification")


def test_a_completion_without_verdict_is_found():
    assert_breaks(
        written(without(good_run(), A_VERIFIED)),
        "completions_verified",
        "job a",
        "before any verifier had reported",
    )


def test_a_verdict_after_the_completion_is_too_late():
    happenings = add(without(good_run(), A_VERIFIED), "agent-n0", 126.7, A_VERIFIED)
    assert_breaks(written(happenings), "completions_verified", "before any verifier had reported")


def test_a_refuted_completion_is_found():
    happenings = edited(A_VERIFIED, ok=False, findings=("epoch 0: example 17 twice",))
    assert_breaks(written(happenings), "completions_verified", "job a", "example 17 twice")


def test_the_last_verdict_counts():
    refuted = replace(A_VERIFIED, ok=False, findings=("epoch 0: example 17 twice",))
    assert broken(written(add(good_run(), "agent-n0", 122.6, refuted))) == {}


def test_a_verifier_that_measured_another_metric_is_found():
    happenings = edited(A_VERIFIED, reported_metric=0.9602)
    assert_breaks(written(happenings), "completions_verified", "measured 0.96, but 0.9602 was reported")
    assert broken(written(edited(A_VERIFIED, reported_metric=0.96005))) == {}


def test_a_completion_with_another_metric_than_the_verifiers_is_found():
    happenings = edited(A_COMPLETED, metric=0.97)
    assert_breaks(written(happenings), "completions_verified", "measured 0.96, but 0.97 was completed with")


def test_a_completion_short_of_its_target_is_found():
    happenings = edited(A_COMPLETED, metric=0.94)
    happenings = swap(happenings, A_VERIFIED, replace(A_VERIFIED, metric=0.94, reported_metric=0.94))
    assert_breaks(written(happenings), "completions_meet_target", "job a", "0.94, short of its target 0.95")


def test_a_target_may_be_reached_from_above():
    """0.96 was not reached, 0.90 is the completion: the smaller the better, target 0.95."""
    happenings = swap(good_run(), evaluated("a", 50.0, 0.90, False), evaluated("a", 50.0, 1.2, False))
    happenings = swap(happenings, evaluated("a", 80.0, 0.96, True), evaluated("a", 80.0, 0.90, True))
    happenings = swap(happenings, A_VERIFIED, replace(A_VERIFIED, metric=0.90, reported_metric=0.90))
    low = swap(happenings, A_COMPLETED, replace(A_COMPLETED, metric=0.90))
    assert broken(written(low)) == {}
    high = swap(low, replace(A_COMPLETED, metric=0.90), A_COMPLETED)
    high = swap(high, replace(A_VERIFIED, metric=0.90, reported_metric=0.90), A_VERIFIED)
    assert_breaks(written(high), "completions_meet_target", "0.96, short of its target 0.95")


def test_an_evaluation_that_contradicts_the_others_is_found():
    happenings = add(good_run(), "agent-n0", 118.0, evaluated("b", 20.0, 0.90, True))
    found = broken(written(happenings))
    assert list(found) == ["completions_meet_target"]
    assert "against the others of digits-cnn" in found["completions_meet_target"][0]


def test_a_job_that_ran_longer_than_it_took_is_found():
    happenings = edited(A_SAMPLES[0], window_s=11.0)
    assert_breaks(written(happenings), "completions_last_as_long_as_they_ran", "job a", "15 s", "14 s")


def test_a_rule_with_many_findings_is_cut_short():
    happenings = add(good_run(), "scheduler", 125.0, *[saved(f"ghost{n}", 0.0) for n in range(100)])
    findings = audit(history_of(happenings)).findings
    assert len(findings) == MAX_FINDINGS_A_RULE + 1
    assert "80 more" in findings[-1]


def test_every_rule_has_been_broken_above():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [rule.__name__ for rule in RULES if f'"{rule.__name__}"' not in source] == []
