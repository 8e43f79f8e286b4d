"""tiresias: two queues by attained service."""

import msgpack

from services.scheduler.policies.interface import ClusterView, Decision
from services.scheduler.policies.tiresias import TiresiasPolicy
from tests.fixtures.policy_views import at, counts, job, nodes, view


class TiresiasRun:
    """A policy and its memory, which goes through msgpack as it does in a run."""

    def __init__(self, threshold_slot_s: float = 100.0) -> None:
        self.policy = TiresiasPolicy(threshold_slot_s)
        self.memory: object = None

    def decide(self, given: ClusterView) -> Decision:
        decision = self.policy.decide(given, self.memory, seed=0)
        self.memory = msgpack.unpackb(msgpack.packb(decision.memory))
        return decision


def test_jobs_that_used_little_go_first_whatever_their_order_of_submission() -> None:
    old = job("old", at((1, 4)), replicas=4, attained_slot_s=100.0)
    new = job("new", replicas=6, attained_slot_s=99.0)
    decision = TiresiasRun().decide(view(old, new))
    assert counts(decision) == {"old": 0, "new": 6}
    assert decision.reasons["new"] == (
        "6 replicas on node-1 (4) and node-2 (2), batch 66: first queue, used 99 of 100 slot-seconds"
    )
    assert decision.reasons["old"] == (
        "waits: second queue, used more than 100 slot-seconds; requests 4 replicas, but the jobs before it "
        "leave 2 slots"
    )


def test_a_job_that_fits_overtakes_one_that_does_not() -> None:
    decision = TiresiasRun().decide(view(job("a", replicas=6), job("b", replicas=4), job("c", replicas=2)))
    assert counts(decision) == {"a": 6, "b": 0, "c": 2}


def test_the_second_queue_keeps_the_order_in_which_jobs_entered_it() -> None:
    tiresias = TiresiasRun()
    tiresias.decide(view(job("a", replicas=8), job("b", replicas=8, attained_slot_s=150.0)))
    decision = tiresias.decide(
        view(job("a", replicas=8, attained_slot_s=120.0), job("b", replicas=8, attained_slot_s=150.0))
    )
    assert counts(decision) == {"a": 0, "b": 8}


def test_a_job_that_is_away_to_save_keeps_its_place_and_an_ended_job_is_forgotten() -> None:
    tiresias = TiresiasRun()
    a, b = (job(name, replicas=8, attained_slot_s=150.0) for name in "ab")
    tiresias.decide(view(a, b))
    assert counts(tiresias.decide(view(b, now_s=101.0))) == {"b": 8}
    assert counts(tiresias.decide(view(a, b, now_s=102.0))) == {"a": 8, "b": 0}
    tiresias.decide(view(b, now_s=10_000.0))
    assert [job_id for job_id, _ in tiresias.memory] == ["b"]  # type: ignore[attr-defined]


def test_a_job_that_requests_more_than_the_cluster_has_is_told_so() -> None:
    decision = TiresiasRun().decide(view(job("a", replicas=8), job("b", replicas=2), on=nodes(4)))
    assert counts(decision) == {"a": 0, "b": 2}
    assert decision.reasons["a"].endswith("requests 8 replicas, but the cluster has 4 slots")


def test_a_job_that_lost_a_node_or_a_slot_gets_a_new_placement() -> None:
    lost, squeezed = job("a", at((3, 2)), replicas=2), job("b", at((1, 4)), replicas=4)
    decision = TiresiasRun().decide(view(lost, squeezed, on=nodes(3, 4)))
    assert decision.allocations == {"a": at((2, 2)), "b": at((1, 3), (2, 1))}
