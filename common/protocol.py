"""The protocol: every message and every event of coadapt, declared once.

Encoding. Messages are msgpack maps; `common/codec.py` encodes and decodes them. The key `type` holds the name
of the class. Unknown types and unknown fields are refused. A field that is added later has a default, so old
event logs stay readable.

Units. `_s` means seconds and `_bytes` bytes. Batch sizes are examples. Progress is in AdaScale steps: steps
at the initial batch size M0. `t_s` and `now_s` are monotonic clocks, `wall_s` is UNIX time.

Names. A *generation* counts the orders for one job: each change of its replicas or of its batch is a new one.
A *group* is a process group; it is named by the generation that formed it. An *incarnation* is a name that a
process chooses at each start. An *allocation* lists the replicas of a job by node, in order of rank.

    from -> to                                      message                       channel
    client, agent, collector -> scheduler           Request, answered by Reply    request/reply
    scheduler -> collector                          Request, answered by Reply    request/reply
    publisher of events -> logger                   Request, answered by Reply    request/reply
    scheduler -> agents, monitors                   Orders                        publish/subscribe, repeated
    publisher of events -> logger, collector        EventRecord                   publish/subscribe, repaired
    agent -> replica                                ReplicaStart, ReplicaOrder    pipe
    agent -> verifier                               VerifyStart                   pipe
    replica, verifier -> agent                      Fact, Event, ReplicaAlive     pipe

Any request may be answered by Refused, with one line that says which value is wrong and what is allowed. A
client repeats a request under the same id until it is answered, and the server carries it out once.
"""

from common.config import TrainerConfig
from common.types import (
    Allocation,
    GradientStatistics,
    JobConfig,
    JobProfile,
    JobSpec,
    JobState,
    Node,
    Struct,
    ThroughputParameters,
)

PROTOCOL_VERSION = 1
EVENT_SCHEMA = 2


class Message(Struct, frozen=True, tag_field="type", tag=True):
    """Base of every tagged message; the tag is the name of the class."""


# --------------------------------------------------------------------------- facts
# What happened to a job on a node. A replica or verifier sends facts to its agent, and the agent sends them
# to the scheduler in a Report.


class GenerationRunning(Message, frozen=True):
    """The job has completed the first step of a generation. From rank 0."""

    job_id: str
    generation: int
    progress: float


class ReplicaLost(Message, frozen=True):
    """A replica was killed, or its group broke. The surviving replicas keep their state and wait for the next
    generation. From the agent, or from a replica that saw the group break."""

    job_id: str
    generation: int
    reason: str


class JobSaved(Message, frozen=True):
    """All replicas of a preempted job have left. From rank 0."""

    job_id: str
    generation: int
    checkpoint: str
    """Path from which the job can resume."""
    progress: float


class TargetReached(Message, frozen=True):
    """The job has met its target on held-out data, and its final checkpoint is on disk. From rank 0. The
    scheduler has the claim verified before the job counts as completed."""

    job_id: str
    generation: int
    checkpoint: str
    metric: float
    progress: float


class JobRaised(Message, frozen=True):
    """The job itself is at fault: it raised an exception, diverged, exited without an order, or spent its
    progress budget. From a replica, or from the agent that saw it exit."""

    job_id: str
    generation: int
    reason: str
    output_tail: str = ""
    """The end of what the replica printed."""


class VerificationDone(Message, frozen=True):
    """The verifier has checked a reported completion. From the verifier."""

    job_id: str
    metric: float
    """As measured by the verifier."""
    findings: tuple[str, ...] = ()
    """What is wrong with the claim, one sentence each; empty if it holds."""


class VerifierLost(Message, frozen=True):
    """The verifier was killed or took longer than `verify_timeout_s`. Nothing was decided; the scheduler
    starts another one. From the agent."""

    job_id: str
    reason: str


Fact = (
    GenerationRunning | ReplicaLost | JobSaved | TargetReached | JobRaised | VerificationDone | VerifierLost
)


# --------------------------------------------------------------------------- orders


class JobOrder(Struct, frozen=True):
    """How one job is to run on the whole cluster. Each agent carries out the part of its own node."""

    spec: JobSpec
    generation: int
    group: int
    """The generation that formed the process group. If it is the same as in the previous order, only the
    batch changes and the replicas keep their group."""
    allocation: Allocation
    """Empty: the replicas save the state and leave."""
    config: JobConfig
    store_host: str
    store_port: int
    """Where the group meets: the store of its first node."""
    checkpoint: str = ""
    """Where a job without surviving replicas resumes; "" at its first start."""
    leaving: Allocation = ()
    """With an empty `allocation`: the previous allocation. The node of its rank 0 reports the job's state."""


