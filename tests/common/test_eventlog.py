"""events.jsonl: written once, in order, and read back line by line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from common.eventlog import (
    EVENTS_FILE,
    MAX_HELD,
    EventLogError,
    EventLogWriter,
    SequenceNumbers,
    encode_line,
    find_gaps,
    read_events,
)
from common.protocol import EventRecord, JobCancelled, JobSubmitted, ModelFitted, Verified
from common.types import ThroughputParameters
from tests.fixtures.full_disk import disk_that_takes
from tests.fixtures.specifications import make_job


def record(seq, source="scheduler", incarnation="one", event=None):
    return EventRecord(
        run_id="run",
        source=source,
        incarnation=incarnation,
        seq=seq,
        t_s=float(seq),
        wall_s=1000.0 + seq,
        event=event or JobCancelled(job_id=f"job-{seq}"),
    )


def numbers(run_dir):
    return [(r.source, r.seq) for r in read_events(run_dir / EVENTS_FILE)]


@pytest.fixture
def writer(tmp_path):
    writer = EventLogWriter(tmp_path)
    yield writer
    writer.close()


class TestWriter:
    def test_records_come_back_as_they_were_written(self, writer, tmp_path):
        written = [
            record(1),
            record(2, event=Verified(job_id="a", ok=True, metric=0.9, reported_metric=0.9, epochs=1)),
        ]
        assert writer.append(written) == 2
        assert list(read_events(tmp_path / EVENTS_FILE)) == written

    def test_a_number_is_written_once_however_often_it_comes(self, writer, tmp_path):
        writer.append([record(1), record(1), record(2)])
        writer.append([record(2), record(1), record(3)])
        assert numbers(tmp_path) == [("scheduler", 1), ("scheduler", 2), ("scheduler", 3)]

    def test_early_records_wait_for_the_missing_one(self, writer, tmp_path):
        assert writer.append([record(1), record(3), record(4)]) == 1
        assert writer.acknowledged("scheduler", "one") == 1
        assert writer.append([record(2)]) == 3
        assert numbers(tmp_path) == [("scheduler", n) for n in (1, 2, 3, 4)]
        assert writer.acknowledged("scheduler", "one") == 4

    def test_a_gap_of_one_source_delays_no_other_source(self, writer):
        writer.append([record(2), record(1, source="collector"), record(1, incarnation="two")])
        assert writer.acknowledged("scheduler", "one") == 0
        assert writer.acknowledged("collector", "one") == 1
        assert writer.acknowledged("scheduler", "two") == 1

    def test_events_far_ahead_of_a_gap_are_left_to_their_publisher(self, writer):
        writer.append([record(MAX_HELD + 1), record(MAX_HELD)])
        writer.append(record(n) for n in range(1, MAX_HELD))
        assert writer.acknowledged("scheduler", "one") == MAX_HELD

    @pytest.mark.parametrize("seq", [0, -1, -(2**63)])
    def test_numbers_below_one_are_ignored(self, writer, seq):
        assert writer.append([record(seq)]) == 0
        assert writer.write_held() == {}

    def test_a_new_writer_goes_on_where_the_file_ends(self, tmp_path):
        first = EventLogWriter(tmp_path)
        first.append([record(1), record(2), record(1, source="collector")])
        first.close()
        second = EventLogWriter(tmp_path)
        assert second.acknowledged("scheduler", "one") == 2
        second.append([record(2), record(3)])
        second.close()
        assert numbers(tmp_path) == [("scheduler", 1), ("scheduler", 2), ("collector", 1), ("scheduler", 3)]

    def test_a_half_written_last_line_is_cut_and_can_come_again(self, tmp_path):
        whole = encode_line(record(1))
        (tmp_path / EVENTS_FILE).write_bytes(whole + encode_line(record(2))[:-20])
        writer = EventLogWriter(tmp_path)
        assert writer.acknowledged("scheduler", "one") == 1
        writer.append([record(2)])
        writer.close()
        assert numbers(tmp_path) == [("scheduler", 1), ("scheduler", 2)]

    def test_a_broken_line_is_left_for_the_reader_to_report(self, tmp_path):
        (tmp_path / EVENTS_FILE).write_bytes(encode_line(record(1)) + b"{broken\n")
        writer = EventLogWriter(tmp_path)
        writer.append([record(2)])
        writer.close()
        with pytest.raises(EventLogError, match=f"{EVENTS_FILE}:2: not JSON"):
            list(read_events(tmp_path / EVENTS_FILE))

    def test_a_second_writer_of_the_same_file_is_refused(self, writer, tmp_path):
        with pytest.raises(EventLogError, match="another logger is writing it"):
            EventLogWriter(tmp_path)

    def test_a_folder_that_cannot_be_created_is_an_error_for_people(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(EventLogError, match="cannot be written"):
            EventLogWriter(tmp_path / "file" / "run")

    def test_a_full_disk_leaves_the_file_whole_and_acknowledges_nothing(self, writer, tmp_path):
        writer.append([record(1)])
        size_bytes = (tmp_path / EVENTS_FILE).stat().st_size
        with disk_that_takes(size_bytes + 30), pytest.raises(OSError, match="File too large"):
            writer.append([record(2), record(3)])
        assert (tmp_path / EVENTS_FILE).stat().st_size == size_bytes
        assert writer.acknowledged("scheduler", "one") == 1
        assert writer.append([]) == 2
        assert numbers(tmp_path) == [("scheduler", n) for n in (1, 2, 3)]

    def test_giving_up_a_gap_names_what_is_lost_and_continues_after_it(self, writer, tmp_path):
        writer.append([record(1), record(5)])
        assert writer.give_up("scheduler", "one", 4) == (2, 3)
        writer.append([record(4)])
        assert writer.acknowledged("scheduler", "one") == 5
        assert numbers(tmp_path) == [("scheduler", n) for n in (1, 4, 5)]

    def test_there_is_nothing_to_give_up_without_a_gap(self, writer):
        writer.append([record(1)])
        assert writer.give_up("scheduler", "one", 2) is None
        assert writer.give_up("scheduler", "one", 1) is None

    def test_giving_up_costs_no_time_however_large_the_gap(self, writer):
        assert writer.give_up("scheduler", "one", 2**62) == (1, 2**62 - 1)

    def test_at_the_end_waiting_records_are_written_and_missing_ones_are_named(self, writer, tmp_path):
        writer.append([record(1), record(3), record(6), record(4)])
        assert writer.write_held() == {("scheduler", "one"): [(2, 2), (5, 5)]}
        assert numbers(tmp_path) == [("scheduler", n) for n in (1, 3, 4, 6)]
        assert writer.acknowledged("scheduler", "one") == 1

    def test_events_missing_at_the_end_may_reach_the_next_writer(self, tmp_path):
        first = EventLogWriter(tmp_path)
        first.append([record(1), record(3)])
        first.write_held()
        first.close()
        second = EventLogWriter(tmp_path)
        second.append([record(2), record(3)])
        assert second.acknowledged("scheduler", "one") == 3
        second.close()
        assert sorted(numbers(tmp_path)) == [("scheduler", n) for n in (1, 2, 3)]

    @given(
        order=st.permutations(range(1, 9)),
        repeats=st.lists(st.integers(1, 8)),
        cuts=st.sets(st.integers(0, 16)),
    )
    def test_any_order_with_repetitions_ends_as_every_number_once_in_order(
        self, tmp_path_factory, order, repeats, cuts
    ):
        run_dir = tmp_path_factory.mktemp("run")
        writer = EventLogWriter(run_dir)
        for at, seq in enumerate([*order, *repeats]):
            writer.append([record(seq)])
            if at in cuts:
                held = writer.acknowledged("scheduler", "one")
                writer.close()
                writer = EventLogWriter(run_dir)
                assert writer.acknowledged("scheduler", "one") == held
        writer.append(record(seq) for seq in order)
        writer.close()
        assert numbers(run_dir) == [("scheduler", n) for n in range(1, 9)]


class TestReader:
    def test_floats_that_json_lacks_come_back(self, tmp_path):
        nan, inf = float("nan"), float("inf")
        parameters = ThroughputParameters(
            alpha_c=nan, beta_c=inf, alpha_n=-inf, beta_n=0.0, alpha_r=0.0, beta_r=0.0, gamma=1.0
        )
        event = ModelFitted(
            job_id="null", parameters=parameters, statistics=None, error=nan, points=1, fit_s=0.0
        )
        (tmp_path / "log").write_bytes(encode_line(record(1, event=event)))
        (read,) = read_events(tmp_path / "log")
        assert repr(read.event) == repr(event)

    def test_a_missing_file_is_an_error_for_people(self, tmp_path):
        with pytest.raises(EventLogError, match="cannot be read: No such file"):
            list(read_events(tmp_path / "nothing"))

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"", ":1: empty"),
            (b"hello\n", ":1: not JSON"),
            (b"\xff\xfe\n", ":1: not JSON"),
            (b"[]\n", ":1: not an event of coadapt"),
            (b'{"a": 1}\n', ":1: not an event of coadapt"),
            (encode_line(record(1)) + b"\n", ":2: not JSON"),
            (encode_line(record(1))[:-1], ":1: cut short"),
            (encode_line(record(1)) + encode_line(record(2))[:40], ":2: cut short"),
        ],
    )
    def test_a_damaged_log_is_reported_with_its_line(self, tmp_path, content, problem):
        (tmp_path / "log").write_bytes(content)
        with pytest.raises(EventLogError, match=problem):
            list(read_events(tmp_path / "log"))

    def test_another_schema_is_named(self, tmp_path):
        line = json.loads(encode_line(record(1))) | {"schema": 99}
        (tmp_path / "log").write_text(json.dumps(line) + "\n")
        with pytest.raises(EventLogError, match="schema 99; this version reads 1 and 2"):
            list(read_events(tmp_path / "log"))

    def test_a_submission_of_schema_1_is_still_read(self, tmp_path):
        """It had `accumulates_alone` in the specification of the job."""
        spec = make_job()
        line = json.loads(encode_line(structs.replace(record(1), event=JobSubmitted(spec=spec))))
        del line["event"]["accumulates_alone"]
        for alone in (True, False):
            line["schema"], line["event"]["spec"]["accumulates_alone"] = 1, alone
            (tmp_path / "log").write_text(json.dumps(line) + "\n")
            (read,) = read_events(tmp_path / "log")
            assert read.event == JobSubmitted(spec=spec, accumulates_alone=alone)

    def test_an_invalid_field_is_named(self, tmp_path):
        line = json.loads(encode_line(record(1))) | {"seq": "one"}
        (tmp_path / "log").write_text(json.dumps(line) + "\n")
        with pytest.raises(EventLogError, match=r"Expected `int`, got `str` - at `\$\.seq`"):
            list(read_events(tmp_path / "log"))

    def test_an_error_keeps_file_line_and_text_apart(self, tmp_path):
        (tmp_path / "log").write_bytes(encode_line(record(1)) + b"x\n")
        with pytest.raises(EventLogError) as caught:
            list(read_events(tmp_path / "log"))
        assert (caught.value.path, caught.value.line_number) == (tmp_path / "log", 2)
        assert caught.value.text.startswith("not JSON")


class TestSequenceNumbers:
    @given(st.lists(st.integers(1, 30)))
    def test_sequence_numbers_agree_with_a_plain_set(self, seqs):
        seen, plain = SequenceNumbers(), set()
        for seq in seqs:
            assert (seq in seen) == (seq in plain)
            assert seen.add(seq) == (seq not in plain)
            plain.add(seq)
            contiguous = next(n for n in range(32) if n + 1 not in plain)
            assert seen.contiguous == contiguous
            missing = {n for first, last in seen.missing() for n in range(first, last + 1)}
            assert missing == set(range(1, max(plain))) - plain

    @given(st.sets(st.integers(1, 20)), st.integers(1, 25))
    def test_skipping_agrees_with_adding_every_number(self, seqs, to):
        skipped, added = SequenceNumbers(), SequenceNumbers()
        for seq in seqs:
            skipped.add(seq)
            added.add(seq)
        if to > skipped.contiguous:
            skipped.skip_to(to)
        for seq in range(1, to):
            added.add(seq)
        assert (skipped.contiguous, skipped.missing()) == (added.contiguous, added.missing())

    def test_gaps_are_found_for_each_source(self):
        records = [record(1), record(4), record(2, source="collector"), record(1, incarnation="two")]
        assert find_gaps(records) == {("scheduler", "one"): [(2, 3)], ("collector", "one"): [(1, 1)]}
