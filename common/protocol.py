"""Every message and event of coadapt, declared once.

Bytes are msgpack; `common/codec.py` turns them into these structs and back. Each direction is one tagged
union: the field `type` names the message, unknown types and fields are refused, and a field added later
gets a default, so that older logs stay readable. Units stand in names: `_s` seconds, `_bytes` bytes;
progress is in AdaScale steps, batch sizes are examples.

Who speaks to whom:

    client, agent, collector, logger -> scheduler   Request  -> Reply          request/reply
    scheduler -> collector                          Request  -> Reply          request/reply
    any publisher -> logger                         Request  -> Reply          request/reply
    scheduler -> agents, monitors                   Orders                     pub/sub, versioned, repeated
    any publisher -> logger, collector              EventRecord                pub/sub, numbered, repaired
    agent -> replica                                ReplicaStart, ReplicaOrder pipe
    agent -> verifier                               VerifyStart                pipe
    replica -> agent                                Fact | Event | ReplicaAlive  pipe
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
    """Base of every tagged message; the tag is the class's name."""


# --------------------------------------------------------------------------- facts: agent -> scheduler
# What happened to a job on a node. An agent repeats a report of facts until it is acknowledged.


class GenerationRunning(Message, frozen=True):
    """Rank 0 finished the first step of a generation."""

    job_id: str
    generation: int
    progress: float


class ReplicaLost(Message, frozen=True):
    """A replica died by a signal, or its group broke; survivors keep their state and wait."""

    job_id: str
    generation: int
    reason: str


class JobSaved(Message, frozen=True):
    """All replicas of a preempted job have left; `checkpoint` resumes it."""

    job_id: str
    generation: int
    checkpoint: str
    progress: float


class TargetReached(Message, frozen=True):
    """The target was met on held-out data and the final checkpoint is on disk."""

    job_id: str
    generation: int
    checkpoint: str
    metric: float
    progress: float


class JobRaised(Message, frozen=True):
    """The job itself failed: an exception, a loss that is not finite, an exit that nobody asked for,
    a spent budget. `output_tail` is the end of what it printed."""

    job_id: str
    generation: int
    reason: str
    output_tail: str = ""


class VerificationDone(Message, frozen=True):
    """The verifier's verdict. `findings` is empty exactly when the claim holds."""

    job_id: str
    metric: float
    findings: tuple[str, ...] = ()


class VerifierLost(Message, frozen=True):
    """The verifier died by a signal or took too long: nothing was found out, and another one may try."""

    job_id: str
    reason: str


Fact = (
    GenerationRunning | ReplicaLost | JobSaved | TargetReached | JobRaised | VerificationDone | VerifierLost
)


# --------------------------------------------------------------------------- orders: scheduler -> agents


class JobOrder(Struct, frozen=True):
    """How one job has to run in the whole cluster; each agent picks its own part.

    `group` is the generation in which the process group has to be formed anew: where it equals that of
    the former order, only the batch changes and nobody regroups. An empty allocation: save and leave.
    `checkpoint` is where a job without survivors resumes ("" at its first start). `leaving`, with an empty
    allocation, is the former one: the node of its rank 0 answers for the job's state."""

    spec: JobSpec
    generation: int
    group: int
    allocation: Allocation
    config: JobConfig
    store_host: str
    store_port: int
    checkpoint: str = ""
    leaving: Allocation = ()


class VerifyOrder(Struct, frozen=True):
    """Check a reported completion in a process that did not train it, on `node`, in a slot of the job."""

    spec: JobSpec
    node: str
    checkpoint: str
    metric: float
    progress: float


class Orders(Message, frozen=True):
    """Scheduler -> agents, at every change and every heartbeat. Newer versions replace older ones.
    A job that is not named has to be stopped at once, without saving."""

    run_id: str
    version: int
    jobs: tuple[JobOrder, ...]
    verifications: tuple[VerifyOrder, ...] = ()


