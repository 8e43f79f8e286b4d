"""Put the events of all sources on one clock and in one order. Pure."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

SCHEDULER = "scheduler"


@dataclass(frozen=True)
class Order:
    """Of every event, in the order of the file; all arrays have shape [events].

    `stream` numbers (source, incarnation) in the order in which they appear. `time_s` is on the scheduler's
    clock. `position` counts the events from 0 in the order of time, without the repeated ones, which have -1.
    `repeated`: an earlier line has the same source, incarnation and seq.
    """

    stream: npt.NDArray[np.int64]
    time_s: npt.NDArray[np.float64]
    position: npt.NDArray[np.int64]
    repeated: npt.NDArray[np.bool_]


def order_events(events: pl.DataFrame) -> Order:
    """Align clocks, drop repetitions, and merge the streams by time.

    A stream is one (source, incarnation). The log is in order of arrival, and a repaired event arrives late;
    `seq` gives the order within a stream, whatever its clock did. Times are put on the clock of the
    scheduler's first incarnation by the median difference between wall clock and monotonic clock, so that
    agents on other machines fit in; the times of that incarnation stay as they are.
    """
    if events.is_empty():
        return Order(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.bool_))
    keys = events.select("source", "incarnation")
    streams = keys.unique(maintain_order=True).with_row_index("stream")
    names = streams.drop("stream").rows()
    numbered = keys.join(streams, on=["source", "incarnation"], how="left", maintain_order="left")
    stream = numbered["stream"].cast(pl.Int64).to_numpy()
    seq, t_s = events["seq"].to_numpy(), events["t_s"].to_numpy()

    reference = next((number for number, name in enumerate(names) if name[0] == SCHEDULER), 0)
    wall_ahead_s = events["wall_s"].to_numpy() - t_s
    offsets_s = np.array([np.median(part) for part in _split(wall_ahead_s, stream, len(names))])
    shifts_s = np.where(np.arange(len(names)) == reference, 0.0, offsets_s - offsets_s[reference])
    time_s = t_s + shifts_s[stream]

    in_stream = np.lexsort((seq, stream))  # stable: the first line of a seq comes first
    same = (np.diff(stream[in_stream]) == 0) & (np.diff(seq[in_stream]) == 0)
    repeated = np.zeros(len(seq), np.bool_)
    repeated[in_stream[1:][same]] = True

    kept = in_stream[~repeated[in_stream]]
    latest_s = np.concatenate(
        [np.fmax.accumulate(part) for part in _split(time_s[kept], stream[kept], len(names))]
    )
    # At equal times the scheduler comes first: what it orders is done afterwards.
    by_rank = sorted(range(len(names)), key=lambda number: (names[number][0] != SCHEDULER, names[number]))
    rank = np.empty(len(names), np.int64)
    rank[by_rank] = np.arange(len(names))
    merged = kept[np.lexsort((seq[kept], rank[stream[kept]], latest_s))]
    position = np.full(len(seq), -1)
    position[merged] = np.arange(len(merged))
    return Order(stream, time_s, position, repeated)


def _split(
    values: npt.NDArray[np.float64], stream: npt.NDArray[np.int64], streams: int
) -> list[npt.NDArray[np.float64]]:
    """The values of each stream, in their present order."""
    grouped = values[np.argsort(stream, kind="stable")]
    return np.split(grouped, np.cumsum(np.bincount(stream, minlength=streams))[:-1])
