"""The training loop: one step after another, until the ranks agree to follow a newer order."""

from common.protocol import ReplicaOrder
from workloads.trainer.gradient_statistics.flat_gradients import StepSums
from workloads.trainer.process_group import Group
from workloads.trainer.sample_ledger import limbs
from workloads.trainer.step_timer import StepTimer
from workloads.trainer.switch_agreement import SwitchAgreement
from workloads.trainer.training_job import TrainingJob
from workloads.trainer.training_state import TrainingState


def train(
    job: TrainingJob, group: Group, order: ReplicaOrder, agreement: SwitchAgreement
) -> ReplicaOrder | None:
    """Train by `order` until every rank is ready for a newer one and return that one, or None when the target
    is met. All ranks return after the same step.

    Raises GroupBroken, with the state as it was after the last completed step, and JobError when the job
    itself has failed.
    """
    state, gradients, pause = job.state, job.state.gradients, job.pacer.pause
    passes, total_batch = order.config.accumulation + 1, order.config.total_batch(group.size)
    timer = StepTimer(job.pacer.speed)

    def between_passes() -> None:
        timer.end_pass()
        pause()
        timer.start_pass()

    while True:
        if state.progress >= state.next_evaluation and job.evaluate(group):
            return None
        timer.start()
        generations_ahead = agreement.offer(order)

        # This rank's gradient: the weighted mean over its share of the batch.
        batch = state.sampler.take(total_batch, group.rank, group.size, passes)
        loss_share = state.compute(batch, between_passes)
        timer.end_pass()

        # Sum gradients, loss, sample marks and the agreement over all ranks in one all-reduce.
        mark = limbs(state.fingerprints.mark(batch.passes))
        sums = StepSums(generations_ahead, generations_ahead**2, loss_share, 0.0, batch.local, *mark)
        gradients.pack(batch.local / batch.total, sums)
        pause()
        timer.start_sync()
        group.all_reduce(gradients.flat)
        pause()
        timer.end_sync()
        sums = gradients.unpack()

        # Every rank makes the same update.
        gain = state.advance(batch, sums)
        pause()
        timer.end()
        job.after_step(group, timer, sums.loss, gain)
        newer = agreement.agreed(group.size, sums.ahead, sums.ahead_sqr)
        if newer is not None:
            return newer


def step_alone(state: TrainingState, total_batch: int, passes: int = 1) -> None:
    """One step of at most `total_batch` examples, without a group, pacing or ledger."""
    batch = state.sampler.take(total_batch, passes=passes)
    loss = state.compute(batch)
    state.gradients.pack(1.0, StepSums(loss=loss, used=batch.total))
    state.advance(batch, state.gradients.unpack())


def rehearse(state: TrainingState) -> None:
    """Make one step alone and undo it. The first step of a process takes several times as long as later ones,
    and a group that a newcomer joins would have to wait for it."""
    before = state.to_bytes()
    step_alone(state, min(state.spec.min_batch_size, state.spec.max_atomic_batch))
    state.load_bytes(before)