class ReplicaStart(Struct, frozen=True):
    """Agent -> replica, once, when the process is made; `ReplicaOrder` follows on its pipe."""

    spec: JobSpec
    replica: str
    """Unique in the run: node, and a counter."""
    job_dir: str
    """Folder of the job's checkpoints and output."""
    checkpoint: str
    """Where to resume when nobody of the group has state; "" starts from scratch."""
    slot_speed: float
    trainer: TrainerConfig
    application_modules: tuple[str, ...] = ()


class VerifyStart(Struct, frozen=True):
    """Agent -> verifier, once, when the process is made. It answers with VerificationDone and Verified."""

    order: VerifyOrder
    slot_speed: float
    application_modules: tuple[str, ...] = ()


class ReplicaOrder(Struct, frozen=True):
    """Agent -> replica: the next generation. `rank` is -1 for a replica that has to leave;
    `world_size` is 0 when all leave, and then rank 0 of the present group saves first.

    Every member of a new group announces itself in the group's store under its new rank: a survivor as
    soon as it has this order, a newcomer when its task is built. All replicas of the present group, leavers
    too, train on until all `world_size` members have announced themselves, and then agree to switch."""

    generation: int
    group: int
    rank: int
    world_size: int
    nodes: int
    config: JobConfig
    store_host: str
    store_port: int
    allocation: Allocation = ()
    """Of the whole job, for the replica's own events."""


# --------------------------------------------------------------------------- events: anybody -> logger


class RunStarted(Message, frozen=True):
    policy: str
    workload: str
    seed: int
    round_s: float
    version: str


class RunEnded(Message, frozen=True):
    reason: str
    active: tuple[str, ...] = ()
    """Jobs that were under way when the stack was stopped, and so have no end."""


class AgentJoined(Message, frozen=True):
    node: Node
    incarnation: str


class AgentLeft(Message, frozen=True):
    node: str
    incarnation: str
    reason: str


class JobSubmitted(Message, frozen=True):
    spec: JobSpec
    accumulates_alone: bool = False
    """Whether one replica above M0 has to accumulate, as in the world of the published traces."""


class JobRefused(Message, frozen=True):
    job_id: str
    reason: str


class RoundDecided(Message, frozen=True):
    """A decision of the policy, with one sentence a job. `value` and `bound` are the policy's objective
    and what no placement could exceed, where the policy has such numbers."""

    round: int
    trigger: str
    allocations: dict[str, Allocation]
    configs: dict[str, JobConfig]
    reasons: dict[str, str]
    value: float | None = None
    bound: float | None = None
    decision_s: float = 0.0


class JobStateChanged(Message, frozen=True):
    job_id: str
    old: JobState
    new: JobState
    reason: str


class ReplicaStarted(Message, frozen=True):
    job_id: str
    node: str
    replica: str
    """Unique in the run: node, and a counter."""
    pid: int
    generation: int


class ReplicaExited(Message, frozen=True):
    job_id: str
    node: str
    replica: str
    exit_code: int
    """Negative: the signal that ended it."""


class GenerationStarted(Message, frozen=True):
    """First step of a new process group. `seconds_lost`: from the last step of the former generation, or
    from the start of the replicas where there was none, to the end of this first step, less the time that
    the step itself took."""

    job_id: str
    generation: int
    old_replicas: int
    allocation: Allocation
    config: JobConfig
    state_from: str
    """One of "survivor", "checkpoint", "scratch"."""
    seconds_lost: float
    progress: float
    progress_lost: float = 0.0
    """Work done before a failure that the new generation has to do again."""
    first_step_s: float = 0.0
    """Time of that first step: with `seconds_lost` it is how long no step was completed."""


class BatchChanged(Message, frozen=True):
    """A change of batch size alone, without regrouping."""

    job_id: str
    generation: int
    config: JobConfig
    total_batch: int
    step: int


