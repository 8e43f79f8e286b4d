"""The world of our own applications: real jobs as they live, at the times that were measured of them.

Everything that decides is the code that runs live: the scheduler's core, the agents' `reconcile`, and the
collector's `Histories`, which get the same events and samples. What is modelled is what processes take, from
profiles (workloads/files/measured_profile.py):

- A replica's process builds its task, and then meets the others of its group, which takes `resize_s`; both
  together are `start_s`. A process that is told to leave while it builds does so afterwards.
- A group trains step by step, and looks at its orders before each step. When it has to form anew, it trains
  on until the newcomers have built their tasks (they may have to wait for slots), at most for the trainers'
  patience; then it ends a step, leavers leave, and the new group meets. A batch alone changes after a step.
- Every `evaluate_every` of progress it evaluates, its replicas sharing the work. The evaluation that is
  nearest to the measured need of its target meets it. Where the batch changes on the way, what has been done
  counts as a part of the need at each batch.
- The final state is saved, the replicas exit, and a verifier takes `verify_s` in a slot of the job.

Messages take no time, and nothing fails but jobs that spend their budget.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from common.config import SchedulerConfig
from common.protocol import (
    BatchChanged,
    Evaluated,
    Event,
    Fact,
    GenerationRunning,
    GenerationStarted,
    JobCompleted,
    JobOrder,
    JobRaised,
    JobSaved,
    ModelFitted,
    Orders,
    ReplicaLost,
    ReplicaOrder,
    TargetReached,
    VerificationDone,
    Verified,
)
from common.types import JobProfile, JobSpec, Node, batch_config, replicas_of
from services.metrics_collector.memory import Memory
from services.metrics_collector.profiles import ObservedJobs
from services.simulator.perturbation import UNPERTURBED, Perturbation
from services.simulator.worlds.interface import COLLECTOR, Happening
from services.simulator.worlds.simulated_agents import SimulatedAgent, SimulatedProcess
from services.simulator.worlds.simulated_training import TRAINER, SimulatedStep, SimulatedTraining
from services.simulator.worlds.timeline import Timeline
from workloads.files.measured_profile import Costs, MeasuredProfile

CALLS_FOR_A_ROUND = (TargetReached, JobSaved, JobRaised, ReplicaLost, VerificationDone)
KILLED = -9
SAVE_S = TRAINER.collective_timeout_s
"""So long an agent leaves it to others to say that a job has saved, as live."""


@dataclass(eq=False)
class CalibratedJob:
    """`members` are the replicas of its present group, by rank; without any it does not train."""

    spec: JobSpec
    training: SimulatedTraining
    histories: ObservedJobs
    members: list[SimulatedProcess] = field(default_factory=list)
    order: ReplicaOrder | None = None
    """What its group follows."""
    offered: ReplicaOrder | None = None
    """What it will follow after the present step."""
    beginning: tuple[str, int, float] | None = None
    """To be told after the first step of a group: where its state came from, of how many replicas, and until
    when somebody trained before it."""
    turn: int = 0
    """What was to come of an earlier one does not."""
    former_replicas: int = 0
    last_step_s: float = 0.0
    saved_s: float = 0.0
    awaited: tuple[int, float] = (0, 0.0)
    """A group whose newcomers are waited for, and since when."""


class CalibratedWorld:
    """`profiles` are of all applications that there are, `nodes` those that orders name. Jobs train with the
    batch that they are ordered to. With `restart_s` every group takes so long to meet."""

    event_driven = True
    accumulates_alone = False

    def __init__(
        self,
        profiles: Mapping[str, MeasuredProfile],
        nodes: Sequence[Node],
        *,
        restart_s: float | None = None,
        errors: Perturbation = UNPERTURBED,
        memory: Memory | None = None,
    ) -> None:
        self.measured = profiles
        self.applications = {name: measured.spec for name, measured in profiles.items()}
        self.restart_s = SchedulerConfig().restart_penalty_s if restart_s is None else restart_s
        self._resize_s = restart_s
        self._errors, self._memory = errors, memory
        self.oracle = self
        self._time = Timeline(CALLS_FOR_A_ROUND)
        self.jobs: dict[str, CalibratedJob] = {}
        self._agents = {
            node.name: SimulatedAgent(node.name, node.slots, SAVE_S, self._time.tell) for node in nodes
        }
        self._slots = max((node.slots for node in nodes), default=1)
        self._wanted: dict[str, JobOrder] = {}

    def kind(self, spec: JobSpec) -> Hashable:
        alike = structs.replace(spec, id="", seed=0, replicas=1, batch_size=spec.min_batch_size)
        return tuple(map(str, structs.astuple(alike)))

    def fixed_s(self, spec: JobSpec) -> float:
        costs = self.measured[spec.application].costs
        start_s = max(costs.start_s - costs.resize_s, 0.0) + self._meeting_s(costs)
        return start_s + costs.save_s + costs.exit_s + costs.verify_s

    def complete(self, spec: JobSpec) -> JobSpec:
        measured = self.measured[spec.application]
        spec = structs.replace(spec, max_replicas=min(spec.max_replicas, measured.most_replicas))
        training = SimulatedTraining(spec, measured, self._errors)
        self.jobs[spec.id] = CalibratedJob(spec, training, ObservedJobs(memory=self._memory))
        return spec

    # ------------------------------------------------------------------ orders and time

    def apply(self, orders: Orders, now_s: float) -> Sequence[Happening]:
        self._time.now_s = now_s
        self._wanted = {order.spec.id: order for order in orders.jobs}
        for agent in self._agents.values():
            self._carry_out(*agent.follow(orders, now_s))
            if not all(order.allocation for order in orders.jobs):
                self._time.after(SAVE_S, agent.answer, now_s + SAVE_S)
        for job_id in self._wanted:
            self._settle(self.jobs[job_id])
        return self._time.take()

    def advance(self, until_s: float) -> tuple[float, Sequence[Happening]]:
        self._time.advance(until_s)
        return self._time.now_s, self._time.take()

    def profiles(self, job_ids: Sequence[str]) -> tuple[JobProfile, ...]:
        known = [job for job_id in job_ids if (job := self.jobs.get(job_id))]
        told = (job.histories.profile(job.spec.id, job.spec.application, job.spec.target) for job in known)
        return tuple(structs.replace(profile, points=()) for profile in told)

    def _tell_of(self, job: CalibratedJob, what: Fact | Event) -> None:
        job.members[0].agent.tell(what)

    # ------------------------------------------------------------------ processes

    def _processes(self, job: CalibratedJob) -> Iterator[SimulatedProcess]:
        for agent in self._agents.values():
            yield from (p for p in agent.processes.values() if p.job_id == job.spec.id and not p.claim)

    def _carry_out(self, started: Sequence[SimulatedProcess], killed: Sequence[SimulatedProcess]) -> None:
        for process in started:
            job = self.jobs[process.job_id]
            costs = job.training.measured.costs
            if process.claim:
                self._time.after(costs.verify_s, self._verified, process)
            else:
                self._time.after(max(costs.start_s - costs.resize_s, 0.0), self._built, process)
        for process in killed:
            job = self.jobs[process.job_id]
            job.members, job.turn = [], job.turn + 1
            self._end(process, code=KILLED)

    def _built(self, process: SimulatedProcess) -> None:
        process.built = True
        self._settle(self.jobs[process.job_id])

    def _settle(self, job: CalibratedJob) -> None:
        """Let idle processes leave that have to, and the others meet, if all of them are there."""
        for process in list(self._processes(job)):
            if process.leaves and process.built and not (process.in_group or process.ends):
                if process.has_state and process.order.world_size == 0:
                    self._save(job, process)
                self._end(process)
        wanted = self._wanted.get(job.spec.id)
        if job.members or wanted is None or not wanted.allocation:
            return
        there = [p for p in self._processes(job) if p.active and p.built and not p.ends]
        if len(there) == replicas_of(wanted.allocation):
            self._meet(job, sorted(there, key=lambda process: process.order.rank))

    def _end(self, process: SimulatedProcess, after_s: float = 0.0, code: int = 0) -> None:
        """The process does nothing any more but to exit."""
        if process.ends:
            return
        process.ends, process.in_group = True, False
        costs = self.jobs[process.job_id].training.measured.costs
        self._time.after(after_s + costs.exit_s, self._exit, process, code)

    def _exit(self, process: SimulatedProcess, code: int) -> None:
        process.agent.exited(process, code, self._time.now_s)
        self._carry_out(*process.agent.reconcile(self._time.now_s))

    def _verified(self, process: SimulatedProcess) -> None:
        assert process.claim
        job, metric = self.jobs[process.job_id], process.claim.metric
        job_id, training, tell = job.spec.id, job.training, process.agent.tell
        tell(Verified(job_id=job_id, ok=True, metric=metric, reported_metric=metric, epochs=training.epoch))
        completed = JobCompleted(job_id=job_id, verified=True, metric=metric, progress=training.progress)
        job.histories.add(completed)
        self._end(process)
        tell(VerificationDone(job_id=job_id, metric=metric))

    # ------------------------------------------------------------------ groups

    def _meet(self, job: CalibratedJob, members: list[SimulatedProcess]) -> None:
        job.members, job.order = members, members[0].order
        donor = next((process for process in members if process.has_state), members[0])
        job.beginning = "scratch", 0, donor.started_s
        if donor.has_state:
            job.beginning = "survivor", job.former_replicas, job.last_step_s
        elif job.training.steps:
            job.beginning = "checkpoint", 0, max(donor.started_s, job.saved_s)
        for process in members:
            process.in_group = True
        meeting_s = self._meeting_s(job.training.measured.costs)
        self._time.after(max(job.saved_s - self._time.now_s, 0.0) + meeting_s, self._formed, job, job.turn)

    def _meeting_s(self, costs: Costs) -> float:
        return costs.resize_s if self._resize_s is None else self._resize_s

    def _formed(self, job: CalibratedJob, turn: int) -> None:
        if turn == job.turn:
            for process in job.members:
                process.has_state = True
            job.training.begin_window(self._time.now_s, new_order=True)
            self._go_on(job)

    def _offer(self, job: CalibratedJob, present: ReplicaOrder) -> ReplicaOrder | None:
        """A newer order that the group is ready for."""
        newest = job.members[0].order
        if newest.generation <= present.generation:
            return None
        if newest.world_size and newest.group != present.group:
            if job.awaited[0] != newest.group:
                job.awaited = newest.group, self._time.now_s
            there = sum(p.active and (p.in_group or p.built) for p in self._processes(job))
            patient = self._time.now_s - job.awaited[1] < TRAINER.newcomers_timeout_s
            if patient and there < newest.world_size:
                return None
        return newest

    def _switch(self, job: CalibratedJob, newer: ReplicaOrder) -> None:
        """All replicas have agreed to follow a newer order."""
        self._sample(job)
        assert job.order
        if newer.group == job.order.group:
            job.order = newer
            job.training.begin_window(self._time.now_s, new_order=True)
            total = newer.config.total_batch(newer.world_size)
            changed = BatchChanged(
                job_id=job.spec.id,
                generation=newer.generation,
                config=newer.config,
                total_batch=total,
                step=job.training.steps,
            )
            self._tell_of(job, changed)
            self._go_on(job)
            return
        members, job.members = job.members, []
        job.former_replicas = len(members)
        # Whoever leaves a job without survivors saves for those that come.
        save_s = job.training.measured.costs.save_s if all(p.leaves for p in members) else 0.0
        job.saved_s = self._time.now_s + save_s
        if newer.world_size == 0:
            self._save(job, members[0])
        for process in members:
            process.in_group = False
            if process.leaves:
                self._end(process, save_s)
        self._settle(job)

    def _save(self, job: CalibratedJob, process: SimulatedProcess) -> None:
        progress, generation = job.training.progress, process.order.generation
        saved = JobSaved(job_id=job.spec.id, generation=generation, checkpoint="", progress=progress)
        process.agent.saved(saved)

    # ------------------------------------------------------------------ training

    def _go_on(self, job: CalibratedJob) -> None:
        training, order = job.training, job.order
        assert order
        if training.progress >= training.next_evaluation:
            evaluation_s = training.measured.evaluation_s(order.world_size)
            self._time.after(evaluation_s, self._evaluated, job, job.turn)
            return
        job.offered = self._offer(job, order)
        step = training.next_step(order)
        self._time.after(step.seconds, self._stepped, job, job.turn, step)

    def _stepped(self, job: CalibratedJob, turn: int, step: SimulatedStep) -> None:
        if turn != job.turn:
            return
        training, order = job.training, job.order
        assert order
        training.take(step, order)
        if training.steps_so == 1:
            self._tell_beginning(job, order, step)
        job.last_step_s = self._time.now_s
        if training.sample_due(self._time.now_s):
            self._sample(job)
        if job.offered:
            self._switch(job, job.offered)
        else:
            self._go_on(job)

    def _tell_beginning(self, job: CalibratedJob, order: ReplicaOrder, step: SimulatedStep) -> None:
        job_id, progress = job.spec.id, job.training.progress
        if job.beginning:
            (state_from, old_replicas, since_s), job.beginning = job.beginning, None
            started = GenerationStarted(
                job_id=job_id,
                generation=order.generation,
                old_replicas=old_replicas,
                allocation=order.allocation,
                config=order.config,
                state_from=state_from,
                seconds_lost=self._time.now_s - since_s - step.seconds,
                progress=progress,
                first_step_s=step.seconds,
            )
            self._tell_of(job, started)
            job.histories.add(started)
        running = GenerationRunning(job_id=job_id, generation=order.generation, progress=progress)
        self._tell_of(job, running)

    def _sample(self, job: CalibratedJob) -> None:
        assert job.order
        sample = job.training.sample(job.order, self._time.now_s)
        if sample is None:
            return
        self._tell_of(job, sample)
        history = job.histories.add(sample)
        if history and history.needs_fit:
            fit = job.histories.fit(history)
            fitted = ModelFitted(
                job_id=job.spec.id,
                parameters=fit.parameters,
                statistics=history.statistics,
                error=fit.error,
                points=len(history.times),
                fit_s=0.0,
            )
            self._time.tell(COLLECTOR, fitted)

    def _evaluated(self, job: CalibratedJob, turn: int) -> None:
        if turn != job.turn:
            return
        training, order = job.training, job.order
        assert order
        metric, reached = training.evaluate(order)
        job_id, progress = job.spec.id, training.progress
        self._tell_of(
            job,
            Evaluated(job_id=job_id, progress=progress, step=training.steps, metric=metric, reached=reached),
        )
        if not reached and progress <= job.spec.max_progress:
            self._go_on(job)
            return
        self._sample(job)
        if reached:
            claim = TargetReached(
                job_id=job_id, generation=order.generation, checkpoint="", metric=metric, progress=progress
            )
            self._time.after(training.measured.costs.save_s, self._finish, job, job.turn, claim)
        else:
            reason = (
                f"progress budget of {job.spec.max_progress:g} spent short of the target "
                f"{job.spec.target:g}; last metric {metric:g}"
            )
            self._finish(job, job.turn, JobRaised(job_id=job_id, generation=order.generation, reason=reason))

    def _finish(self, job: CalibratedJob, turn: int, fact: TargetReached | JobRaised) -> None:
        if turn != job.turn:
            return
        self._tell_of(job, fact)
        members, job.members = job.members, []
        for process in members:
            self._end(process, code=int(isinstance(fact, JobRaised)))

    # ------------------------------------------------------------------ the oracle

    def step_time_s(self, job_id: str, replicas: int) -> float:
        job = self.jobs[job_id]
        config = batch_config(job.spec.batch_size, replicas, job.spec)
        whole, rest = divmod(replicas, self._slots)
        placement = (*(whole * [self._slots]), *([rest] if rest else []))
        return job.training.measured.mean_step_s(placement, config.atomic_batch, config.accumulation)

    def remaining_steps(self, job_id: str) -> float:
        return self.jobs[job_id].training.remaining_steps()
