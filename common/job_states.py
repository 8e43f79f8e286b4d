"""The life cycle of a job as one table: (state, trigger) -> next state. No other transition is possible."""

import enum

from common.types import JobState


class Trigger(enum.StrEnum):
    """What moves a job from one state to the next."""

    ALLOCATED = "allocated"
    """A decision gave the job slots, other slots, or another batch."""
    STEPPED = "stepped"
    """The job completed the first step of its newest generation."""
    PREEMPTED = "preempted"
    """A decision took all slots of the job."""
    SAVED = "saved"
    """The replicas of the job have saved its state and left."""
    LOST = "lost"
    """A replica or node died, and the job still has slots."""
    STRANDED = "stranded"
    """A replica or node died, and the job has no slots left."""
    REACHED = "reached"
    """The job reports that its target is reached. The report may be late if its node was cut off."""
    CONFIRMED = "confirmed"
    """The verifier confirmed the target."""
    FAULTED = "faulted"
    """The job raised, diverged, exited, spent its budget, was refuted by the verifier, or died too often."""
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
"""States in which the allocation of a job counts against its nodes. The replicas of a preempting job still
run in their slots, but the slots no longer belong to it; agents start nothing in them until they are
empty."""


def allowed(state: JobState, trigger: Trigger) -> bool:
    """Whether the table has this transition."""
    return (state, trigger) in TRANSITIONS


def after(state: JobState, trigger: Trigger) -> JobState:
    """The next state. Raises KeyError if the table does not have the transition."""
    return TRANSITIONS[state, trigger]
