"""A replica's process: it follows the orders of its agent from group to group until it may leave.

It ends in one of four ways: on an order to leave; when the target is reached (rank 0 sends TargetReached);
with JobRaised and exit code 1 when the job itself is at fault; at once when its agent is gone. A broken group
does not end it: the remaining replicas keep their state, send ReplicaLost and wait for the next generation.
"""

import contextlib
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from common.codec import printable
from common.protocol import (
    GenerationStarted,
    JobRaised,
    JobSaved,
    ReplicaLost,
    ReplicaOrder,
    ReplicaStart,
    TargetReached,
)
from common.types import JobConfig
from workloads.trainer import checkpoint
from workloads.trainer.loop import rehearse, train
from workloads.trainer.mailbox import ALIVE_EVERY_S, AgentGone, Mailbox
from workloads.trainer.pacer import Pacer
from workloads.trainer.process_group import Group, GroupBroken
from workloads.trainer.rendezvous import Rendezvous, Superseded, check_newest
from workloads.trainer.switch_agreement import SwitchAgreement
from workloads.trainer.training_job import TrainingJob
from workloads.trainer.training_state import JobError

LOCK_POLL_S = 0.01


def run_replica(connection: Connection, start: ReplicaStart) -> None:
    """Body of the process. Orders arrive on `connection`; facts and events leave on it. Returns when the
    replica has left as ordered; exits with code 1 otherwise."""
    torch.set_num_threads(1)
    # torch looks up the name of a store's address when it connects. Unless the user has set this, do not
    # wait the usual 5 s for a name server that does not answer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    replica = Replica(start, Mailbox(connection, start.trainer.order_timeout_s))
    try:
        try:
            replica.run()
        except (Exception, SystemExit) as error:
            if isinstance(error, AgentGone):
                raise
            replica.report_exception(error)
            sys.exit(1)
    except AgentGone:
        os._exit(1)


