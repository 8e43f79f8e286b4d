"""The jobs of a node: turns orders into processes, and the messages and exits of processes into facts.

Every process that ends without an order is reported. If a signal ended it, the fact is ReplicaLost or
VerifierLost, and the job survives. If it exited before its work was done, with whatever code, the fact is
JobRaised or a refuted claim, and the job fails. The end of a replica that was ordered to leave is not
reported: the next group has no rank for it, and if the present group fails, its other members move on to the
next one.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.codec import DecodeError, decode, encode
from common.config import Config
from common.protocol import (
    BadMessage,
    Event,
    Fact,
    JobOrder,
    JobRaised,
    JobSaved,
    Orders,
    ReplicaAlive,
    ReplicaExited,
    ReplicaLost,
    ReplicaMessage,
    ReplicaOrder,
    ReplicaStart,
    ReplicaStarted,
    VerificationDone,
    VerificationStarted,
    Verified,
    VerifierLost,
    VerifyOrder,
    VerifyStart,
)
from services.job_agent import child_entry
from services.job_agent.reconcile import (
    LEAVES,
    Forget,
    Kill,
    Phase,
    ReplicaRecord,
    SendOrder,
    StartReplica,
    StartVerifier,
    VerifierRecord,
    reconcile,
)
from services.job_agent.replicas import ChildProcesses, Exit
from services.job_agent.unsaved_jobs import UnsavedJobs

TAIL_LINES = 20
TAIL_BYTES = 2_000


@dataclass
class TrackedProcess:
    """A process: the record that `reconcile` sees, and what only the agent needs."""

    record: ReplicaRecord | VerifierRecord
    output: Path
    started_s: float
    heard_s: float
    """When its last message came."""
    answered: bool = False
    """It has reported why it ends: JobRaised or a verdict."""
    leave_ordered_s: float = float("inf")
    claim: VerifyOrder | None = None
    """What a verifier checks; None for a replica."""


class NodeJobs:
    """`follow` takes orders; `publish` and `report` pass on events and facts."""

    def __init__(
        self,
        node: str,
        slots: int,
        config: Config,
        processes: ChildProcesses,
        publish: Callable[[Event], None],
        report: Callable[[Fact], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self.slots = slots
        self.config = config
        self.processes = processes
        self.publish = publish
        self.report_fact = report
        self.clock = clock
        self.incarnation = ""
        self.orders: Orders | None = None
        """None while the agent takes part in no run."""
        self.tracked: dict[str, TrackedProcess] = {}
        self.started = 0
        self.saved: dict[str, JobSaved] = {}
        """Jobs that have saved and still have processes here, which must exit before that is reported."""
        self.unsaved = UnsavedJobs(node, config.trainer.collective_timeout_s)

    # ------------------------------------------------------------------ orders

    def begin(self, orders: Orders, incarnation: str) -> None:
        """The first orders for this incarnation of the agent."""
        self.incarnation = incarnation
        self.follow(orders)

    def end(self) -> None:
        """End all processes and stop following orders. Messages that the processes have already sent
        count."""
        for name, tracked in list(self.tracked.items()):
            if tracked.record.phase is Phase.GONE:
                del self.tracked[name]
            else:
                self.kill(name)
        for saved in self.saved.values():
            self.report(saved)
        self.saved.clear()
        self.orders = None
        self.unsaved.follow(None, self.clock())

    def follow(self, orders: Orders) -> None:
        """Take newer orders of the run."""
        self.orders = orders
        self.unsaved.follow(orders, self.clock())
        self.reconcile()

    def reconcile(self) -> None:
        if self.orders is None:
            return
        records = [tracked.record for tracked in self.tracked.values()]
        actions = reconcile(
            self.orders,
            self.node,
            self.slots,
            [record for record in records if isinstance(record, ReplicaRecord)],
            [record for record in records if isinstance(record, VerifierRecord)],
        )
        for action in actions:
            match action:
                case Kill():
                    self.kill(action.name)
                case Forget():
                    del self.tracked[action.name]
                case SendOrder():
                    self.send(action.name, action.order)
                case StartReplica():
                    self.start_replica(action.job, action.order)
                case StartVerifier():
                    self.start_verifier(action.order)
        self.report_unsaved()

    def start_replica(self, job: JobOrder, order: ReplicaOrder) -> None:
        name, output = self.new_process(job.spec.id)
        start = ReplicaStart(
            spec=job.spec,
            replica=name,
            job_dir=str(output.parent),
            checkpoint=job.checkpoint,
            slot_speed=self.config.agent.slot_speed,
            trainer=self.config.trainer,
            application_modules=self.config.applications.modules,
        )
        pid = self.processes.start(name, child_entry.replica, encode(start), output)
        if pid is None:
            return
        self.processes.send(name, encode(order))
        record = ReplicaRecord(
            name=name, job_id=job.spec.id, serial=self.started, phase=Phase.ACTIVE, order=order
        )
        self.tracked[name] = TrackedProcess(record, output, self.clock(), self.clock())
        self.publish(
            ReplicaStarted(
                job_id=job.spec.id,
                node=self.node,
                replica=name,
                pid=pid,
                generation=order.generation,
            )
        )

    def start_verifier(self, order: VerifyOrder) -> None:
        job_id = order.spec.id
        name, output = self.new_process(job_id)
        start = VerifyStart(
            order=order,
            slot_speed=self.config.agent.slot_speed,
            application_modules=self.config.applications.modules,
        )
        pid = self.processes.start(name, child_entry.verifier, encode(start), output)
        if pid is None:
            return
        record = VerifierRecord(name=name, job_id=job_id, checkpoint=order.checkpoint, phase=Phase.ACTIVE)
        self.tracked[name] = TrackedProcess(record, output, self.clock(), self.clock(), claim=order)
        self.publish(VerificationStarted(job_id=job_id, node=self.node, replica=name, pid=pid))

    def new_process(self, job_id: str) -> tuple[str, Path]:
        """The name of a new process, unique in the run, and the file for what it prints."""
        assert self.orders is not None
        self.started += 1
        name = f"{self.node}-{self.incarnation}-{self.started}"
        return name, self.config.run_dir(self.orders.run_id) / "jobs" / job_id / f"{name}.log"

    def send(self, name: str, order: ReplicaOrder) -> None:
        tracked = self.tracked[name]
        assert isinstance(tracked.record, ReplicaRecord)
        phase = tracked.record.phase
        if order.rank == LEAVES and phase is Phase.ACTIVE:
            phase = Phase.LEAVING
            tracked.leave_ordered_s = self.clock()
        tracked.record = msgspec.structs.replace(tracked.record, order=order, phase=phase)
        if not self.processes.send(name, encode(order)):
            self.give_up(name, "has stopped reading its orders")

    def kill(self, name: str) -> None:
        tracked = self.tracked[name]
        tracked.record = msgspec.structs.replace(tracked.record, phase=Phase.KILLED)
        self.processes.kill(name)

    def on_tick(self) -> None:
        """Called at intervals: apply the timeouts."""
        self.report_unsaved()
        now_s, trainer = self.clock(), self.config.trainer
        # Replicas that wait for a hanging one do not read their orders either, and must outlive it.
        hang_s = trainer.hang_timeout_s + trainer.collective_timeout_s
        for name, tracked in list(self.tracked.items()):
            phase = tracked.record.phase
            if phase is Phase.LEAVING and now_s - tracked.leave_ordered_s > trainer.order_timeout_s:
                self.kill(name)
            if phase is not Phase.ACTIVE or tracked.answered:
                continue
            if tracked.claim is not None:
                if now_s - tracked.started_s > trainer.verify_timeout_s:
                    self.give_up(name, f"had no verdict after {trainer.verify_timeout_s:g} s")
            elif now_s - tracked.heard_s > hang_s:
                self.give_up(name, f"has not read its orders for {hang_s:g} s")

    def give_up(self, name: str, why: str) -> None:
        """Kill a process. Report it as lost unless it was leaving or has explained its end itself."""
        tracked = self.tracked[name]
        was_active = tracked.record.phase is Phase.ACTIVE
        self.kill(name)
        if was_active and not tracked.answered:
            self.report_lost(tracked, f"{why}; killed")

    # ------------------------------------------------------------------ messages and exits of processes

    def on_message(self, name: str, data: bytes) -> None:
        tracked = self.tracked[name]
        try:
            message = decode(data, ReplicaMessage, self.config.limits)
        except DecodeError as error:
            self.publish(BadMessage(service=f"agent-{self.node}", error=f"from {name}: {error}"))
            return
        tracked.heard_s = self.clock()
        match message:
            case ReplicaAlive():
                pass
            case JobRaised():
                tracked.answered = True
                output_tail = tail(tracked.output) or message.output_tail
                self.report(msgspec.structs.replace(message, output_tail=output_tail))
            case VerificationDone():
                tracked.answered = True
                self.report(message)
            case JobSaved():
                former = self.saved.get(message.job_id)
                if former is None or former.progress <= message.progress:
                    self.saved[message.job_id] = message
            case ReplicaLost() if tracked.record.phase is Phase.KILLED:
                pass  # the agent itself is ending it, and perhaps the rest of its group
            case _ if isinstance(message, Fact):
                self.report(message)
            case _:
                self.publish(message)

    def on_exit(self, name: str, exited: Exit) -> None:
        tracked = self.tracked[name]
        phase = tracked.record.phase
        job_id = tracked.record.job_id
        self.publish(ReplicaExited(job_id=job_id, node=self.node, replica=name, exit_code=exited.code))
        if phase is not Phase.KILLED:
            self.account_for(tracked, exited)
        lost = isinstance(tracked.record, VerifierRecord) and tracked.record.lost_at is not None
        if self.orders is not None and (phase is Phase.ACTIVE or lost):
            tracked.record = msgspec.structs.replace(tracked.record, phase=Phase.GONE)
        else:
            del self.tracked[name]
        if job_id in self.saved and not self.lives(job_id):
            self.report(self.saved.pop(job_id))
        self.reconcile()

    def account_for(self, tracked: TrackedProcess, exited: Exit) -> None:
        """Report an end that was not ordered and that the process has not explained itself."""
        record = tracked.record
        if exited.code < 0:
            if record.phase is Phase.ACTIVE and not tracked.answered:
                self.report_lost(tracked, describe_exit(exited))
        elif tracked.answered:
            pass
        elif tracked.claim is not None:
            self.refute(tracked.claim, f"the verifier {describe_exit(exited)} before it had a verdict")
        elif not exited.finished and isinstance(record, ReplicaRecord):
            self.report(
                JobRaised(
                    job_id=record.job_id,
                    generation=record.order.generation,
                    reason=f"replica {record.name} {describe_exit(exited)} before its work was done",
                    output_tail=tail(tracked.output),
                )
            )

    def refute(self, claim: VerifyOrder, finding: str) -> None:
        """Report a refuted claim for a verifier that gave no verdict: nothing was measured, so nothing is
        confirmed."""
        job_id, metric, findings = claim.spec.id, claim.metric, (finding,)
        self.publish(
            Verified(
                job_id=job_id, ok=False, metric=metric, reported_metric=metric, epochs=0, findings=findings
            )
        )
        self.report(VerificationDone(job_id=job_id, metric=metric, findings=findings))

    def report_unsaved(self) -> None:
        for fact in self.unsaved.answers(self.lives, self.clock()):
            self.report(fact)

    def lives(self, job_id: str) -> bool:
        return any(
            tracked.record.job_id == job_id and tracked.record.phase is not Phase.GONE
            for tracked in self.tracked.values()
        )

    def report_lost(self, tracked: TrackedProcess, why: str) -> None:
        record = tracked.record
        if isinstance(record, ReplicaRecord):
            reason = f"replica {record.name} {why}"
            self.report(ReplicaLost(job_id=record.job_id, generation=record.order.generation, reason=reason))
        else:
            assert self.orders is not None
            tracked.record = msgspec.structs.replace(record, lost_at=self.orders.version)
            self.report(VerifierLost(job_id=record.job_id, reason=f"verifier {record.name} {why}"))

    def report(self, fact: Fact) -> None:
        if self.orders is not None:
            self.unsaved.note(fact)
            self.report_fact(fact)


def describe_exit(exited: Exit) -> str:
    if exited.code >= 0:
        return f"exited with code {exited.code}"
    name = next((s.name for s in signal.Signals if s == -exited.code), str(-exited.code))
    return f"was ended by signal {name}"


def tail(output: Path) -> str:
    """The last lines that a process printed, with unprintable characters replaced."""
    try:
        with output.open("rb") as file:
            file.seek(max(output.stat().st_size - TAIL_BYTES, 0))
            data = file.read(TAIL_BYTES)
    except OSError:
        return ""
    lines = data.decode(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join("".join(c if c.isprintable() else " " for c in line) for line in lines)