class VerifyOrder(Struct, frozen=True):
    """Check a reported completion, on `node`, in a slot of the job. The process must not have trained it."""

    spec: JobSpec
    node: str
    checkpoint: str
    metric: float
    progress: float


class Orders(Message, frozen=True):
    """Scheduler -> agents and monitors, at every change and every `heartbeat_s`.

    The desired state of the whole cluster. A newer version replaces an older one. Agents stop a job that is
    not listed at once, without saving it."""

    run_id: str
    version: int
    """Grows by one with every change."""
    jobs: tuple[JobOrder, ...]
    verifications: tuple[VerifyOrder, ...] = ()


class ReplicaStart(Struct, frozen=True):
    """Agent -> replica, once, when the process starts. A ReplicaOrder follows on the pipe."""

    spec: JobSpec
    replica: str
    """Name of the replica: its node and a counter, unique in the run."""
    job_dir: str
    """Folder of the job's checkpoints and output."""
    checkpoint: str
    """Where to resume if no member of the group has the state in memory; "" starts from scratch."""
    slot_speed: float
    """Fraction of a core that the replica may use."""
    trainer: TrainerConfig
    application_modules: tuple[str, ...] = ()
    """Modules with the user's own applications."""


class VerifyStart(Struct, frozen=True):
    """Agent -> verifier, once, when the process starts. The verifier sends Verified and VerificationDone."""

    order: VerifyOrder
    slot_speed: float
    """Fraction of a core that the verifier may use."""
    application_modules: tuple[str, ...] = ()
    """Modules with the user's own applications."""


class ReplicaOrder(Struct, frozen=True):
    """Agent -> replica, at every new generation of its job.

    Each member of a new group announces itself in the group's store under its new rank: a survivor when it
    receives this order, a newcomer when it has built its task. All replicas of the old group, those that will
    leave included, train on until all `world_size` members are announced, and then agree to switch."""

    generation: int
    group: int
    """The generation that formed the process group; the same as before: only the batch changes."""
    rank: int
    """-1: this replica leaves."""
    world_size: int
    """Replicas in the group. 0: all leave, and rank 0 of the old group saves the state first."""
    nodes: int
    """Nodes that the group spans."""
    config: JobConfig
    store_host: str
    store_port: int
    allocation: Allocation = ()
    """Allocation of the whole job, for the events that the replica sends."""


# --------------------------------------------------------------------------- events
# What happened in a run. The event log is the only record of a run, and `analysis` reads nothing else.


class RunStarted(Message, frozen=True):
    """From the scheduler: the first event of a run."""

    policy: str
    workload: str
    """Name of the workload; "" if jobs are submitted one by one."""
    seed: int
    round_s: float
    version: str
    """Version of coadapt."""


class RunEnded(Message, frozen=True):
    """From the scheduler, when it stops."""

    reason: str
    active: tuple[str, ...] = ()
    """Jobs that had not ended when the stack was stopped."""


class AgentJoined(Message, frozen=True):
    """From the scheduler: an agent has registered."""

    node: Node
    incarnation: str


class AgentLeft(Message, frozen=True):
    """From the scheduler: an agent has said that it stops, or was silent for `agent_timeout_s`."""

    node: str
    incarnation: str
    reason: str


class JobSubmitted(Message, frozen=True):
    """From the scheduler: a job was accepted."""

    spec: JobSpec
    accumulates_alone: bool = False
    """Whether a single replica above M0 must accumulate gradients, as in the published traces."""


class JobRefused(Message, frozen=True):
    """From the scheduler: a job was not accepted."""

    job_id: str
    reason: str


class RoundDecided(Message, frozen=True):
    """From the scheduler: a decision of the policy."""

    round: int
    """Counts from 1."""
    trigger: str
    """Why the round started: see RoundDue."""
    allocations: dict[str, Allocation]
    configs: dict[str, JobConfig]
    reasons: dict[str, str]
    """One sentence for each job. All three are by job id."""
    value: float | None = None
    """The policy's objective at this decision; None if the policy has no such number."""
    bound: float | None = None
    """A value that no placement can exceed; None if the policy has no such number."""
    decision_s: float = 0.0
    """How long the decision took."""