class Replica:
    def __init__(self, start: ReplicaStart, mailbox: Mailbox) -> None:
        self._start, self._mailbox = start, mailbox
        self._pacer = Pacer(start.slot_speed)
        self._config = start.trainer
        # A store may outlive the run, and another run may have a job with the same name.
        run_id = Path(start.job_dir).parents[1].name
        self._agreement = SwitchAgreement(
            mailbox,
            f"{run_id}/{start.spec.id}",
            self._config.collective_timeout_s,
            self._config.newcomers_timeout_s,
        )
        self._job: TrainingJob | None = None
        self._previous_replicas = 0
        """Size of the last group in which this process has trained."""

    @property
    def job(self) -> TrainingJob:
        assert self._job is not None
        return self._job

    def run(self) -> None:
        self._job = TrainingJob(self._start, self._pacer, self._mailbox.send)
        rehearse(self._job.state)
        self._pacer.pause()
        order = self._next_order(None)
        # A new process may wait long for its group. A survivor switches only when all members are ready.
        gather_s = self._config.order_timeout_s
        while order is not None and order.rank >= 0 and order.world_size > 0:
            group: Group | None = None
            try:
                group, order, beginning = self._join(order, gather_s)
                newer = self._train(group, order, beginning)
                if newer is None:
                    return
                if newer.rank < 0 or newer.world_size == 0:
                    self._leave(newer, group)
                    return
                order, gather_s = newer, self._config.collective_timeout_s
            except Superseded:
                order, gather_s = self._mailbox.newest, self._config.order_timeout_s
            except GroupBroken as broken:
                order, gather_s = self._after_break(order, str(broken)), self._config.order_timeout_s
            finally:
                if group is not None:
                    group.leave()
        if order is not None:
            self._leave(order, None)

    # ------------------------------------------------------------------ from group to group

    def _join(
        self, order: ReplicaOrder, gather_s: float
    ) -> tuple[Group, ReplicaOrder, GenerationStarted | None]:
        """Form the group of `order` and give all its ranks the same state.

        Returns the group; the order with the newest generation and batch that any rank knew; and the event to
        send after the first step, on the rank that brought the state.
        """
        rendezvous = self._agreement.rendezvous_for(order)
        rendezvous.announce(has_state=self.job.has_state)
        group = rendezvous.gather(self._mailbox, gather_s, lambda: self._find_state(rendezvous))
        try:
            return group, *self._share_state(group, order)
        except GroupBroken:
            group.leave()
            raise

    def _find_state(self, rendezvous: Rendezvous) -> None:
        """On rank 0 of a new group: if no member has the state, wait until no other replica can still be
        saving it, and load it from disk."""
        job = self.job
        if job.has_state or rendezvous.any_member_has_state():
            return
        end_s = time.monotonic() + self._config.order_timeout_s
        while not job.lock.try_alone():
            self._mailbox.read(LOCK_POLL_S)
            check_newest(self._mailbox, rendezvous.order)
            if time.monotonic() > end_s:
                raise GroupBroken("replicas of a previous group have the job's state and do not leave")
        job.resume()

    def _share_state(
        self, group: Group, order: ReplicaOrder
    ) -> tuple[ReplicaOrder, GenerationStarted | None]:
        """Copy the state of the rank that is furthest (the donor) to all others, and take over the newest
        generation and batch that any rank knows. Collective: every rank of `group` calls it."""
        job, state = self.job, self.job.state
        # One row per rank, filled by a sum: position of its state (-1 for none), generation, batch.
        table = torch.zeros(group.size, 4, dtype=torch.int64)
        position = state.position if job.has_state else -1
        config = order.config
        table[group.rank] = torch.tensor(
            [position, order.generation, config.atomic_batch, config.accumulation]
        )
        group.all_reduce(table)
        furthest, donor = (int(n) for n in table[:, 0].max(dim=0))
        _, generation, atomic_batch, accumulation = table[int(table[:, 1].argmax())].tolist()
        if bool((table[:, 0] != furthest).any()):
            data = (
                torch.frombuffer(bytearray(state.to_bytes()), dtype=torch.uint8)
                if group.rank == donor
                else None
            )
            size = torch.tensor([0 if data is None else len(data)])
            group.broadcast(size, donor)
            data = torch.empty(int(size), dtype=torch.uint8) if data is None else data
            group.broadcast(data, donor)
            if position != furthest:
                state.load_bytes(data.numpy().tobytes())
        end_s = time.monotonic() + self._config.collective_timeout_s
        while not job.lock.try_share():
            self._mailbox.read(LOCK_POLL_S)
            if time.monotonic() > end_s:
                raise GroupBroken("a replica of another group holds the lock on the job's state")
        order = msgspec.structs.replace(
            order,
            generation=generation,
            config=JobConfig(atomic_batch=atomic_batch, accumulation=accumulation),
        )
        state_from, job.state_from = job.state_from, "survivor"
        if group.rank != donor:
            return order, None
        noted = checkpoint.noted_progress(job.folder)
        return order, GenerationStarted(
            job_id=job.spec.id,
            generation=generation,
            old_replicas=self._previous_replicas,
            allocation=order.allocation,
            config=order.config,
            state_from=state_from,
            seconds_lost=0.0,
            progress=state.progress,
            progress_lost=max(noted - state.progress, 0.0),
        )

    def _train(
        self, group: Group, order: ReplicaOrder, beginning: GenerationStarted | None
    ) -> ReplicaOrder | None:
        """Train in this group, through changes of batch size, until the ranks agree on an order for another
        group, which is returned; None when the job is done."""
        job = self.job
        self._previous_replicas = group.size
        while True:
            job.reporter.switch(order, job.state.steps, beginning)
            newer = train(job, group, order, self._agreement)
            job.reporter.flush(job.state)
            if newer is None:
                self._finish(group, order)
                return None
            if newer.group != order.group:
                return newer
            order, beginning = newer, None

    def _after_break(self, order: ReplicaOrder, reason: str) -> ReplicaOrder | None:
        """Keep the state, report the loss unless the agent already knows, and wait for the order of the next
        group."""
        self.job.state.gradients.undo()
        self._mailbox.read()
        newest = self._mailbox.newest
        if newest is None or newest.group == order.group:
            _note(f"group {order.group} is broken: {reason}\n")
            generation = newest.generation if newest else order.generation
            self._mailbox.send(ReplicaLost(job_id=self.job.spec.id, generation=generation, reason=reason))
        return self._next_order(order)

    def _next_order(self, current: ReplicaOrder | None) -> ReplicaOrder | None:
        """Wait for an order for another group than that of `current`; None after `order_timeout_s`."""
        end_s = time.monotonic() + self._config.order_timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            newest = self._mailbox.newest
            if newest is not None and (current is None or newest.group != current.group):
                return newest
            self._mailbox.read(min(left_s, ALIVE_EVERY_S))
        if self.job.has_state:
            self.job.try_save("periodic")
        reason = f"no orders for {self._config.order_timeout_s:g} s: the replica gives up"
        generation = current.generation if current else 0
        self._mailbox.send(ReplicaLost(job_id=self.job.spec.id, generation=generation, reason=reason))
        return None

    # ------------------------------------------------------------------ the end

    def _leave(self, order: ReplicaOrder, group: Group | None) -> None:
        """Leave as ordered. If no other replica will keep the state in memory, save it first: rank 0 of
        `group` saves, or every rank if the group is broken (None)."""
        job, preempted = self.job, order.world_size == 0
        if not job.has_state:
            return
        saves = group is None
        if group is not None and group.rank == 0:
            saves = preempted or not self._agreement.rendezvous_for(order).any_member_has_state()
        elif group is not None and preempted:
            saves = not _all_done(group)
        if saves and preempted:
            self._mailbox.send(self._saved(order))
        elif saves:
            job.try_save("preempted")
        if group is not None and group.rank == 0 and preempted:
            _all_done(group)
        job.lock.release()

    def _saved(self, order: ReplicaOrder) -> JobSaved | ReplicaLost:
        """Save the state of a preempted job and return what to report. If it cannot be saved, the job later
        resumes from its last checkpoint."""
        job = self.job
        try:
            path = job.save("preempted")
        except checkpoint.CheckpointError as error:
            return ReplicaLost(job_id=job.spec.id, generation=order.generation, reason=str(error))
        return JobSaved(
            job_id=job.spec.id,
            generation=order.generation,
            checkpoint=str(path),
            progress=job.state.progress,
        )

    def _finish(self, group: Group, order: ReplicaOrder) -> None:
        """The target is met: rank 0 saves and reports. The other ranks stay until it has saved, so that the
        state survives the loss of rank 0."""
        job = self.job
        if group.rank == 0:
            try:
                path = job.save("final")
            except checkpoint.CheckpointError as error:
                raise JobError(f"the target was met, but {error}") from error
            self._mailbox.send(
                TargetReached(
                    job_id=job.spec.id,
                    generation=order.generation,
                    checkpoint=str(path),
                    metric=job.metric,
                    progress=job.state.progress,
                )
            )
            _all_done(group)
        else:
            # If rank 0 is lost before it has saved, the next group must evaluate again.
            job.state.next_evaluation = job.state.progress
            group.all_reduce(torch.zeros(1))
        job.lock.release()

    def report_exception(self, error: BaseException) -> None:
        newest = self._mailbox.newest
        if isinstance(error, SystemExit):
            reason = f"the application exited with code {error.code}"
        elif isinstance(error, JobError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {error}"
        # Only failures of the application's own code need a traceback: a JobError explains itself.
        traces = "" if isinstance(error, JobError) else "".join(traceback.format_exception(error))
        _note(traces or f"{reason}\n")
        with contextlib.suppress(AgentGone):
            self._mailbox.send(
                JobRaised(
                    job_id=self._start.spec.id,
                    generation=newest.generation if newest else 0,
                    reason=printable(reason),
                    output_tail=traces[-2000:],
                )
            )


def _note(text: str) -> None:
    """Write to the replica's output; a full disk is ignored."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _all_done(group: Group) -> bool:
    """Wait for every rank to get here; False when one has died."""
    try:
        group.all_reduce(torch.zeros(1))
    except GroupBroken:
        return False
    return True
