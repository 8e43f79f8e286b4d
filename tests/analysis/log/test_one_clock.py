from collections.abc import Iterable

import polars as pl
import pytest
from msgspec.structs import replace

from analysis.log.frames import from_records
from common.protocol import EventRecord
from tests.fixtures.logs import good_run, scheduler_happenings, written


def in_order(records: Iterable[EventRecord]) -> pl.DataFrame:
    """Each event once, in the order of time."""
    return from_records(records).events.filter(~pl.col("repeated")).sort("position")


def test_times_of_all_sources_are_put_on_the_schedulers_clock() -> None:
    happenings = good_run()
    times_s = in_order(written(happenings))["time_s"].to_list()
    assert times_s == pytest.approx([happening.t_s for happening in happenings])
    assert times_s == sorted(times_s)


def test_a_restarted_scheduler_on_another_clock_goes_on_in_the_same_time() -> None:
    records = written(scheduler_happenings())
    restarted = [
        replace(record, incarnation="i2", seq=seq, t_s=record.t_s - 90)
        for seq, record in enumerate(records[10:], start=1)
    ]
    events = in_order([*records[:10], *restarted])
    assert events["time_s"].to_list() == pytest.approx([record.t_s for record in records])


def test_late_lines_of_a_source_fall_into_their_place() -> None:
    records = written(good_run())
    late = in_order([*records[:3], *records[4:], records[3]])
    columns = ("source", "seq", "time_s", "type")
    assert late.select(columns).rows() == in_order(records).select(columns).rows()


def test_a_repeated_event_keeps_its_first_line() -> None:
    records = written(good_run())
    frames = from_records([*records, records[5]])
    assert frames.events.filter("repeated")["line"].to_list() == [len(records) + 1]
    assert frames.events["position"].null_count() == 1
    assert len(frames.nodes) + len(frames.states) == len(from_records(records).nodes) + len(
        from_records(records).states
    )


def test_the_order_of_a_source_is_kept_when_its_clock_goes_back() -> None:
    records = written(scheduler_happenings())
    records[5] = replace(records[5], t_s=records[5].t_s - 50)
    assert in_order(records)["seq"].to_list() == [record.seq for record in records]