class JobStateChanged(Message, frozen=True):
    """From the scheduler: a transition in the life cycle, see `common/job_states.py`."""

    job_id: str
    old: JobState
    new: JobState
    reason: str


class ReplicaStarted(Message, frozen=True):
    """From the agent: it has started the process of a replica."""

    job_id: str
    node: str
    replica: str
    """Name of the replica: its node and a counter, unique in the run."""
    pid: int
    generation: int


class ReplicaExited(Message, frozen=True):
    """From the agent: the process of a replica has ended."""

    job_id: str
    node: str
    replica: str
    exit_code: int
    """Negative: the signal that ended it."""


class GenerationStarted(Message, frozen=True):
    """A new process group has completed its first step. From the rank that brought the state."""

    job_id: str
    generation: int
    old_replicas: int
    """Replicas of the previous group; 0 if the rank that brought the state was in none."""
    allocation: Allocation
    config: JobConfig
    state_from: str
    """One of "survivor", "checkpoint", "scratch"."""
    seconds_lost: float
    """How long the job did not train: from the last step of the previous group, or from the start of the
    process if there was none, to the start of this first step."""
    progress: float
    progress_lost: float = 0.0
    """Progress made before a failure that the new group has to make again."""
    first_step_s: float = 0.0
    """How long the first step took; together with `seconds_lost`, how long no step was completed."""


class BatchChanged(Message, frozen=True):
    """The batch size has changed and the group has not. From rank 0."""

    job_id: str
    generation: int
    config: JobConfig
    total_batch: int
    step: int
    """Completed steps of the job at the time of the change."""


class TrainingSample(Message, frozen=True):
    """What rank 0 of a job has measured since its last sample, all in one configuration. Every
    `sample_every_s`, and before a change of generation.

    Times are medians over the steps in the window. The first `warmup_steps` of a generation are not timed."""

    job_id: str
    generation: int
    nodes: int
    replicas: int
    config: JobConfig
    window_s: float
    """Length of the window."""
    steps: int
    """Steps in the window."""
    timed_steps: int
    """Steps that the times are medians of; with 0, all times are 0."""
    accumulation_s: float
    """A pass that only accumulates gradients. If a step has no such pass, what one would take."""
    step_s: float
    """The last pass of a step, its synchronisation and its update."""
    sync_s: float
    """The all-reduce; it is part of `step_s`."""
    total_steps: int
    total_examples: int
    """Totals since the start of the job."""
    progress: float
    epoch: int
    """Finished epochs."""
    loss: float
    """Mean over the window."""
    gain: float
    """AdaScale's gain of the last step."""
    statistics: GradientStatistics | None = None


class Evaluated(Message, frozen=True):
    """The job was evaluated on its held-out data. From rank 0."""

    job_id: str
    progress: float
    step: int
    metric: float
    reached: bool
    """Whether the metric meets the target."""


class CheckpointSaved(Message, frozen=True):
    """A checkpoint is on disk. From the replica that saved it."""

    job_id: str
    path: str
    digest: str
    """SHA-256 of the payload, as hexadecimal digits."""
    size_bytes: int
    save_s: float
    progress: float
    reason: str
    """One of "preempted", "final", "periodic"."""


class CheckpointFellBack(Message, frozen=True):
    """A checkpoint could not be read or saved. From the replica that tried."""

    job_id: str
    path: str
    fallback: str
    """The checkpoint that is used instead; "" for none, so training would start from scratch."""
    reason: str


class VerificationStarted(Message, frozen=True):
    """From the agent: it has started the process of a verifier."""

    job_id: str
    node: str
    replica: str
    pid: int


METRIC_TOLERANCE = 1e-4
"""A completion is accepted if the reported and the verified metric differ by at most this."""


class Verified(Message, frozen=True):
    """The verdict on a reported completion. From the verifier."""

    job_id: str
    ok: bool
    """True exactly when `findings` is empty."""
    metric: float
    """As measured by the verifier."""
    reported_metric: float
    epochs: int
    """Finished epochs whose ledger was checked."""
    findings: tuple[str, ...] = ()
    """What is wrong with the claim, one sentence each."""


class JobCompleted(Message, frozen=True):
    """From the scheduler: the job has reached its target and a verifier has confirmed it."""

    job_id: str
    verified: bool
    metric: float
    progress: float


