"""Turns the events of a simulated run into numbered log records. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence

from common.protocol import Event, EventRecord
from services.simulator.worlds.interface import COLLECTOR

SCHEDULER = "scheduler"
INCARNATION = "simulated"
Log = Callable[[Sequence[EventRecord]], object]
"""Takes the records of a run, in order."""


class EventRecorder:
    """Without a `log` no records are made."""

    def __init__(self, run_id: str, log: Log | None) -> None:
        self._run_id, self._log = run_id, log
        self._numbers: Counter[str] = Counter()
        self._records: list[EventRecord] = []

    def add(self, t_s: float, source: str, event: Event) -> None:
        """`source` is SCHEDULER, COLLECTOR or the name of an agent's node."""
        if self._log is None:
            return
        source = source if source in (SCHEDULER, COLLECTOR) else f"agent-{source}"
        self._numbers[source] += 1
        record = EventRecord(
            run_id=self._run_id,
            source=source,
            incarnation=INCARNATION,
            seq=self._numbers[source],
            t_s=t_s,
            wall_s=t_s,
            event=event,
        )
        self._records.append(record)

    def flush(self) -> None:
        if self._log is not None and self._records:
            self._log(self._records)
            self._records = []
