import pytest

from analysis.log.history import NoRuns, find_logs, merge, read_log, rebuild, replay, streams
from common.protocol import AgentLeft, JobFailed, RunStarted, TrainingSample
from common.types import JobState
from tests.fixtures.logs import (
    RUN_ID,
    add,
    changed,
    decided,
    good_run,
    only,
    save,
    scheduler_tells,
    swap,
    without,
    written,
)


def test_a_log_reads_back_as_it_was_written(tmp_path):
    records = written(good_run())
    log = read_log(save(records, tmp_path / RUN_ID))
    assert log.records == records
    assert log.fault == ""
    assert log.run_id == RUN_ID


def test_logs_are_found_at_any_depth_and_a_run_is_not_searched_further(tmp_path):
    records = written(good_run())
    first = save(records, tmp_path / "b")
    second = save(records, tmp_path / "sweep" / "a")
    save(records, tmp_path / "b" / "jobs" / "not-a-run")
    (tmp_path / "nothing").mkdir()
    assert find_logs(tmp_path) == [first, second]
    assert find_logs(tmp_path / "b") == [first]
    assert find_logs(first) == [first]


def test_a_run_that_lost_its_log_is_found_and_reported(tmp_path):
    (tmp_path / "run" / "outbox").mkdir(parents=True)
    (path,) = find_logs(tmp_path)
    assert "No such file" in read_log(path).fault


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_place_without_runs_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoRuns, match=name):
        find_logs(tmp_path / name)


def test_a_broken_line_is_told_with_its_number_and_what_stood_before_is_kept(tmp_path):
    records = written(good_run())
    path = save(records, tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b'{"foreign": 1}\n', *lines[5:]]))
    log = read_log(path)
    assert log.records == records[:5]
    assert "events.jsonl:6:" in log.fault


def test_times_of_all_sources_are_put_on_the_schedulers_clock():
    happenings = good_run()
    lines = merge(streams(written(happenings)))
    assert sorted(line.t_s for line in lines) == pytest.approx([h.t_s for h in happenings])
    assert [line.t_s for line in lines] == sorted(line.t_s for line in lines)


def test_a_restarted_scheduler_on_another_clock_goes_on_in_the_same_time():
    records = written(scheduler_tells())
    later = [
        type(record)(**{f: getattr(record, f) for f in record.__struct_fields__} | change)
        for seq, record in enumerate(records[10:], start=1)
        for change in [{"incarnation": "i2", "seq": seq, "t_s": record.t_s - 90}]
    ]
    lines = merge(streams([*records[:10], *later]))
    assert [line.t_s for line in lines] == pytest.approx([record.t_s for record in records])


def test_late_lines_of_a_source_fall_into_their_place():
    records = written(good_run())
    late = [*records[:3], *records[4:], records[3]]
    assert [line.record for line in merge(streams(late))] == [line.record for line in merge(streams(records))]


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
    samples = history_of(late).jobs["a"].samples
    assert [sample.progress for _, sample in samples] == [20.0, 50.0, 80.0]


def test_capacity_follows_nodes_that_come_and_go():
    left = AgentLeft(node="n1", incarnation="i1", reason="it fell silent")
    run = history_of(add(good_run(), "scheduler", 125.0, left))
    assert run.capacity == [(100.0, 2), (100.0, 4), (125.0, 2)]
    assert run.largest_node == 2


def test_a_run_that_was_taken_up_again_has_not_ended():
    again = RunStarted(policy="pollux", workload="", seed=0, round_s=2.0, version="0")
    assert history_of(good_run()).ended
    assert not history_of(add(good_run(), "scheduler", 130.0, again)).ended


def test_nothing_at_all_rebuilds_to_nothing():
    assert rebuild([]).jobs == {}
    assert replay([]).lines == []
