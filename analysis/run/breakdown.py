"""Of what a job's completion time consists: where two runs of one job differ, this says in what. Pure."""

from collections.abc import Sequence

from msgspec import structs

from analysis.log.history import JobHistory, integral
from common.types import Struct


class Breakdown(Struct, frozen=True):
    """Seconds of a completed job; together its completion time."""

    queue_s: float
    """From its submission to the first decision that gave it slots."""
    wait_s: float
    """Each time it was given slots after it had none: until the start of the replicas that made its next
    step. Most of it is waiting for others to leave these slots; the way of the orders is in it too."""
    start_s: float
    """From the start of its first replicas to their first step."""
    training_s: float
    """All the rest: steps and evaluations; and after a failure what went by before its replicas were started
    anew, since no event tells when the former ones made their last step."""
    rescale_s: float
    """Without a step at later changes of its replicas."""
    preempted_s: float
    """Without slots after it once had some."""
    verification_s: float


PARTS: tuple[str, ...] = tuple(field.name for field in structs.fields(Breakdown))


def breakdown(job: JobHistory) -> Breakdown | None:
    """None where it did not complete, or its log does not say when it had slots."""
    jct_s = job.jct_s
    if jct_s is None or job.ended_s is None or not job.slots:
        return None
    first_s = job.slots[0][0]
    trained_s = job.ended_s if job.verifying_s is None else job.verifying_s
    lost_s = [started.seconds_lost for _, started in job.generations]
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
    """Seconds with slots, but without replicas of its own in them: `seconds_lost` of a group without
    survivors begins with the start of its replicas."""
    changes = [(t_s, slots) for t_s, slots in job.slots if t_s < trained_s]
    waiting_s = 0.0
    since_s: float | None = None
    for t_s, slots in [*changes, (trained_s, 0)]:
        if slots and since_s is None:
            since_s = t_s
        elif not slots and since_s is not None:
            begun_s = (
                told_s - started.seconds_lost - started.first_step_s
                for told_s, started in job.generations
                if since_s <= told_s <= t_s
            )
            waiting_s += max(next(begun_s, t_s) - since_s, 0.0)
            since_s = None
    return waiting_s


def mean_breakdown(parts: Sequence[Breakdown]) -> Breakdown:
    """Of at least one."""
    return Breakdown(*(sum(getattr(one, name) for one in parts) / len(parts) for name in PARTS))
