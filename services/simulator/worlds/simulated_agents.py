"""The agents of a simulated cluster. `reconcile` decides what they do, as it does live. Pure.

A process is only a record here; the world decides what it does, and when.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from common.protocol import (
    Event,
    Fact,
    JobSaved,
    Orders,
    ReplicaExited,
    ReplicaOrder,
    ReplicaStarted,
    VerificationStarted,
    VerifyOrder,
)
from services.job_agent import reconcile as agent_logic
from services.job_agent.reconcile import LEAVES, Phase, ReplicaRecord, StartReplica, VerifierRecord
from services.job_agent.unsaved_jobs import UnsavedJobs


@dataclass(eq=False)
class SimulatedProcess:
    """A replica, or a verifier if it has a `claim`."""

    record: ReplicaRecord | VerifierRecord
    agent: "SimulatedAgent"
    started_s: float
    claim: VerifyOrder | None = None
    built: bool = False
    """Whether its task is built; until then it ignores orders."""
    in_group: bool = False
    """Whether it trains, or is connecting to a group."""
    has_state: bool = False
    exiting: bool = False

    @property
    def job_id(self) -> str:
        return self.record.job_id

    @property
    def active(self) -> bool:
        return self.record.phase is Phase.ACTIVE

    @property
    def leaves(self) -> bool:
        return self.record.phase is Phase.LEAVING

    @property
    def order(self) -> ReplicaOrder:
        """The newest one it has."""
        assert isinstance(self.record, ReplicaRecord)
        return self.record.order


class SimulatedAgent:
    """The agent of one node. `emit` takes what goes to the scheduler and into the log."""

    def __init__(
        self, node: str, slots: int, save_s: float, emit: Callable[[str, Fact | Event], None]
    ) -> None:
        self.node, self.slots, self._emit = node, slots, emit
        self.processes: dict[str, SimulatedProcess] = {}
        self.orders: Orders | None = None
        self._started = 0
        self._saved: dict[str, JobSaved] = {}
        self._unsaved = UnsavedJobs(node, save_s)

    def follow(self, orders: Orders, now_s: float) -> tuple[list[SimulatedProcess], list[SimulatedProcess]]:
        """Take newer orders. Returns the processes that were started, and those that were killed."""
        self.orders = orders
        self._unsaved.follow(orders, now_s)
        return self.reconcile(now_s)

    def reconcile(self, now_s: float) -> tuple[list[SimulatedProcess], list[SimulatedProcess]]:
        started: list[SimulatedProcess] = []
        killed: list[SimulatedProcess] = []
        if self.orders is None:
            return started, killed
        records = [process.record for process in self.processes.values()]
        actions = agent_logic.reconcile(
            self.orders,
            self.node,
            self.slots,
            [record for record in records if isinstance(record, ReplicaRecord)],
            [record for record in records if isinstance(record, VerifierRecord)],
        )
        for action in actions:
            match action:
                case agent_logic.Kill(name):
                    process = self.processes[name]
                    process.record = structs.replace(process.record, phase=Phase.KILLED)
                    killed.append(process)
                case agent_logic.Forget(name):
                    del self.processes[name]
                case agent_logic.SendOrder(name, order):
                    self._send(self.processes[name], order)
                case StartReplica():
                    started.append(self._start_replica(action, now_s))
                case agent_logic.StartVerifier(claim):
                    started.append(self._start_verifier(claim, now_s))
        self.answer(now_s)
        return started, killed

    def _send(self, process: SimulatedProcess, order: ReplicaOrder) -> None:
        leaves = order.rank == LEAVES and process.active
        phase = Phase.LEAVING if leaves else process.record.phase
        process.record = structs.replace(process.record, order=order, phase=phase)

    def _start_replica(self, start: StartReplica, now_s: float) -> SimulatedProcess:
        job_id, name = start.job.spec.id, self._new_name()
        record = ReplicaRecord(
            name=name, job_id=job_id, serial=self._started, phase=Phase.ACTIVE, order=start.order
        )
        self.emit(
            ReplicaStarted(
                job_id=job_id,
                node=self.node,
                replica=name,
                pid=self._started,
                generation=start.order.generation,
            )
        )
        return self._keep(SimulatedProcess(record, self, now_s))

    def _start_verifier(self, claim: VerifyOrder, now_s: float) -> SimulatedProcess:
        job_id, name = claim.spec.id, self._new_name()
        record = VerifierRecord(name=name, job_id=job_id, checkpoint=claim.checkpoint, phase=Phase.ACTIVE)
        self.emit(VerificationStarted(job_id=job_id, node=self.node, replica=name, pid=self._started))
        return self._keep(SimulatedProcess(record, self, now_s, claim))

    def _new_name(self) -> str:
        self._started += 1
        return f"{self.node}-{self._started}"

    def _keep(self, process: SimulatedProcess) -> SimulatedProcess:
        self.processes[process.record.name] = process
        return process

    def exited(self, process: SimulatedProcess, code: int, now_s: float) -> None:
        """Record that the process is gone. Call `reconcile` afterwards."""
        job_id, name = process.job_id, process.record.name
        self.emit(ReplicaExited(job_id=job_id, node=self.node, replica=name, exit_code=code))
        if process.active:
            process.record = structs.replace(process.record, phase=Phase.GONE)
        else:
            del self.processes[name]
        if job_id in self._saved and not self._has_process(job_id):
            self.emit(self._saved.pop(job_id))

    def saved(self, fact: JobSaved) -> None:
        """Keep the fact until the job's processes on this node are gone, and report it then."""
        self._saved[fact.job_id] = fact

    def answer(self, now_s: float) -> None:
        """Report the jobs that had to leave this node and had no process on it."""
        for fact in self._unsaved.answers(self._has_process, now_s):
            self.emit(fact)

    def _has_process(self, job_id: str) -> bool:
        return any(
            process.job_id == job_id and process.record.phase is not Phase.GONE
            for process in self.processes.values()
        )

    def emit(self, content: Fact | Event) -> None:
        if isinstance(content, Fact):
            self._unsaved.note(content)
        self._emit(self.node, content)
