"""optimus: marginal gain with an oracle."""

import msgspec

from services.scheduler.policies.interface import JobView
from services.scheduler.policies.optimus import OptimusPolicy, divide
from tests.fixtures.policy_views import counts, job, nodes, view


class TableOracle:
    """An oracle with given step times per number of replicas; the last one holds for all larger numbers."""

    def __init__(self, times_s: dict[str, tuple[float, ...]], steps: dict[str, float]) -> None:
        self.times_s = times_s
        self.steps = steps

    def step_time_s(self, job_id: str, replicas: int) -> float:
        times_s = self.times_s[job_id]
        return times_s[min(replicas, len(times_s)) - 1]

    def remaining_steps(self, job_id: str) -> float:
        return self.steps[job_id]


def jobs(*names: str) -> tuple[JobView, ...]:
    return tuple(job(name) for name in names)


def test_each_slot_goes_where_it_saves_most_time() -> None:
    oracle = TableOracle({"a": (4.0, 2.0, 1.5, 1.4), "b": (4.0, 3.0, 2.9)}, {"a": 10.0, "b": 10.0})
    assert divide(jobs("a", "b"), 3, oracle) == [2, 1]
    assert divide(jobs("a", "b"), 4, oracle) == [2, 2]
    assert divide(jobs("a", "b"), 5, oracle) == [3, 2]


def test_remaining_steps_weigh_the_gain_and_the_first_job_wins_ties() -> None:
    times_s = {"a": (4.0, 3.0), "b": (4.0, 3.0)}
    assert divide(jobs("a", "b"), 3, TableOracle(times_s, {"a": 10.0, "b": 10.0})) == [2, 1]
    assert divide(jobs("a", "b"), 3, TableOracle(times_s, {"a": 10.0, "b": 11.0})) == [1, 2]


def test_slots_that_help_no_job_stay_free() -> None:
    oracle = TableOracle({"a": (2.0, 2.5, 1.0)}, {"a": 10.0})
    assert divide(jobs("a"), 8, oracle) == [1]


def test_the_first_jobs_get_one_slot_each_when_there_are_too_few() -> None:
    names = ("a", "b", "c")
    oracle = TableOracle(dict.fromkeys(names, (2.0, 1.0)), dict.fromkeys(names, 5.0))
    given = msgspec.structs.replace(view(*jobs(*names), on=nodes(1, 1)), oracle=oracle)
    decision = OptimusPolicy().decide(given, None, seed=0)
    assert counts(decision) == {"a": 1, "b": 1, "c": 0}
    assert decision.reasons["b"] == "1 replica on node-2, batch 64: 10 s of training left with these replicas"
    assert decision.reasons["c"] == "waits: the 2 slots go to the jobs before it, one each"
