import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from analysis.log import frames as frames_module
from analysis.log.frames import MAX_FAULTS, Frames, from_records, read
from analysis.log.schemas import ADDED_TO_EVENTS, EVENTS, PARTS, PLACE, TABLES
from common.eventlog import encode_line
from common.protocol import EventRecord, JobSubmitted, TrainingSample
from tests.fixtures.logs import RUN_ID, STATISTICS, add, decided, good_run, only, save, spec, written

GOOD_LINES = [encode_line(record) for record in written(good_run())]
SAMPLE_LINE = next(number for number, line in enumerate(GOOD_LINES, start=1) if b"TrainingSample" in line)


def frames_of(lines: list[bytes], folder: Path) -> Frames:
    (folder / "events.jsonl").write_bytes(b"".join(lines))
    return read(folder)


def changed(line: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    tree = json.loads(line)
    change(tree)
    return json.dumps(tree).encode() + b"\n"


def assert_same(found: Frames, expected: Frames) -> None:
    for name, frame in found.by_name().items():
        assert_frame_equal(frame, expected.by_name()[name])


def test_every_event_is_a_row_of_events_and_of_the_frame_of_its_type(tmp_path: Path) -> None:
    records = written(good_run())
    frames = read(save(records, tmp_path / RUN_ID))
    assert frames.faults == ()
    assert frames.run_id == RUN_ID
    assert frames.events["line"].to_list() == list(range(1, len(records) + 1))
    by_name = frames.by_name()
    rows = [row for name in TABLES for row in by_name[name]["row"].to_list()]
    assert sorted(rows) == list(range(len(records)))


def test_a_sample_has_the_values_of_its_event() -> None:
    frames = from_records(written(good_run()))
    row = frames.samples.row(0, named=True)
    event = only(good_run(), TrainingSample, "a")
    assert isinstance(event, TrainingSample)
    plain = {name for name in event.__struct_fields__ if name not in ("config", "statistics")}
    assert {name: row[name] for name in plain} == {name: getattr(event, name) for name in plain}
    assert (row["atomic_batch"], row["accumulation"]) == (16, 0)
    assert (row["sqr"], row["var"], row["trusted"]) == (STATISTICS.sqr, STATISTICS.var, True)
    assert row["time_s"] == 115.0


def test_columns_are_those_that_are_declared() -> None:
    for records in ([], written(good_run())):
        by_name = from_records(records).by_name()
        assert list(by_name["events"].columns) == [*EVENTS, *ADDED_TO_EVENTS]
        for name, table in (TABLES | PARTS).items():
            kind = {"type": pl.String()} if len(table.types) > 1 else {}
            expected = {key: column.dtype for key, column in PLACE.items()} | kind | table.schema
            assert dict(by_name[name].schema) == expected, name


def test_a_job_is_one_row_with_its_specification_and_its_end() -> None:
    frames = from_records(written(add(good_run(), "scheduler", 125.0, JobSubmitted(spec=spec("b")))))
    assert frames.jobs.select("job_id", "min_batch_size", "submitted_s", "end", "jct_s").rows() == [
        ("a", 16, 110.0, "completed", 14.0),
        ("b", 16, 112.0, "cancelled", None),
    ]
    assert len(frames.submissions) == 3


def test_a_round_has_a_decision_for_each_job_and_an_allocation_for_each_node() -> None:
    frames = from_records(written(add(good_run(), "scheduler", 125.0, decided(9, {"b": ()}))))
    columns = ("time_s", "job_id", "replicas", "nodes", "atomic_batch", "reason")
    assert frames.decisions.select(columns).rows() == [
        (112.0, "a", 1, 1, 16, "its turn"),
        (116.0, "a", 2, 2, 16, "its turn"),
        (116.0, "b", 1, 1, 16, "its turn"),
        (122.0, "b", 1, 1, 16, "its turn"),
        (125.0, "b", 0, 0, 16, "its turn"),
    ]
    assert frames.allocations.select("job_id", "node", "replicas").rows() == [
        ("a", "n0", 1),
        ("a", "n0", 1),
        ("a", "n1", 1),
        ("b", "n0", 1),
        ("b", "n0", 1),
    ]


def test_many_small_batches_give_the_same_frames_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = frames_of(GOOD_LINES, tmp_path)
    monkeypatch.setattr(frames_module, "BATCH_BYTES", 1)
    assert_same(frames_of(GOOD_LINES, tmp_path), whole)


# --------------------------------------------------------------------------- the cleaning pass

BAD_LINES: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{oops\n", "not JSON"),
    "no text": (b"\x00\xff\xfe\n", "not JSON"),
    "blank": (b"\n", "not JSON"),
    "two events on one line": (GOOD_LINES[3][:-1] + GOOD_LINES[4], "not JSON"),
    "half an event": (GOOD_LINES[3][:40] + b"\n", "not JSON"),
    "of another program": (b'{"level": "info", "message": "hello"}\n', "not an event of coadapt"),
    "no object": (b"[1, 2]\n", "not an event of coadapt"),
    "a bare NaN": (GOOD_LINES[3].replace(b'"t_s":110.0', b'"t_s":NaN'), "not JSON"),
    "a later schema": (
        changed(GOOD_LINES[3], lambda tree: tree.update(schema=99)),
        "written with schema 99; this version reads 1 and 2",
    ),
    "a later key": (
        changed(GOOD_LINES[3], lambda tree: tree["event"].update(colour="red")),
        "not a valid event: Object contains unknown field `colour` - at `$.event`",
    ),
    "a later event": (
        changed(GOOD_LINES[3], lambda tree: tree["event"].update(type="JobPraised")),
        "not a valid event: Invalid value 'JobPraised'",
    ),
    "a fraction for an integer": (
        changed(GOOD_LINES[3], lambda tree: tree.update(seq=3.5)),
        "not a valid event: Expected `int`, got `float` - at `$.seq`",
    ),
    "an integer above 64 bits": (
        changed(GOOD_LINES[3], lambda tree: tree.update(seq=10**30)),
        "not a valid event: an integer that 64 bits do not hold",
    ),
    "a missing key": (
        changed(GOOD_LINES[3], lambda tree: tree.pop("t_s")),
        "not a valid event: Object missing required field `t_s`",
    ),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_with_its_number_and_the_others_are_kept(tmp_path: Path, kind: str) -> None:
    line, text = BAD_LINES[kind]
    frames = frames_of([*GOOD_LINES[:5], line, *GOOD_LINES[5:]], tmp_path)
    (fault,) = frames.faults
    assert fault.startswith(f"{tmp_path}/events.jsonl:6: {text}")
    assert frames.events["line"].to_list() == [*range(1, 6), *range(7, len(GOOD_LINES) + 2)]
    assert len(frames.samples) == 4


def test_numbers_that_lost_their_type_but_not_their_value_are_read(tmp_path: Path) -> None:
    def reword(tree: dict[str, Any]) -> None:
        tree["seq"], tree["event"]["steps"], tree["event"]["window_s"] = float(tree["seq"]), "20", "2.0"

    lines = [*GOOD_LINES]
    lines[SAMPLE_LINE - 1] = changed(lines[SAMPLE_LINE - 1], reword)
    frames = frames_of(lines, tmp_path)
    assert frames.faults == ()
    assert_same(frames, from_records(written(good_run())))


def test_numbers_that_json_lacks_are_strings(tmp_path: Path) -> None:
    lines = [*GOOD_LINES]
    lines[SAMPLE_LINE - 1] = changed(
        lines[SAMPLE_LINE - 1], lambda tree: tree["event"].update(loss="nan", gain="inf", sync_s="-inf")
    )
    frames = frames_of(lines, tmp_path)
    assert frames.faults == ()
    assert [str(value) for value in frames.samples.select("loss", "gain", "sync_s").row(0)] == [
        "nan",
        "inf",
        "-inf",
    ]


def test_a_log_of_the_former_schema_is_read(tmp_path: Path) -> None:
    """It had `accumulates_alone` in the specification of the job."""

    def older(tree: dict[str, Any]) -> None:
        tree["schema"] = 1
        if "accumulates_alone" in tree["event"]:
            del tree["event"]["accumulates_alone"]
            tree["event"]["spec"]["accumulates_alone"] = True

    frames = frames_of([changed(line, older) for line in GOOD_LINES], tmp_path)
    assert frames.faults == ()
    assert frames.events["schema"].unique().to_list() == [1]
    assert frames.jobs["accumulates_alone"].to_list() == [True, True]


def test_the_last_line_of_a_log_that_is_being_written_is_named(tmp_path: Path) -> None:
    frames = frames_of([*GOOD_LINES[:-1], GOOD_LINES[-1][:20]], tmp_path)
    assert frames.faults == (f"{tmp_path}/events.jsonl:38: cut short: the last line has no end",)
    assert len(frames.events) == 37
    assert frames_of(GOOD_LINES, tmp_path).faults == ()


def test_an_empty_log_and_one_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert frames_of([], tmp_path).faults == (f"{tmp_path}/events.jsonl:1: empty: no event in it",)
    missing = read(tmp_path / "lost" / "events.jsonl")
    assert missing.faults == (f"{tmp_path}/lost/events.jsonl: cannot be read: No such file or directory",)
    assert missing.run_id == "lost"


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    frames = frames_of([b"x\n"] * (MAX_FAULTS + 7) + GOOD_LINES, tmp_path)
    assert len(frames.faults) == MAX_FAULTS + 1
    assert frames.faults[-1] == f"{tmp_path}/events.jsonl: and 7 more bad lines"
    assert len(frames.events) == len(GOOD_LINES)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    corruptions=st.dictionaries(
        st.integers(1, len(GOOD_LINES)), st.sampled_from(sorted(BAD_LINES)), max_size=MAX_FAULTS
    ),
    batch_bytes=st.sampled_from([1, 5000, 1 << 24]),
)
def test_whatever_lines_are_corrupted_all_others_are_kept_and_each_is_named_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    corruptions: dict[int, str],
    batch_bytes: int,
) -> None:
    monkeypatch.setattr(frames_module, "BATCH_BYTES", batch_bytes)
    lines = [
        BAD_LINES[corruptions[number]][0] if number in corruptions else line
        for number, line in enumerate(GOOD_LINES, start=1)
    ]
    frames = frames_of(lines, tmp_path)
    named = [int(fault.removeprefix(f"{tmp_path}/events.jsonl:").split(":")[0]) for fault in frames.faults]
    assert named == sorted(corruptions)
    good: list[EventRecord] = written(good_run())
    kept = [record for number, record in enumerate(good, start=1) if number not in corruptions]
    assert frames.events.select("line", "source", "seq", "t_s").rows() == [
        (number, record.source, record.seq, record.t_s)
        for number, record in enumerate(good, start=1)
        if number not in corruptions
    ]
    expected = from_records(kept, frames.path)
    for name in TABLES | PARTS:
        assert_frame_equal(frames.by_name()[name], expected.by_name()[name])
