"""The training loop: one step after the other, until the ranks agree on something else to do."""

from common.protocol import ReplicaOrder
from workloads.trainer.elastic import Course, Group
from workloads.trainer.gradients import StepSums
from workloads.trainer.job import Job
from workloads.trainer.ledger import limbs
from workloads.trainer.reports import StepWatch


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
        state.seed_step(group.rank)

        gradients.start()
        loss_share = 0.0
        for number, indices in enumerate(batch.passes, start=1):
            weight, last = len(indices) / batch.total, number == len(batch.passes)
            loss = task.loss(task.model, indices) * weight
            loss.backward()  # type: ignore[no-untyped-call]
            gradients.end_pass(weight, alone=batch.groups == 1, last=last)
            loss_share += loss.item()
            job.pacer.pause()
            if not last:
                watch.end_accumulation()

        mark = limbs(state.fingerprints.mark(batch.passes))
        sums = StepSums(ahead, ahead**2, loss_share, 0.0, batch.local, *mark)
        gradients.pack(batch.local / batch.total, sums)
        watch.start_sync()
        group.all_reduce(gradients.flat)
        watch.end_sync()
        sums = gradients.unpack()

        gain = state.advance(batch, sums)
        watch.end()
        job.after_step(group, watch, sums.loss, gain)
        agreed = course.agreed(group.size, sums.ahead, sums.ahead_sqr)
        if agreed is not None:
            return agreed
