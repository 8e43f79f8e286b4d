"""The transition table of a job's life cycle."""

from common.job_states import TRANSITIONS, Trigger, allowed
from common.types import JobState


def reachable(start: JobState) -> set[JobState]:
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for (old, _), new in TRANSITIONS.items():
            if old is state and new not in seen:
                seen.add(new)
                todo.append(new)
    return seen


def test_every_state_is_reachable_from_pending() -> None:
    assert reachable(JobState.PENDING) == set(JobState)


def test_every_active_state_can_reach_each_end() -> None:
    for state in JobState:
        if not state.terminal:
            assert {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED} <= reachable(state)


def test_nothing_leaves_an_end() -> None:
    assert not [state for state, _ in TRANSITIONS if state.terminal]


def test_every_active_job_can_be_cancelled() -> None:
    assert all(allowed(state, Trigger.CANCELLED) for state in JobState if not state.terminal)


def test_only_a_confirmed_claim_completes_a_job() -> None:
    ways = [key for key, new in TRANSITIONS.items() if new is JobState.COMPLETED]
    assert ways == [(JobState.VERIFYING, Trigger.CONFIRMED)]