class TrainingSample(Message, frozen=True):
    """What rank 0 of a job saw since its last sample, all in one configuration.

    Medians over the window's steps; steps right after a change are left out of the times, and `timed_steps`
    says how many are in them (with 0, the times are 0). A pass that only accumulates takes `accumulation_s`
    (of a step without such passes: would take), the last pass of a step and all else in it `step_s`, the
    all-reduce in that `sync_s`. Totals count from the job's start."""

    job_id: str
    generation: int
    nodes: int
    replicas: int
    config: JobConfig
    window_s: float
    steps: int
    timed_steps: int
    accumulation_s: float
    step_s: float
    sync_s: float
    total_steps: int
    total_examples: int
    progress: float
    epoch: int
    loss: float
    gain: float
    statistics: GradientStatistics | None = None


class Evaluated(Message, frozen=True):
    job_id: str
    progress: float
    step: int
    metric: float
    reached: bool


class CheckpointSaved(Message, frozen=True):
    job_id: str
    path: str
    digest: str
    size_bytes: int
    save_s: float
    progress: float
    reason: str
    """One of "preempted", "final", "periodic"."""


class CheckpointFellBack(Message, frozen=True):
    """A checkpoint could not be used; training resumes from an older one, or from the start ("")."""

    job_id: str
    path: str
    fallback: str
    reason: str


class VerificationStarted(Message, frozen=True):
    job_id: str
    node: str
    replica: str
    pid: int


METRIC_TOLERANCE = 1e-4
"""Between the reported metric and that of the verifier: the acceptance rule of a completion."""


class Verified(Message, frozen=True):
    """What the verifier found. `ok` exactly when `findings` is empty."""

    job_id: str
    ok: bool
    metric: float
    reported_metric: float
    epochs: int
    """Finished epochs whose ledger was checked."""
    findings: tuple[str, ...] = ()


class JobCompleted(Message, frozen=True):
    job_id: str
    verified: bool
    metric: float
    progress: float


class JobFailed(Message, frozen=True):
    job_id: str
    reason: str
    output_tail: str = ""


class JobCancelled(Message, frozen=True):
    job_id: str


class ModelFitted(Message, frozen=True):
    """`error` is the fit's root mean squared logarithmic error over the profile's points."""

    job_id: str
    parameters: ThroughputParameters
    statistics: GradientStatistics | None
    error: float
    points: int
    fit_s: float


class BadMessage(Message, frozen=True):
    """Bytes that a service refused; it goes on."""

    service: str
    error: str


class EventsDropped(Message, frozen=True):
    """A logger could not take over events that it knows to be missing; the audit reports it."""

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
    """One line of events.jsonl. `seq` counts from 1 within (run_id, source, incarnation); `t_s` is the
    source's monotonic clock, `wall_s` its UNIX time."""

    run_id: str
    source: str
    incarnation: str
    seq: int
    t_s: float
    wall_s: float
    event: Event
    schema: int = EVENT_SCHEMA


class ReplicaAlive(Message, frozen=True):
    """Replica -> agent, about once a second while it looks at its orders: it does not hang."""


ReplicaMessage = Fact | Event | ReplicaAlive


# --------------------------------------------------------------------------- requests and replies


class SubmitJob(Message, frozen=True):
    """Client -> scheduler. Reply: JobAccepted or Refused. The id is the client's: the same id and spec
    again is accepted as a duplicate, the same id with another spec is refused."""

    spec: JobSpec


class CancelJob(Message, frozen=True):
    """Client -> scheduler. Reply: Done, or Refused when the job is unknown or has ended."""

    job_id: str


class GetJobs(Message, frozen=True):
    """Client -> scheduler. Reply: JobTable, with all active jobs and the newest `ended` of the others."""

    ended: int = 1000


class RegisterAgent(Message, frozen=True):
    """Agent -> scheduler, at its start and whenever its heartbeat is not recognised. Reply: Registered.

    A new `incarnation` of a known node means that all replicas of the former one are gone."""

    node: Node
    incarnation: str


class Heartbeat(Message, frozen=True):
    """Agent -> scheduler, every `heartbeat_s`. Reply: Orders when `orders_version` is not the newest, Done
    when it is, Refused when the agent has to register (again)."""

    node: str
    incarnation: str
    orders_version: int


