"""The life cycle of a job, as one table: (state, trigger) -> state. What is not here cannot happen."""

import enum

from common.types import JobState


class Trigger(enum.StrEnum):
    ALLOCATED = "allocated"
    """A decision gave it slots, or other ones, or another batch."""
    STEPPED = "stepped"
    """The first step of its newest generation is done."""
    PREEMPTED = "preempted"
    """A decision took all its slots."""
    SAVED = "saved"
    """Its replicas have saved and left."""
    LOST = "lost"
    """A replica or node died; it keeps slots."""
    STRANDED = "stranded"
    """A replica or node died; no slots are left to it."""
    REACHED = "reached"
    """It reports its target reached; late, where its node was out of reach for a while."""
    CONFIRMED = "confirmed"
    """The verifier agrees."""
    FAULTED = "faulted"
    """It raised, diverged, exited, spent its budget, was refuted, or died too often."""
    CANCELLED = "cancelled"


S, T = JobState, Trigger

TRANSITIONS: dict[tuple[JobState, Trigger], JobState] = {
    (S.PENDING, T.ALLOCATED): S.STARTING,
    (S.PENDING, T.REACHED): S.VERIFYING,
    (S.PENDING, T.FAULTED): S.FAILED,
    (S.PENDING, T.CANCELLED): S.CANCELLED,
    (S.STARTING, T.ALLOCATED): S.STARTING,
    (S.STARTING, T.STEPPED): S.RUNNING,
    (S.STARTING, T.PREEMPTED): S.PREEMPTING,
    (S.STARTING, T.LOST): S.STARTING,
    (S.STARTING, T.STRANDED): S.PENDING,
    (S.STARTING, T.REACHED): S.VERIFYING,
    (S.STARTING, T.FAULTED): S.FAILED,
    (S.STARTING, T.CANCELLED): S.CANCELLED,
    (S.RUNNING, T.ALLOCATED): S.RUNNING,
    (S.RUNNING, T.STEPPED): S.RUNNING,
    (S.RUNNING, T.PREEMPTED): S.PREEMPTING,
    (S.RUNNING, T.LOST): S.STARTING,
    (S.RUNNING, T.STRANDED): S.PENDING,
    (S.RUNNING, T.REACHED): S.VERIFYING,
    (S.RUNNING, T.FAULTED): S.FAILED,
    (S.RUNNING, T.CANCELLED): S.CANCELLED,
    (S.PREEMPTING, T.SAVED): S.PENDING,
    (S.PREEMPTING, T.STRANDED): S.PENDING,
    (S.PREEMPTING, T.REACHED): S.VERIFYING,
    (S.PREEMPTING, T.FAULTED): S.FAILED,
    (S.PREEMPTING, T.CANCELLED): S.CANCELLED,
    (S.VERIFYING, T.LOST): S.VERIFYING,
    (S.VERIFYING, T.CONFIRMED): S.COMPLETED,
    (S.VERIFYING, T.FAULTED): S.FAILED,
    (S.VERIFYING, T.CANCELLED): S.CANCELLED,
}

HOLDS_SLOTS = frozenset({S.STARTING, S.RUNNING, S.VERIFYING})
"""States in which a job's allocation counts against its nodes. A preempting job's replicas still sit in
their slots, but the slots are no longer the job's: an agent starts nothing before they are empty."""


def allowed(state: JobState, trigger: Trigger) -> bool:
    return (state, trigger) in TRANSITIONS


def after(state: JobState, trigger: Trigger) -> JobState:
    """The next state. Raises KeyError for a transition that the table does not have."""
    return TRANSITIONS[state, trigger]