class JobFailed(Message, frozen=True):
    """From the scheduler: the job has ended without reaching its target."""

    job_id: str
    reason: str
    output_tail: str = ""
    """The end of what the replica printed, if the job itself was at fault."""


class JobCancelled(Message, frozen=True):
    """From the scheduler: a client has cancelled the job."""

    job_id: str


class ModelFitted(Message, frozen=True):
    """From the collector: it has fitted the throughput model of a job."""

    job_id: str
    parameters: ThroughputParameters
    statistics: GradientStatistics | None
    error: float
    """Root mean squared logarithmic error of the fit over the points of the profile."""
    points: int
    """Points of the profile."""
    fit_s: float
    """How long the fit took."""


class BadMessage(Message, frozen=True):
    """From any service: it has refused a message that it could not decode, and goes on."""

    service: str
    error: str


class EventsDropped(Message, frozen=True):
    """From the logger: events `first_seq` to `last_seq` of a source are lost. The audit reports them."""

    source: str
    incarnation: str
    first_seq: int
    last_seq: int


Event = (
    RunStarted
    | RunEnded
    | AgentJoined
    | AgentLeft
    | JobSubmitted
    | JobRefused
    | RoundDecided
    | JobStateChanged
    | ReplicaStarted
    | ReplicaExited
    | GenerationStarted
    | BatchChanged
    | TrainingSample
    | Evaluated
    | CheckpointSaved
    | CheckpointFellBack
    | VerificationStarted
    | Verified
    | JobCompleted
    | JobFailed
    | JobCancelled
    | ModelFitted
    | BadMessage
    | EventsDropped
)


class EventRecord(Struct, frozen=True):
    """An event and where it comes from: what publishers send, and one line of events.jsonl."""

    run_id: str
    source: str
    """The process that published it, such as "scheduler" or "agent-<node>"."""
    incarnation: str
    seq: int
    """Counts from 1 within (run_id, source, incarnation)."""
    t_s: float
    """Monotonic clock of the source."""
    wall_s: float
    """UNIX time of the source."""
    event: Event
    schema: int = EVENT_SCHEMA


class ReplicaAlive(Message, frozen=True):
    """Replica -> agent, about once a second while it reads its orders. An agent ends a replica that does not
    send it for `hang_timeout_s`."""


ReplicaMessage = Fact | Event | ReplicaAlive


# --------------------------------------------------------------------------- requests


class SubmitJob(Message, frozen=True):
    """Client -> scheduler. Reply: JobAccepted or Refused.

    The client chooses the job id. The same id with the same specification is accepted again as a duplicate;
    the same id with another specification is refused."""

    spec: JobSpec


class CancelJob(Message, frozen=True):
    """Client -> scheduler. Reply: Done, or Refused if the job is unknown or has ended."""

    job_id: str


class GetJobs(Message, frozen=True):
    """Client -> scheduler. Reply: JobTable."""

    ended: int = 1000
    """List at most this many of the jobs that have ended, the newest ones."""


class RegisterAgent(Message, frozen=True):
    """Agent -> scheduler, at its start and whenever the scheduler refuses its heartbeat. Reply: Registered.

    A new `incarnation` of a known node means that all replicas of the old one are gone."""

    node: Node
    incarnation: str


class Heartbeat(Message, frozen=True):
    """Agent -> scheduler, every `heartbeat_s`. Reply: Done; Orders if the agent does not have the newest
    version; Refused if the agent must register first."""

    node: str
    incarnation: str
    orders_version: int
    """Version of the newest orders that the agent has."""


class Report(Message, frozen=True):
    """Agent -> scheduler, when something has happened to a job on its node. Repeated until answered. Reply:
    Done, or Refused if the agent must register first."""

    node: str
    incarnation: str
    number: int
    """Counts the reports of this incarnation from 1, so that the scheduler recognises a repetition."""
    facts: tuple[Fact, ...]


class LeaveAgent(Message, frozen=True):
    """Agent -> scheduler, when it stops. Reply: Done."""

    node: str
    incarnation: str


class GetRun(Message, frozen=True):
    """Collector -> scheduler, at its start and about once a second: a scheduler may start a new run. Reply:
    RunInfo."""


