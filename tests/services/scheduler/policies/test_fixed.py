"""fixed: first come, first served with what was requested."""

from common.types import JobConfig
from tests.fixtures.policy_views import at, counts, decide, job, view


def test_jobs_get_what_they_requested_packed_on_one_node() -> None:
    decision = decide("fixed", view(job("a", replicas=3, batch_size=48), job("b", replicas=4)))
    assert decision.allocations == {"a": at((1, 3)), "b": at((2, 4))}
    assert decision.configs["a"] == JobConfig(atomic_batch=16)
    assert decision.reasons["a"] == "3 replicas on node-1, batch 48: the requested replicas"


def test_no_job_overtakes_another() -> None:
    running = job("a", at((1, 4), (2, 2)), replicas=6)
    decision = decide(
        "fixed", view(running, job("b", replicas=4), job("c", replicas=1), job("d", replicas=2))
    )
    assert counts(decision) == {"a": 6, "b": 0, "c": 0, "d": 0}
    assert decision.reasons["b"] == "waits: requests 4 replicas, but only 2 slots are free"
    assert decision.reasons["c"] == "waits: 1 job before it in order of submission"
    assert decision.reasons["d"] == "waits: 2 jobs before it in order of submission"


def test_a_job_whose_node_is_gone_gets_a_new_placement() -> None:
    lost = job("a", at((3, 2)), replicas=2)
    kept = job("b", at((1, 4)), replicas=4)
    decision = decide("fixed", view(lost, kept))
    assert decision.allocations == {"a": at((2, 2)), "b": at((1, 4))}
