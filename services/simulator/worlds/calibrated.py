"""The world of the project's own applications, at the speed that was measured for them.

All decisions are made by the code that runs live: the scheduler's core, the agents' `reconcile`, and the
collector's `ObservedJobs`, which get the same events and samples. Only the time that processes take is
modelled, from profiles (workloads/files/measured_profile.py):

- The process of a replica builds its task and then joins its group, which takes `resize_s`; `start_s` is both
  together. A process that is ordered to leave while it builds leaves afterwards.
- A group trains step by step and reads its orders before each step. For a new group it trains on until the
  newcomers have built their tasks (they may have to wait for slots), at most for the trainer's
  `newcomers_timeout_s`. Then it finishes a step, the leaving replicas leave, and the new group forms. A
  change of batch alone takes effect after a step.
- It evaluates after every `evaluate_every` of progress; the replicas share that work. The evaluation nearest
  to the measured need of the target meets the target. If the batch size changes during the training, each
  step counts as a fraction of the need at its own batch size.
- The final state is saved, the replicas exit, and a verifier takes `verify_s` in a slot of the job.

Messages take no time. Nothing fails except jobs that spend their budget.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from services.simulator.worlds.interface import COLLECTOR, WorldEvent
from services.simulator.worlds.simulated_agents import SimulatedAgent, SimulatedProcess
from services.simulator.worlds.simulated_training import TRAINER, SimulatedStep, SimulatedTraining
from services.simulator.worlds.timeline import Timeline
from workloads.files.measured_profile import Costs, MeasuredProfile, packed

STARTS_A_ROUND = (TargetReached, JobSaved, JobRaised, ReplicaLost, VerificationDone)
KILLED = -9
"""Exit code."""
SAVE_S = TRAINER.collective_timeout_s
"""How long an agent waits for others to report that a job has saved, as live."""


@dataclass(eq=False)
class CalibratedJob:
    """A job, and the group that trains it."""

    spec: JobSpec
    training: SimulatedTraining
    observed: ObservedJobs
    members: list[SimulatedProcess] = field(default_factory=list)
    """The replicas of the current group, by rank; empty while the job does not train."""
    order: ReplicaOrder | None = None
    """What the group follows."""
    next_order: ReplicaOrder | None = None
    """What the group will follow after the current step."""
    group_start: tuple[str, int, float] | None = None
    """Reported after the group's first step: the source of its state, the number of replicas before it, and
    the time since which nothing was trained."""
    killed_groups: int = 0
    former_replicas: int = 0
    last_step_s: float = 0.0
    saved_s: float = 0.0
    awaited: tuple[int, float] = (0, 0.0)
    """The group whose newcomers are awaited, and since when."""


class CalibratedWorld:
    """Jobs train with the batch size of their orders."""

    event_driven = True
    accumulates_alone = False

    def __init__(
        self,
        profiles: Mapping[str, MeasuredProfile],
        nodes: Sequence[Node],
        *,
        restart_s: float | None = None,
        assumed_restart_s: float | None = None,
        perturbation: Perturbation = UNPERTURBED,
        memory: Memory | None = None,
    ) -> None:
        """`profiles` by application. `restart_s` replaces the measured time in which a group forms.
        `assumed_restart_s` is what policies assume of a restart until one has been measured; by default
        `restart_s`, or the default of the configuration. With `memory`, jobs start from what others have
        shown."""
        self.measured = profiles
        self.applications = {name: measured.spec for name, measured in profiles.items()}
        assumed_s = (assumed_restart_s, restart_s, SchedulerConfig().restart_penalty_s)
        self.restart_s = next(seconds for seconds in assumed_s if seconds is not None)
        self._resize_s = restart_s
        self._perturbation, self._memory = perturbation, memory
        self.oracle = self
        self._time = Timeline(STARTS_A_ROUND)
        self.jobs: dict[str, CalibratedJob] = {}
        self._agents = {
            node.name: SimulatedAgent(node.name, node.slots, SAVE_S, self._time.emit) for node in nodes
        }
        self._slots = max((node.slots for node in nodes), default=1)
        self._wanted: dict[str, JobOrder] = {}

    def isolation_key(self, spec: JobSpec) -> Hashable:
        common = structs.replace(spec, id="", seed=0, replicas=1, batch_size=spec.min_batch_size)
        return tuple(map(str, structs.astuple(common)))

    def overhead_s(self, spec: JobSpec) -> float:
        costs = self.measured[spec.application].costs
        start_s = max(costs.start_s - costs.resize_s, 0.0) + self._forming_s(costs)
        return start_s + costs.save_s + costs.exit_s + costs.verify_s

    def add_job(self, spec: JobSpec) -> JobSpec:
        measured = self.measured[spec.application]
        spec = structs.replace(spec, max_replicas=min(spec.max_replicas, measured.most_replicas))
        training = SimulatedTraining(spec, measured, self._perturbation)
        self.jobs[spec.id] = CalibratedJob(spec, training, ObservedJobs(memory=self._memory))
        return spec

    # ------------------------------------------------------------------ orders and time

    def apply(self, orders: Orders, now_s: float) -> Sequence[WorldEvent]:
        self._time.now_s = now_s
        self._wanted = {order.spec.id: order for order in orders.jobs}
        for agent in self._agents.values():
            self._carry_out(*agent.follow(orders, now_s))
            if not all(order.allocation for order in orders.jobs):
                self._time.after(SAVE_S, agent.answer, now_s + SAVE_S)
        for job_id in self._wanted:
            self._settle(self.jobs[job_id])
        return self._time.take_events()

    def advance(self, until_s: float) -> tuple[float, Sequence[WorldEvent]]:
        self._time.advance(until_s)
        return self._time.now_s, self._time.take_events()

    def profiles(self, job_ids: Sequence[str]) -> tuple[JobProfile, ...]:
        known = [job for job_id in job_ids if (job := self.jobs.get(job_id))]
        profiles = (job.observed.profile(job.spec.id, job.spec.application, job.spec.target) for job in known)
        return tuple(structs.replace(profile, points=()) for profile in profiles)

    def _emit_for(self, job: CalibratedJob, content: Fact | Event) -> None:
        """From the agent of the job's rank 0."""
        job.members[0].agent.emit(content)

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
            job.members, job.killed_groups = [], job.killed_groups + 1
            self._end(process, code=KILLED)

    def _built(self, process: SimulatedProcess) -> None:
        process.built = True
        self._settle(self.jobs[process.job_id])

    def _settle(self, job: CalibratedJob) -> None:
        """Let idle processes leave if they must, and let the others form a group if all of them are ready."""
        for process in list(self._processes(job)):
            if process.leaves and process.built and not (process.in_group or process.exiting):
                if process.has_state and process.order.world_size == 0:
                    self._save(job, process)
                self._end(process)
        wanted = self._wanted.get(job.spec.id)
        if job.members or wanted is None or not wanted.allocation:
            return
        ready = [p for p in self._processes(job) if p.active and p.built and not p.exiting]
        if len(ready) == replicas_of(wanted.allocation):
            self._form_group(job, sorted(ready, key=lambda process: process.order.rank))

    def _end(self, process: SimulatedProcess, after_s: float = 0.0, code: int = 0) -> None:
        """From now on the process does nothing but exit."""
        if process.exiting:
            return
        process.exiting, process.in_group = True, False
        costs = self.jobs[process.job_id].training.measured.costs
        self._time.after(after_s + costs.exit_s, self._exit, process, code)

    def _exit(self, process: SimulatedProcess, code: int) -> None:
        process.agent.exited(process, code, self._time.now_s)
        self._carry_out(*process.agent.reconcile(self._time.now_s))

    def _verified(self, process: SimulatedProcess) -> None:
        assert process.claim
        job, metric = self.jobs[process.job_id], process.claim.metric
        job_id, training, emit = job.spec.id, job.training, process.agent.emit
        emit(Verified(job_id=job_id, ok=True, metric=metric, reported_metric=metric, epochs=training.epoch))
        completed = JobCompleted(job_id=job_id, verified=True, metric=metric, progress=training.progress)
        job.observed.add(completed)
        self._end(process)
        emit(VerificationDone(job_id=job_id, metric=metric))

    # ------------------------------------------------------------------ groups

    def _form_group(self, job: CalibratedJob, members: list[SimulatedProcess]) -> None:
        job.members, job.order = members, members[0].order
        donor = next((process for process in members if process.has_state), members[0])
        job.group_start = "scratch", 0, donor.started_s
        if donor.has_state:
            job.group_start = "survivor", job.former_replicas, job.last_step_s
        elif job.training.steps:
            job.group_start = "checkpoint", 0, max(donor.started_s, job.saved_s)
        for process in members:
            process.in_group = True
        forming_s = self._forming_s(job.training.measured.costs)
        self._after(job, max(job.saved_s - self._time.now_s, 0.0) + forming_s, self._formed)

    def _forming_s(self, costs: Costs) -> float:
        return costs.resize_s if self._resize_s is None else self._resize_s

    def _after(self, job: CalibratedJob, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        """Let the job's group act after some seconds, unless it has been killed by then."""
        killed_groups = job.killed_groups

        def act_if_alive() -> None:
            if killed_groups == job.killed_groups:
                act(job, *arguments)

        self._time.after(seconds, act_if_alive)

    def _formed(self, job: CalibratedJob) -> None:
        for process in job.members:
            process.has_state = True
        job.training.begin_window(self._time.now_s, new_order=True)
        self._continue_training(job)

    def _ready_order(self, job: CalibratedJob, current: ReplicaOrder) -> ReplicaOrder | None:
        """A newer order that the group can follow now."""
        newest = job.members[0].order
        if newest.generation <= current.generation:
            return None
        if newest.world_size and newest.group != current.group:
            if job.awaited[0] != newest.group:
                job.awaited = newest.group, self._time.now_s
            ready = sum(p.active and (p.in_group or p.built) for p in self._processes(job))
            waited_s = self._time.now_s - job.awaited[1]
            if ready < newest.world_size and waited_s < TRAINER.newcomers_timeout_s:
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
            self._emit_for(job, changed)
            self._continue_training(job)
            return
        members, job.members = job.members, []
        job.former_replicas = len(members)
        # Without survivors, the leaving replicas save the state for those that come.
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

    def _continue_training(self, job: CalibratedJob) -> None:
        training, order = job.training, job.order
        assert order
        if training.progress >= training.next_evaluation:
            evaluation_s = training.measured.evaluation_s(order.world_size)
            self._after(job, evaluation_s, self._evaluated)
            return
        job.next_order = self._ready_order(job, order)
        step = training.next_step(order)
        self._after(job, step.seconds, self._stepped, step)

    def _stepped(self, job: CalibratedJob, step: SimulatedStep) -> None:
        training, order = job.training, job.order
        assert order
        training.take(step, order)
        if training.steps_under_order == 1:
            self._report_start(job, order, step)
        job.last_step_s = self._time.now_s
        if training.sample_due(self._time.now_s):
            self._sample(job)
        if job.next_order:
            self._switch(job, job.next_order)
        else:
            self._continue_training(job)

    def _report_start(self, job: CalibratedJob, order: ReplicaOrder, step: SimulatedStep) -> None:
        job_id, progress = job.spec.id, job.training.progress
        if job.group_start:
            (state_from, old_replicas, since_s), job.group_start = job.group_start, None
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
            self._emit_for(job, started)
            job.observed.add(started)
        running = GenerationRunning(job_id=job_id, generation=order.generation, progress=progress)
        self._emit_for(job, running)

    def _sample(self, job: CalibratedJob) -> None:
        assert job.order
        sample = job.training.sample(job.order, self._time.now_s)
        if sample is None:
            return
        self._emit_for(job, sample)
        history = job.observed.add(sample)
        if history and history.needs_fit:
            fit = job.observed.fit(history)
            fitted = ModelFitted(
                job_id=job.spec.id,
                parameters=fit.parameters,
                statistics=history.statistics,
                error=fit.error,
                points=len(history.times),
                fit_s=0.0,
            )
            self._time.emit(COLLECTOR, fitted)

    def _evaluated(self, job: CalibratedJob) -> None:
        training, order = job.training, job.order
        assert order
        metric, reached = training.evaluate(order)
        job_id, progress = job.spec.id, training.progress
        self._emit_for(
            job,
            Evaluated(job_id=job_id, progress=progress, step=training.steps, metric=metric, reached=reached),
        )
        if not reached and progress <= job.spec.max_progress:
            self._continue_training(job)
            return
        self._sample(job)
        if reached:
            claim = TargetReached(
                job_id=job_id, generation=order.generation, checkpoint="", metric=metric, progress=progress
            )
            self._after(job, training.measured.costs.save_s, self._finish, claim)
        else:
            reason = (
                f"progress budget of {job.spec.max_progress:g} spent short of the target "
                f"{job.spec.target:g}; last metric {metric:g}"
            )
            self._finish(job, JobRaised(job_id=job_id, generation=order.generation, reason=reason))

    def _finish(self, job: CalibratedJob, fact: TargetReached | JobRaised) -> None:
        self._emit_for(job, fact)
        members, job.members = job.members, []
        for process in members:
            self._end(process, code=int(isinstance(fact, JobRaised)))

    # ------------------------------------------------------------------ the oracle

    def step_time_s(self, job_id: str, replicas: int) -> float:
        job = self.jobs[job_id]
        config = batch_config(job.spec.batch_size, replicas, job.spec)
        placement = packed(replicas, self._slots)
        return job.training.measured.mean_step_s(placement, config.atomic_batch, config.accumulation)

    def remaining_steps(self, job_id: str) -> float:
        return self.jobs[job_id].training.remaining_steps()