class GetProfiles(Message, frozen=True):
    """Scheduler -> collector, before a round. Reply: Profiles, one for each job."""

    job_ids: tuple[str, ...]
    applications: tuple[str, ...] = ()
    """Application of each job, so that the collector can add what it remembers of other jobs; empty: it only
    sends what each job has shown itself."""
    targets: tuple[float, ...] = ()
    """Target of each job; empty where `applications` is."""


class GetAcknowledged(Message, frozen=True):
    """Publisher of events -> logger, about once a second while events are unacknowledged. Reply:
    Acknowledged."""

    run_id: str
    source: str
    incarnation: str


class RepairEvents(Message, frozen=True):
    """Publisher of events -> logger: repeats events that the logger lacks. Reply: Acknowledged."""

    records: tuple[EventRecord, ...]


class GoodBye(Message, frozen=True):
    """Publisher of events -> logger: this incarnation publishes nothing more. Reply: Acknowledged."""

    run_id: str
    source: str
    incarnation: str


Request = (
    SubmitJob
    | CancelJob
    | GetJobs
    | RegisterAgent
    | Heartbeat
    | Report
    | LeaveAgent
    | GetRun
    | GetProfiles
    | GetAcknowledged
    | RepairEvents
    | GoodBye
)


# --------------------------------------------------------------------------- replies


class JobAccepted(Message, frozen=True):
    """The scheduler has accepted a job."""

    job_id: str
    duplicate: bool = False
    """The job had been accepted before."""


class Done(Message, frozen=True):
    """The request has been carried out, or there was nothing to do."""


class Refused(Message, frozen=True):
    """The request was not carried out."""

    reason: str
    """One line for a person: which field, which value, what is allowed."""


class JobRow(Struct, frozen=True):
    """A job as clients see it. Times are on the scheduler's monotonic clock."""

    id: str
    application: str
    state: JobState
    allocation: Allocation
    config: JobConfig | None
    submitted_s: float
    ended_s: float | None
    progress: float
    max_progress: float
    metric: float | None
    target: float
    restarts: int
    reason: str
    """Reason of the last decision about the job, or why it ended."""


class JobTable(Message, frozen=True):
    """The scheduler's jobs: all active ones and the newest of those that have ended."""

    run_id: str
    policy: str
    now_s: float
    """The scheduler's monotonic clock."""
    rounds: int
    """Rounds so far."""
    nodes: tuple[Node, ...]
    jobs: tuple[JobRow, ...]
    left_out: int = 0
    """Ended jobs that are not in `jobs`."""


class RunInfo(Message, frozen=True):
    """The run that a service takes part in."""

    run_id: str
    policy: str
    seed: int


class Registered(Message, frozen=True):
    """The agent takes part in the run."""

    run: RunInfo
    orders: Orders
    """The newest orders."""


class Profiles(Message, frozen=True):
    """The profiles of the requested jobs, in the same order."""

    profiles: tuple[JobProfile, ...]


class Acknowledged(Message, frozen=True):
    """The logger has written every event of that source up to `seq`, without a gap."""

    seq: int


Reply = JobAccepted | Done | Refused | JobTable | RunInfo | Registered | Profiles | Acknowledged | Orders


class RequestFrame(Struct, frozen=True):
    """A request on the wire. The client chooses `id`; a repetition has the same one."""

    id: str
    request: Request
    version: int = PROTOCOL_VERSION


class ReplyFrame(Struct, frozen=True):
    """A reply on the wire."""

    id: str
    """The id of the request; "" if it could not be read."""
    reply: Reply
    version: int = PROTOCOL_VERSION


# --------------------------------------------------------------------------- the scheduler's journal
# The inputs of the scheduler's core: requests and profiles, and two that the scheduler gives itself.


class AgentSilent(Message, frozen=True):
    """The scheduler has heard nothing from an agent for `agent_timeout_s`."""

    node: str
    incarnation: str


class RoundDue(Message, frozen=True):
    """The policy is to decide again."""

    trigger: str
    """One of "interval", "arrival", "finish", "failure", "nodes"."""


CoreInput = SubmitJob | CancelJob | RegisterAgent | LeaveAgent | Report | Profiles | AgentSilent | RoundDue


class JournalEntry(Struct, frozen=True):
    """One line of the journal. It is written before the core acts on the input."""

    now_s: float
    """The scheduler's monotonic clock."""
    input: CoreInput
    events: int = 0
    """Events that all incarnations of the scheduler had published in this run before this input."""
