"""Which agent reports that a preempted job has left no newer state behind, and when."""

from common.protocol import JobOrder, ReplicaLost
from common.types import Allocation, Placement
from services.job_agent.unsaved_jobs import UnsavedJobs
from tests.fixtures.job_orders import job_order, orders

SAVE_S = 10.0
A: Allocation = (Placement(node="a", replicas=1),)
B: Allocation = (Placement(node="b", replicas=1),)


def moved(generation: int, allocation: Allocation) -> JobOrder:
    return job_order("j", generation, allocation)


def preempted(generation: int, leaving: Allocation) -> JobOrder:
    return job_order("j", generation, (), leaving=leaving)


def answers(unsaved: UnsavedJobs, now_s: float) -> list[ReplicaLost]:
    """The facts of a node without processes, which are then reported."""
    facts = unsaved.answers(lambda _: False, now_s)
    for fact in facts:
        unsaved.note(fact)
    return facts


def test_one_node_reports_a_preempted_job_even_if_another_has_missed_an_order() -> None:
    a, b = UnsavedJobs("a", SAVE_S), UnsavedJobs("b", SAVE_S)
    for unsaved in (a, b):
        unsaved.follow(orders(moved(1, A)), 0.0)
    a.follow(orders(moved(2, B)), 0.0)  # b misses these
    for unsaved in (a, b):
        unsaved.follow(orders(preempted(3, B)), 0.0)
    assert answers(a, SAVE_S + 1.0) == []
    assert [(fact.job_id, fact.generation) for fact in answers(b, SAVE_S + 1.0)] == [("j", 3)]
    assert answers(a, 1000.0) == []
    assert answers(b, 1000.0) == [], "only one report"


def test_a_node_that_rank_0_moved_to_gives_the_previous_node_time_to_save() -> None:
    b = UnsavedJobs("b", SAVE_S)
    b.follow(orders(moved(1, A)), 0.0)
    b.follow(orders(moved(2, B)), 0.0)
    b.follow(orders(preempted(3, B)), 0.0)
    assert answers(b, SAVE_S - 1.0) == []
    assert len(answers(b, SAVE_S)) == 1


def test_a_second_preemption_is_reported_even_if_the_orders_between_were_missed() -> None:
    a = UnsavedJobs("a", SAVE_S)
    a.follow(orders(moved(1, A)), 0.0)
    for generation in (2, 4):
        a.follow(orders(preempted(generation, A)), 0.0)
        assert [fact.generation for fact in answers(a, 0.0)] == [generation]


def test_a_job_with_a_living_process_is_not_reported() -> None:
    a = UnsavedJobs("a", SAVE_S)
    a.follow(orders(preempted(1, A)), 0.0)
    assert a.answers(lambda _: True, 1000.0) == []
