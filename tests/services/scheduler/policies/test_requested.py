"""What policies share that give jobs the replicas or the batch size they requested."""

from common.types import JobConfig
from services.scheduler.policies.requested import admit_in_order, train_requested_batches, usable_replicas
from tests.fixtures.policy_views import at, job, spec, view


def test_jobs_are_admitted_in_order_and_later_ones_may_overtake_one_that_does_not_fit() -> None:
    jobs = [job("a", replicas=4), job("b", replicas=3), job("c", replicas=2), job("d", replicas=9)]
    counts, waits = admit_in_order(jobs, [1, 0, 2, 3], slots=6)
    assert counts == [0, 3, 2, 0]
    assert waits == [
        "requests 4 replicas, but the jobs before it leave 3 slots",
        "",
        "",
        "requests 9 replicas, but the cluster has 6 slots",
    ]


def test_a_job_with_slots_trains_its_requested_batch_and_its_reason_starts_with_the_allocation() -> None:
    given = view(job("a", batch_size=64), job("b"))
    decision = train_requested_batches(given, [at((1, 2)), ()], ["because", "waits"], memory="kept")
    assert decision.allocations == {"a": at((1, 2)), "b": ()}
    assert decision.configs == {"a": JobConfig(atomic_batch=32)}
    assert decision.reasons == {"a": "2 replicas on node-1, batch 64: because", "b": "waits"}
    assert decision.memory == "kept"


def test_usable_replicas_are_limited_by_the_job_and_by_its_smallest_atomic_batch() -> None:
    assert usable_replicas(spec(batch_size=64, min_atomic_batch=4, max_replicas=8)) == 8
    assert usable_replicas(spec(batch_size=16, min_atomic_batch=8, max_replicas=8)) == 2
    assert usable_replicas(spec(batch_size=16, min_atomic_batch=32)) == 1
