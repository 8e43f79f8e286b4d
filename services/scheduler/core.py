"""The scheduler as a pure state machine: `step(state, input, now) -> (state, commands)`.

It uses no clock, socket or global random state. The service and the simulator pass in the time and carry out
the commands. The service writes every input to the journal first, so replaying a journal gives the same
decisions byte for byte.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from common.job_states import HOLDS_SLOTS, Trigger, after, allowed
from common.protocol import (
    AgentJoined,
    AgentLeft,
    AgentSilent,
    CancelJob,
    CoreInput,
    Done,
    Event,
    Fact,
    GenerationRunning,
    JobAccepted,
    JobCancelled,
    JobCompleted,
    JobFailed,
    JobRaised,
    JobRefused,
    JobSaved,
    JobStateChanged,
    JobSubmitted,
    LeaveAgent,
    Profiles,
    Refused,
    RegisterAgent,
    Registered,
    ReplicaLost,
    Reply,
    Report,
    RoundDecided,
    RoundDue,
    RunInfo,
    SubmitJob,
    TargetReached,
    VerificationDone,
    VerifierLost,
)
from common.types import (
    Allocation,
    ApplicationSpec,
    JobState,
    Placement,
    batch_config,
    can_share,
    replicas_of,
)
from services.scheduler.commands import Answer, Command, Emit, SendOrders, WantRound
from services.scheduler.decisions import InvalidDecision, unchanged_because, validated_decision
from services.scheduler.policies.interface import ClusterView, Decision, Oracle, Policy
from services.scheduler.state import AgentRecord, JobRecord, State, cluster_view, free_nodes, orders_of
from workloads.files.workload_file import check_spec


@dataclass(frozen=True)
class CoreSettings:
    """Settings that affect the core's decisions."""

    seed: int
    restart_penalty_s: float
    max_failures: int
    leave_timeout_s: float
    """A preempted job that no agent confirms as saved within this time counts as lost."""
    accumulates_alone: bool = False
    """See `ClusterView.accumulates_alone`."""


class SchedulerCore:
    """The transition function, and what stays the same during a run: policy, applications, settings."""

    def __init__(
        self,
        policy: Policy,
        applications: Mapping[str, ApplicationSpec],
        settings: CoreSettings,
        oracle: Oracle | None = None,
    ) -> None:
        """Only a simulator has an `oracle`."""
        self.policy = policy
        self.applications = applications
        self.settings = settings
        self.oracle = oracle

    def step(self, state: State, given: CoreInput, now_s: float) -> tuple[State, tuple[Command, ...]]:
        """The state after one input, and the commands it causes. `state` itself does not change."""
        handler = InputHandler(self, state, now_s)
        match given:
            case SubmitJob():
                handler.submit(given)
            case CancelJob():
                handler.cancel(given.job_id)
            case RegisterAgent():
                handler.register(given)
            case LeaveAgent():
                handler.remove_agent(given.node, given.incarnation, "it stopped", planned=True)
                handler.answer(Done())
            case AgentSilent():
                handler.remove_agent(given.node, given.incarnation, "no heartbeat for too long")
            case Report():
                handler.report(given)
            case Profiles():
                handler.take_profiles(given)
            case RoundDue():
                handler.decide(given.trigger)
        return handler.result()


