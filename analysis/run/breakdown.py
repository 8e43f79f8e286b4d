"""The parts of a job's completion time, to see in which part two runs of one job differ. Pure."""

from collections.abc import Sequence

import polars as pl
from msgspec import structs

from analysis.log.history import JobHistory, integral
from common.types import Struct


class Breakdown(Struct, frozen=True):
    """Seconds of a completed job; the sum is its completion time."""

    queue_s: float
    """From its submission to the first decision that gave it slots."""
    wait_s: float
    """Each time it gets slots after it had none: until the start of the replicas that make its next step. It
    mostly waits for other jobs to leave these slots; the time that orders travel is included."""
    start_s: float
    """From the start of its first replicas to their first step."""
    training_s: float
    """The rest: steps and evaluations. After a failure it includes the time until the replicas were
    restarted, since no event says when the former ones made their last step."""
    rescale_s: float
    """Without a training step, at later changes of its replicas."""
    preempted_s: float
    """Without slots after it had some."""
    verification_s: float


PARTS: tuple[str, ...] = tuple(field.name for field in structs.fields(Breakdown))


def breakdown(job: JobHistory) -> Breakdown | None:
    """None for a job that did not complete, or whose log does not say when it had slots."""
    jct_s = job.jct_s
    if jct_s is None or job.ended_s is None or not job.slots:
        return None
    first_s = job.slots[0][0]
    trained_s = job.ended_s if job.verifying_s is None else job.verifying_s
    lost_s = job.generations["seconds_lost"].to_list()
    held_s = integral([(t_s, int(slots > 0)) for t_s, slots in job.slots], first_s, trained_s)
    queue_s = first_s - job.submitted_s
    start_s, rescale_s = sum(lost_s[:1]), sum(lost_s[1:])
    preempted_s = max(trained_s - first_s - held_s, 0.0)
    wait_s = _waiting_s(job, trained_s)
    verification_s = job.ended_s - trained_s
    return Breakdown(
        queue_s=queue_s,
        wait_s=wait_s,
        start_s=start_s,
        training_s=jct_s - queue_s - wait_s - start_s - rescale_s - preempted_s - verification_s,
        rescale_s=rescale_s,
        preempted_s=preempted_s,
        verification_s=verification_s,
    )


def _waiting_s(job: JobHistory, trained_s: float) -> float:
    """Seconds with slots, but without replicas in them: `seconds_lost` of a group without survivors begins
    with the start of its replicas."""
    first_steps = job.generations.select(
        "time_s", started_s=pl.col("time_s") - pl.col("seconds_lost") - pl.col("first_step_s")
    ).rows()
    changes = [(t_s, slots) for t_s, slots in job.slots if t_s < trained_s]
    waiting_s = 0.0
    since_s: float | None = None
    for t_s, slots in [*changes, (trained_s, 0)]:
        if slots and since_s is None:
            since_s = t_s
        elif not slots and since_s is not None:
            starts_s = (started_s for step_s, started_s in first_steps if since_s <= step_s <= t_s)
            waiting_s += max(next(starts_s, t_s) - since_s, 0.0)
            since_s = None
    return waiting_s


def mean_breakdown(parts: Sequence[Breakdown]) -> Breakdown:
    """The mean of each part, over at least one job."""
    return Breakdown(*(sum(getattr(one, name) for one in parts) / len(parts) for name in PARTS))