class Report(Message, frozen=True):
    """Agent -> scheduler. Reply: Done, or Refused when the agent has to register. `number` counts an
    agent's reports from 1, so that a repetition is recognised."""

    node: str
    incarnation: str
    number: int
    facts: tuple[Fact, ...]


class LeaveAgent(Message, frozen=True):
    """Agent -> scheduler, when it stops. Reply: Done."""

    node: str
    incarnation: str


class GetRun(Message, frozen=True):
    """Collector -> scheduler, at its start. Reply: Run."""


class GetProfiles(Message, frozen=True):
    """Scheduler -> collector, before a round. Reply: Profiles of the jobs named.

    `applications` and `targets` are theirs, in the same order, so that the collector can add what it
    remembers of other jobs; without them it tells what each job has shown itself."""

    job_ids: tuple[str, ...]
    applications: tuple[str, ...] = ()
    targets: tuple[float, ...] = ()


class GetAcknowledged(Message, frozen=True):
    """Publisher -> logger. Reply: Acknowledged."""

    run_id: str
    source: str
    incarnation: str


class RepairEvents(Message, frozen=True):
    """Publisher -> logger: events that the logger has not acknowledged. Reply: Acknowledged."""

    records: tuple[EventRecord, ...]


class GoodBye(Message, frozen=True):
    """Publisher -> logger: nothing more comes from this incarnation. Reply: Acknowledged."""

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


class JobAccepted(Message, frozen=True):
    job_id: str
    duplicate: bool = False


class Done(Message, frozen=True):
    """It is done, or needed no doing."""


class Refused(Message, frozen=True):
    """One line for a person: which field, which value, what is allowed."""

    reason: str


class JobRow(Struct, frozen=True):
    """A job as clients see it. Times are seconds on the scheduler's monotonic clock."""

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
    """Of the last decision, or of the end."""


class JobTable(Message, frozen=True):
    run_id: str
    policy: str
    now_s: float
    rounds: int
    nodes: tuple[Node, ...]
    jobs: tuple[JobRow, ...]
    left_out: int = 0
    """Ended jobs that are not in `jobs`."""


class RunInfo(Message, frozen=True):
    """What a service has to know of the run that it takes part in."""

    run_id: str
    policy: str
    seed: int


class Registered(Message, frozen=True):
    """The agent takes part; `orders` is what it has to do now."""

    run: RunInfo
    orders: Orders


class Profiles(Message, frozen=True):
    profiles: tuple[JobProfile, ...]


class Acknowledged(Message, frozen=True):
    """The logger has every event up to `seq` of that source on disk, without a gap."""

    seq: int


Reply = JobAccepted | Done | Refused | JobTable | RunInfo | Registered | Profiles | Acknowledged | Orders


class RequestFrame(Struct, frozen=True):
    """What travels: `id` is the client's, and a repetition carries the same one."""

    id: str
    request: Request
    version: int = PROTOCOL_VERSION


class ReplyFrame(Struct, frozen=True):
    """What travels back: `id` repeats the request's."""

    id: str
    reply: Reply
    version: int = PROTOCOL_VERSION


# --------------------------------------------------------------------------- the scheduler's journal


class AgentSilent(Message, frozen=True):
    """Nothing was heard from an agent for `agent_timeout_s`."""

    node: str
    incarnation: str


class RoundDue(Message, frozen=True):
    """`trigger` says why: "interval", "arrival", "finish", "failure" or "nodes"."""

    trigger: str


CoreInput = SubmitJob | CancelJob | RegisterAgent | LeaveAgent | Report | Profiles | AgentSilent | RoundDue


class JournalEntry(Struct, frozen=True):
    """An input of the scheduler's core, written before it is acted on; `now_s` is the scheduler's
    monotonic clock."""

    now_s: float
    input: CoreInput
    events: int = 0
    """How many events all incarnations of the scheduler had published in this run before this input."""
