"""One step of the core: working copies of the state's tables, the commands so far, and the moves of a job
along its life cycle. The state that came in is never changed."""

import msgspec

from common.protocol import Event, JobFailed, JobStateChanged, Registered, Reply
from services.scheduler.commands import Answer, Command, Emit, SendOrders, WantRound
from services.scheduler.job_states import Trigger, after
from services.scheduler.state import JobRecord, State, orders_of


class Step:
    """One step: working copies of the tables, and the commands so far."""

    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.jobs = dict(state.jobs)
        self.ended = state.ended
        self.agents = dict(state.agents)
        self.profiles = dict(state.profiles)
        self.memory = state.memory
        self.rounds = state.rounds
        self.most_slots = state.most_slots
        self.orders_changed = False
        self.commands: list[Command] = []

    def result(self) -> tuple[State, tuple[Command, ...]]:
        state = self.present()
        if self.orders_changed:
            state = msgspec.structs.replace(state, orders_version=state.orders_version + 1)
            self.commands.append(SendOrders())
        commands = tuple(
            Answer(Registered(run=command.reply.run, orders=orders_of(state)))
            if isinstance(command, Answer) and isinstance(command.reply, Registered)
            else command
            for command in self.commands
        )
        return state, commands

    def present(self) -> State:
        return msgspec.structs.replace(
            self.state,
            jobs=self.jobs,
            ended=self.ended,
            agents=self.agents,
            profiles=self.profiles,
            memory=self.memory,
            rounds=self.rounds,
            most_slots=self.most_slots,
        )

    def emit(self, event: Event) -> None:
        self.commands.append(Emit(event))

    def answer(self, reply: Reply) -> None:
        self.commands.append(Answer(reply))

    def want_round(self, trigger: str) -> None:
        self.commands.append(WantRound(trigger))

    def change(self, job_id: str, trigger: Trigger, reason: str, **fields: object) -> JobRecord:
        """Move a job along the table; other fields change with it."""
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