class InputHandler:
    """Handles one input: changes copies of the tables in the state, and collects commands.

    In order: results; inputs of clients; inputs of agents; the facts that agents report; rounds; and at the
    end the changes to a job and the commands that all of them share."""

    def __init__(self, core: SchedulerCore, state: State, now_s: float) -> None:
        self.core = core
        self.state = state
        self.now_s = now_s
        self.jobs = dict(state.jobs)
        self.ended = state.ended
        self.agents = dict(state.agents)
        self.profiles = dict(state.profiles)
        self.orders_changed = False
        self.commands: list[Command] = []

    def result(self) -> tuple[State, tuple[Command, ...]]:
        state = self.current_state()
        if self.orders_changed:
            state = msgspec.structs.replace(state, orders_version=state.orders_version + 1)
            self.commands.append(SendOrders())
        # The reply to a registration carries the orders, which are complete only now.
        commands = tuple(
            Answer(Registered(run=command.reply.run, orders=orders_of(state)))
            if isinstance(command, Answer) and isinstance(command.reply, Registered)
            else command
            for command in self.commands
        )
        return state, commands

    def current_state(self) -> State:
        return msgspec.structs.replace(
            self.state, jobs=self.jobs, ended=self.ended, agents=self.agents, profiles=self.profiles
        )

    # ------------------------------------------------------------------ clients

    def submit(self, request: SubmitJob) -> None:
        spec = request.spec
        known = self.jobs.get(spec.id) or self.ended.get(spec.id)
        if known and known.spec == spec:
            self.answer(JobAccepted(job_id=spec.id, duplicate=True))
            return
        problems = check_spec(spec, self.core.applications, self.state.most_slots or None)
        if known:
            problems = [f"id: {spec.id!r} belongs to a job with another specification; choose another id"]
        if problems:
            reason = "; ".join(problems)
            self.emit(JobRefused(job_id=spec.id[:300], reason=reason))
            self.answer(Refused(reason=reason))
            return
        self.jobs[spec.id] = JobRecord(
            spec=spec, submitted_s=self.now_s, accounted_s=self.now_s, reason="waits for the next round"
        )
        self.emit(JobSubmitted(spec=spec, accumulates_alone=self.core.settings.accumulates_alone))
        self.answer(JobAccepted(job_id=spec.id))
        self.want_round("arrival")

    def cancel(self, job_id: str) -> None:
        if job_id in self.ended:
            self.answer(Refused(reason=f"job {job_id!r} is already {self.ended[job_id].state}"))
        elif job_id not in self.jobs:
            self.answer(Refused(reason=f"no job {job_id!r}; `coadapt jobs` lists them"))
        else:
            self.end(job_id, Trigger.CANCELLED, "cancelled on request")
            self.emit(JobCancelled(job_id=job_id))
            self.answer(Done())

    # ------------------------------------------------------------------ agents

    def register(self, request: RegisterAgent) -> None:
        name = request.node.name
        known = self.agents.get(name)
        if known and known.incarnation != request.incarnation:
            self.remove_agent(name, known.incarnation, "it restarted")
        if not known or known.incarnation != request.incarnation:
            self.agents[name] = AgentRecord(node=request.node, incarnation=request.incarnation)
            slots = sum(agent.node.slots for agent in self.agents.values())
            self._set(most_slots=max(self.state.most_slots, slots))
            self.emit(AgentJoined(node=request.node, incarnation=request.incarnation))
            for job in list(self.jobs.values()):
                if job.state is JobState.VERIFYING and not job.allocation:
                    self.change(
                        job.spec.id, Trigger.LOST, "its verification restarts", allocation=self._one_slot()
                    )
            self.orders_changed = True
            self.want_round("nodes")
        run = RunInfo(run_id=self.state.run_id, policy=self.core.policy.name, seed=self.core.settings.seed)
        self.answer(Registered(run=run, orders=orders_of(self.state)))

    def remove_agent(self, name: str, incarnation: str, why: str, *, planned: bool = False) -> None:
        """If the agent leaves as `planned`, that does not count as a failure of its jobs."""
        agent = self.agents.get(name)
        if agent and agent.incarnation == incarnation:
            del self.agents[name]
            self.emit(AgentLeft(node=name, incarnation=incarnation, reason=why))
            for job in list(self.jobs.values()):
                if any(p.node == name for p in (*job.allocation, *job.leaving)):
                    self._node_lost(job, name, why, planned)
            self.want_round("nodes")

    def _node_lost(self, job: JobRecord, name: str, why: str, planned: bool) -> None:
        reason = f"node {name} left: {why}"
        if job.state is JobState.VERIFYING:
            self.change(job.spec.id, Trigger.LOST, reason, allocation=self._one_slot())
        elif job.state is JobState.PREEMPTING:
            self._saver_lost(job, name, reason)
        else:
            rest = tuple(p for p in job.allocation if p.node != name)
            self._regroup(job, reason, rest, failures=job.failures + (0 if planned else 1))

    # ------------------------------------------------------------------ facts

    def report(self, report: Report) -> None:
        agent = self.agents.get(report.node)
        if not agent or agent.incarnation != report.incarnation:
            self.answer(Refused(reason=f"node {report.node!r} is not registered; register first"))
            return
        if report.number > agent.reports:
            self.agents[report.node] = msgspec.structs.replace(agent, reports=report.number)
            for fact in report.facts:
                if fact.job_id in self.jobs:
                    self.apply_fact(self.jobs[fact.job_id], fact, report.node)
        self.answer(Done())

    def apply_fact(self, job: JobRecord, fact: Fact, node: str) -> None:
        """Facts about an earlier generation change nothing, unless they end the job."""
        match fact:
            case GenerationRunning():
                if fact.generation == job.generation and allowed(job.state, Trigger.STEPPED):
                    self.change(job.spec.id, Trigger.STEPPED, job.reason, progress=fact.progress)
            case ReplicaLost():
                if job.state is JobState.PREEMPTING:
                    if fact.generation == job.generation:
                        self._saver_lost(job, node, fact.reason)
                elif fact.generation >= job.group and job.state in (JobState.STARTING, JobState.RUNNING):
                    self._regroup(job, fact.reason, job.allocation, failures=job.failures + 1)
            case JobSaved():
                if fact.generation == job.generation and job.state is JobState.PREEMPTING:
                    self.change(
                        job.spec.id,
                        Trigger.SAVED,
                        "saved; waits for slots",
                        checkpoint=fact.checkpoint,
                        progress=fact.progress,
                        leaving=(),
                    )
                    self.want_round("finish")
            case TargetReached():
                if allowed(job.state, Trigger.REACHED):
                    self._start_verification(job, fact)
            case JobRaised():
                if allowed(job.state, Trigger.FAULTED) and job.state is not JobState.VERIFYING:
                    self.fail(job.spec.id, fact.reason, fact.output_tail)
            case VerificationDone():
                if job.state is JobState.VERIFYING:
                    self._end_verification(job, fact)
            case VerifierLost():
                if job.state is JobState.VERIFYING and node in [p.node for p in job.allocation]:
                    self._restart_verification(job, fact.reason)

    def _saver_lost(self, job: JobRecord, node: str, reason: str) -> None:
        """Rank 0 saves for all replicas, so only the loss of its node can strand a job that is saving."""
        if job.leaving and job.leaving[0].node == node:
            self.change(job.spec.id, Trigger.STRANDED, reason, leaving=())
            self.want_round("failure")

    def _start_verification(self, job: JobRecord, fact: TargetReached) -> None:
        """The verifier gets one of the job's slots, or any other slot if the job has none left."""
        self.change(
            job.spec.id,
            Trigger.REACHED,
            "reached its target, is being verified",
            allocation=tuple(Placement(node=p.node, replicas=1) for p in job.allocation[:1])
            or self._one_slot(),
            leaving=(),
            checkpoint=fact.checkpoint,
            metric=fact.metric,
            progress=fact.progress,
        )
        self.want_round("finish")

    def _restart_verification(self, job: JobRecord, reason: str) -> None:
        failures = job.failures + 1
        if failures > self.core.settings.max_failures:
            self.fail(job.spec.id, f"could not be verified in {failures} attempts; last: {reason}", "")
        else:
            self.change(job.spec.id, Trigger.LOST, reason, allocation=self._one_slot(), failures=failures)

    def _end_verification(self, job: JobRecord, fact: VerificationDone) -> None:
        if fact.findings:
            self.fail(job.spec.id, "verification: " + "; ".join(fact.findings), "")
            return
        self.end(job.spec.id, Trigger.CONFIRMED, "verified")
        self.emit(JobCompleted(job_id=job.spec.id, verified=True, metric=fact.metric, progress=job.progress))

    def _one_slot(self) -> Allocation:
        """A slot for a verifier: on a node with a free slot, else on the first node, where the verifier waits
        until a slot is free; () if there is no node."""
        nodes = free_nodes(self.current_state(), taken_by=HOLDS_SLOTS)
        candidates = [node for node in nodes if node.slots > 0] or list(nodes)
        return (Placement(node=candidates[0].name, replicas=1),) if candidates else ()

    def _regroup(self, job: JobRecord, reason: str, rest: Allocation, failures: int) -> None:
        """Form a new group on the slots that are left; the job fails if it lost replicas too often."""
        if failures > self.core.settings.max_failures:
            self.fail(job.spec.id, f"lost its replicas {failures} times; last: {reason}", "")
            return
        if rest and not can_share(replicas_of(rest), job.spec):
            rest = ()
        assert job.config is not None
        config = job.config
        if rest and rest != job.allocation:
            total = config.total_batch(replicas_of(job.allocation))
            config = batch_config(total, replicas_of(rest), job.spec)
        self.change(
            job.spec.id,
            Trigger.LOST if rest else Trigger.STRANDED,
            reason,
            allocation=rest,
            config=config,
            generation=job.generation + 1,
            group=job.generation + 1,
            failures=failures,
        )
        self.want_round("failure")

    # ------------------------------------------------------------------ rounds

    def take_profiles(self, given: Profiles) -> None:
        # Jobs may have ended since the request to the collector.
        self.profiles |= {p.job_id: p for p in given.profiles if p.job_id in self.jobs}

    def decide(self, trigger: str) -> None:
        settings = self.core.settings
        self._strand_overdue_jobs()
        view = cluster_view(
            self.current_state(),
            self.now_s,
            settings.restart_penalty_s,
            self.core.oracle,
            accumulates_alone=settings.accumulates_alone,
        )
        if not view.jobs:
            return
        self._set(rounds=self.state.rounds + 1)
        seed = settings.seed * 1_000_003 + self.state.rounds
        decision = self._checked_decision(view, seed)
        self._set(memory=decision.memory)
        self.emit(
            RoundDecided(
                round=self.state.rounds,
                trigger=trigger,
                allocations=decision.allocations,
                configs=decision.configs,
                reasons=decision.reasons,
                value=decision.value,
                bound=decision.bound,
            )
        )
        for job in view.jobs:
            self._apply(self.jobs[job.spec.id], decision)

    def _strand_overdue_jobs(self) -> None:
        timeout_s = self.core.settings.leave_timeout_s
        for job in list(self.jobs.values()):
            if job.state is JobState.PREEMPTING and self.now_s - job.changed_s > timeout_s:
                reason = f"no agent confirmed within {timeout_s:g} s that it saved; waits for slots"
                self.change(job.spec.id, Trigger.STRANDED, reason, leaving=())

    def _checked_decision(self, view: ClusterView, seed: int) -> Decision:
        """The policy's decision. If the policy fails, which a user's own may do, everything stays as it
        is."""
        policy = self.core.policy
        try:
            return validated_decision(policy.decide, view, self.state.memory, seed)
        except InvalidDecision as error:
            reason = f"{unchanged_because(policy.name)}{error}"
        return Decision(
            allocations={job.spec.id: job.allocation for job in view.jobs},
            configs={job.spec.id: job.config for job in view.jobs if job.config and job.allocation},
            reasons={job.spec.id: reason for job in view.jobs},
            memory=self.state.memory,
        )

    def _apply(self, job: JobRecord, decision: Decision) -> None:
        job_id = job.spec.id
        allocation = decision.allocations[job_id]
        config = decision.configs.get(job_id)
        reason = decision.reasons[job_id]
        generation = job.generation + 1
        if allocation == job.allocation and (config == job.config or not allocation):
            self.jobs[job_id] = msgspec.structs.replace(job, reason=reason)
        elif not allocation:
            self.change(
                job_id,
                Trigger.PREEMPTED,
                reason,
                allocation=(),
                leaving=job.allocation,
                generation=generation,
                group=generation,
                restarts=job.restarts + 1,
            )
        elif allocation == job.allocation:
            self.change(job_id, Trigger.ALLOCATED, reason, config=config, generation=generation)
        else:
            self.change(
                job_id,
                Trigger.ALLOCATED,
                reason,
                allocation=allocation,
                config=config,
                generation=generation,
                group=generation,
                restarts=job.restarts + (1 if job.allocation else 0),
            )

    # ------------------------------------------------------------------ changes

    def _set(self, **fields: object) -> None:
        """Set fields of the state that are not tables."""
        self.state = msgspec.structs.replace(self.state, **fields)

    def change(self, job_id: str, trigger: Trigger, reason: str, **fields: object) -> JobRecord:
        """Move a job to its next state, and set other fields of its record."""
        job = self.jobs[job_id].accounted(self.now_s)
        new_state = after(job.state, trigger)
        self.jobs[job_id] = msgspec.structs.replace(
            job, state=new_state, reason=reason, changed_s=self.now_s, **fields
        )
        self.orders_changed = self.orders_changed or trigger is not Trigger.STEPPED
        if new_state is not job.state:
            self.emit(JobStateChanged(job_id=job_id, old=job.state, new=new_state, reason=reason))
        return self.jobs[job_id]

    def end(self, job_id: str, trigger: Trigger, reason: str) -> None:
        record = self.change(job_id, trigger, reason, allocation=(), leaving=(), ended_s=self.now_s)
        del self.jobs[job_id]
        self.profiles.pop(job_id, None)
        self.ended = {**self.ended, job_id: record}
        self.want_round("finish")

    def fail(self, job_id: str, reason: str, output_tail: str) -> None:
        self.end(job_id, Trigger.FAULTED, reason)
        self.emit(JobFailed(job_id=job_id, reason=reason, output_tail=output_tail))

    # ------------------------------------------------------------------ commands

    def emit(self, event: Event) -> None:
        self.commands.append(Emit(event))

    def answer(self, reply: Reply) -> None:
        self.commands.append(Answer(reply))

    def want_round(self, trigger: str) -> None:
        self.commands.append(WantRound(trigger))
