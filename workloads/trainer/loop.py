"""The training loop: one step after the other, until the ranks agree on something else to do."""

from common.protocol import ReplicaOrder
from workloads.trainer.elastic import Course, Group
from workloads.trainer.gradients import StepSums
from workloads.trainer.job import Job
from workloads.trainer.ledger import limbs
from workloads.trainer.reports import StepWatch


def rehearse(job: Job) -> None:
    """One step alone, and all of it undone: the first step of a process takes several times as long as the
    others, which a group that a newcomer joins would have to wait for."""
    state, task, gradients = job.state, job.task, job.state.gradients
    before = state.to_bytes()
    batch = state.sampler.take(min(job.spec.min_batch_size, job.spec.max_atomic_batch))
    (indices,) = batch.passes
    gradients.start()
    state.seed_pass(indices)
    loss = task.loss(task.model, indices)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients.end_pass(1.0, alone=True, last=True)
    gradients.pack(1.0, StepSums(loss=loss.item(), used=batch.total))
    state.advance(batch, gradients.unpack())
    state.load_bytes(before)


def train(job: Job, group: Group, order: ReplicaOrder, course: Course) -> ReplicaOrder | None:
    """Train by `order` until every rank is ready for a newer one, which is returned; None when the target
    is met. All ranks return after the same step. Raises GroupBroken, and then the state is that of the last
    completed step; JobError when the job has failed."""
    state, task, gradients = job.state, job.task, job.state.gradients
    passes, total = order.config.accumulation + 1, order.config.total_batch(group.size)
    watch = StepWatch()
    while True:
        if state.progress >= state.next_evaluation and job.evaluate(group):
            return None
        watch.start()
        ahead = course.offer(order)
        batch = state.sampler.take(total, group.rank, group.size, passes)

        gradients.start()
        loss_share = 0.0
        for number, indices in enumerate(batch.passes, start=1):
            weight, last = len(indices) / batch.total, number == len(batch.passes)
            state.seed_pass(indices)
            loss = task.loss(task.model, indices) * weight
            loss.backward()  # type: ignore[no-untyped-call]
            gradients.end_pass(weight, alone=batch.groups == 1, last=last)
            loss_share += loss.item()
            if not last:
                job.pacer.pause()
                watch.end_accumulation()

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
