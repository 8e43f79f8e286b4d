"""The training loop: one step after the other, until the ranks agree on something else to do."""

from common.protocol import ReplicaOrder
from workloads.trainer.elastic import Course, Group
from workloads.trainer.gradient_statistics.flat_gradients import StepSums
from workloads.trainer.job import TrainingJob
from workloads.trainer.ledger import limbs
from workloads.trainer.reports import StepWatch
from workloads.trainer.training_state import TrainingState


def step_alone(state: TrainingState, total: int, passes: int = 1) -> None:
    """One step of at most `total` examples, without a group, pacing or ledger."""
    batch = state.sampler.take(total, passes=passes)
    loss = state.compute(batch)
    state.gradients.pack(1.0, StepSums(loss=loss, used=batch.total))
    state.advance(batch, state.gradients.unpack())


def rehearse(state: TrainingState) -> None:
    """One step alone, and all of it undone: the first step of a process takes several times as long as the
    others, which a group that a newcomer joins would have to wait for."""
    before = state.to_bytes()
    step_alone(state, min(state.spec.min_batch_size, state.spec.max_atomic_batch))
    state.load_bytes(before)


def train(job: TrainingJob, group: Group, order: ReplicaOrder, course: Course) -> ReplicaOrder | None:
    """Train by `order` until every rank is ready for a newer one, which is returned; None when the target
    is met. All ranks return after the same step. Raises GroupBroken, and then the state is that of the last
    completed step; JobError when the job has failed."""
    state, gradients = job.state, job.state.gradients
    passes, total = order.config.accumulation + 1, order.config.total_batch(group.size)
    watch = StepWatch(job.pacer.speed)

    def between_passes() -> None:
        watch.end_pass()
        job.pacer.pause()
        watch.start_pass()

    while True:
        if state.progress >= state.next_evaluation and job.evaluate(group):
            return None
        watch.start()
        ahead = course.offer(order)
        batch = state.sampler.take(total, group.rank, group.size, passes)

        loss_share = state.compute(batch, between_passes)
        watch.end_pass()
        mark = limbs(state.fingerprints.mark(batch.passes))
        sums = StepSums(ahead, ahead**2, loss_share, 0.0, batch.local, *mark)
        gradients.pack(batch.local / batch.total, sums)
        job.pacer.pause()
        watch.start_sync()
        group.all_reduce(gradients.flat)
        job.pacer.pause()
        watch.end_sync()
        sums = gradients.unpack()

        gain = state.advance(batch, sums)
        job.pacer.pause()
        watch.end()
        job.after_step(group, watch, sums.loss, gain)
        agreed = course.agreed(group.size, sums.ahead, sums.ahead_sqr)
        if agreed is not None:
            return agreed
