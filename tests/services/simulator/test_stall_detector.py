"""A run that never ends is given up; a slow one is not."""

from collections.abc import Sequence
from typing import Any

from analysis.log.audit import audit
from analysis.log.frames import from_records
from analysis.log.history import history
from common.protocol import JobCompleted, Orders, RunEnded
from common.types import JobSpec
from services.scheduler.policies.interface import ClusterView, Decision
from services.simulator.worlds.interface import WorldEvent
from tests.fixtures.countdown import Countdown
from tests.fixtures.scheduler_driver import make_spec
from tests.fixtures.simulation_runs import TakesTurns, drive, events
from workloads.files.workload_file import Arrival


def test_a_run_whose_jobs_never_end_is_given_up_with_the_reason() -> None:
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


def test_a_run_is_not_given_up_during_a_long_start() -> None:
    class Starting(Countdown):
        def overhead_s(self, spec: JobSpec) -> float:
            return 20.0

    run, records = drive([Arrival(at_s=0.0, spec=make_spec("a"))], Starting({"a": 25.0}), round_s=0.01)
    assert not run.stalled
    assert len(events(records, JobCompleted)) == 1


class AtOnce(Countdown):
    """Saving takes no time, so that each save is followed by a round at the same instant."""

    restart_s = 30.0

    def apply(self, orders: Orders, now_s: float) -> Sequence[WorldEvent]:
        return [WorldEvent(now_s, e.source, e.content) for e in super().apply(orders, now_s)]


def test_a_run_with_endless_rounds_at_one_instant_is_given_up() -> None:
    jobs = [Arrival(at_s=1.0, spec=make_spec(name, replicas=8, batch_size=64)) for name in ("a", "b")]
    run, _ = drive(jobs, AtOnce({"a": 100.0, "b": 100.0}), TakesTurns())
    assert "given up at 60 s, when there were more than 1000 rounds at this instant" in run.stalled
