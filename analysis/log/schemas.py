"""The columns of every frame: one `FrameSchema` for each kind of event, declared once.

A column takes its values from the field of the event that has its name, or from the one in `path`. Every
table also has the columns of `PLACE`. A table of several types of events has null where a type has no such
field.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import polars as pl

from common.protocol import (
    AgentJoined,
    AgentLeft,
    BadMessage,
    BatchChanged,
    CheckpointFellBack,
    CheckpointSaved,
    Evaluated,
    EventsDropped,
    GenerationStarted,
    JobCancelled,
    JobCompleted,
    JobFailed,
    JobRefused,
    JobStateChanged,
    JobSubmitted,
    ModelFitted,
    ReplicaExited,
    ReplicaStarted,
    RoundDecided,
    RunEnded,
    RunStarted,
    TrainingSample,
    VerificationStarted,
    Verified,
)
from common.types import Node, Struct

TEXT, WHOLE, REAL, YES_NO = pl.String(), pl.Int64(), pl.Float64(), pl.Boolean()
ROW = pl.UInt32()
NAME = pl.Categorical()
"""Text that repeats."""


@dataclass(frozen=True)
class FrameColumn:
    """`meaning` says what a value is, and its unit. `path` is the field, with a dot into a nested struct;
    `read` makes the value of the column from that of the field."""

    dtype: pl.DataType
    meaning: str
    path: str = ""
    read: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class FrameSchema:
    """The columns that events of these types have."""

    types: tuple[type[Struct], ...]
    columns: Mapping[str, FrameColumn]

    @property
    def schema(self) -> dict[str, pl.DataType]:
        return {name: column.dtype for name, column in self.columns.items()}


def _node_name(node: Node | str) -> str:
    """A node that joins is described, one that leaves is named."""
    return node if isinstance(node, str) else node.name


def _of_node(name: str) -> Callable[[Node | str], Any]:
    get = attrgetter(name)
    return lambda node: None if isinstance(node, str) else get(node)


PLACE = {
    "row": FrameColumn(ROW, "row of the event in `events`"),
    "position": FrameColumn(ROW, "place of the event in the order of time of all sources, from 0"),
    "time_s": FrameColumn(REAL, "when, in seconds on the scheduler's clock"),
}
"""The first columns of every table; a table of several types of events has a column `type` as well."""

EVENTS = {
    "line": FrameColumn(pl.UInt32(), "number of the line in the log, from 1"),
    "run_id": FrameColumn(NAME, "run that the event belongs to"),
    "source": FrameColumn(NAME, "service that published the event"),
    "incarnation": FrameColumn(NAME, "one life of that service: it changes with each restart"),
    "seq": FrameColumn(WHOLE, "number of the event within (source, incarnation), from 1"),
    "t_s": FrameColumn(REAL, "seconds on the source's own monotonic clock"),
    "wall_s": FrameColumn(REAL, "UNIX time in seconds"),
    "schema": FrameColumn(WHOLE, "version of the event schema"),
    "type": FrameColumn(NAME, "type of the event"),
}
"""One row for each valid line of the log, in the order of the file."""
ADDED_TO_EVENTS = {
    "stream": FrameColumn(ROW, "number of (source, incarnation), in the order in which they appear"),
    "time_s": FrameColumn(REAL, "when, in seconds on the scheduler's clock"),
    "position": FrameColumn(ROW, "place in the order of time of all sources, from 0; null where `repeated`"),
    "repeated": FrameColumn(YES_NO, "an earlier line has the same source, incarnation and seq"),
}

JOB = {"job_id": FrameColumn(TEXT, "job")}
GENERATION = {"generation": FrameColumn(WHOLE, "generation of the job's process group or configuration")}
CONFIG = {
    "atomic_batch": FrameColumn(
        WHOLE, "examples that one replica puts through one pass", "config.atomic_batch"
    ),
    "accumulation": FrameColumn(WHOLE, "passes of a step that only accumulate", "config.accumulation"),
}
STATISTICS = {
    "sqr": FrameColumn(REAL, "squared norm of the gradient, estimated at M0", "statistics.sqr"),
    "var": FrameColumn(REAL, "trace of the gradient's covariance at M0, estimated", "statistics.var"),
    "trusted": FrameColumn(YES_NO, "whether the estimates may be believed", "statistics.trusted"),
}
"""Null where an event has no gradient statistics."""

TABLES: Mapping[str, FrameSchema] = {
    "runs": FrameSchema(
        (RunStarted, RunEnded),
        {
            "policy": FrameColumn(TEXT, "scheduling policy"),
            "workload": FrameColumn(TEXT, "name of the workload"),
            "seed": FrameColumn(WHOLE, "seed of the run"),
            "round_s": FrameColumn(REAL, "seconds between two rounds"),
            "version": FrameColumn(TEXT, "version of coadapt that wrote the log"),
            "reason": FrameColumn(TEXT, "why the run ended"),
            "active": FrameColumn(pl.List(TEXT), "jobs that were under way when the run ended"),
        },
    ),
    "nodes": FrameSchema(
        (AgentJoined, AgentLeft),
        {
            "node": FrameColumn(TEXT, "name of the node", "node", _node_name),
            "incarnation": FrameColumn(TEXT, "incarnation of the node's agent"),
            "slots": FrameColumn(WHOLE, "slots of the node", "node", _of_node("slots")),
            "slot_speed": FrameColumn(
                REAL, "fraction of a core that one slot is worth", "node", _of_node("slot_speed")
            ),
            "store_host": FrameColumn(TEXT, "host of the node's store", "node", _of_node("store_host")),
            "store_port": FrameColumn(WHOLE, "port of the node's store", "node", _of_node("store_port")),
            "reason": FrameColumn(TEXT, "why the node left"),
        },
    ),
    "submissions": FrameSchema(
        (JobSubmitted,),
        {
            "job_id": FrameColumn(TEXT, "job", "spec.id"),
            "application": FrameColumn(TEXT, "what it trains", "spec.application"),
            "seed": FrameColumn(WHOLE, "seed of the job", "spec.seed"),
            "target": FrameColumn(REAL, "metric to reach on held-out data", "spec.target"),
            "max_progress": FrameColumn(REAL, "budget in AdaScale steps", "spec.max_progress"),
            "replicas": FrameColumn(WHOLE, "requested replicas", "spec.replicas"),
            "batch_size": FrameColumn(WHOLE, "requested total batch in examples", "spec.batch_size"),
            "min_batch_size": FrameColumn(
                WHOLE, "M0: initial total batch in examples", "spec.min_batch_size"
            ),
            "max_batch_size": FrameColumn(WHOLE, "largest total batch in examples", "spec.max_batch_size"),
            "min_atomic_batch": FrameColumn(WHOLE, "fewest examples in a pass", "spec.min_atomic_batch"),
            "max_atomic_batch": FrameColumn(WHOLE, "most examples in a pass", "spec.max_atomic_batch"),
            "max_replicas": FrameColumn(WHOLE, "most replicas it may get", "spec.max_replicas"),
            "settings": FrameColumn(
                pl.List(pl.Struct({"name": TEXT, "value": REAL})),
                "numbers that its user has overridden",
                "spec.settings",
                lambda settings: [{"name": name, "value": value} for name, value in settings.items()],
            ),
            "accumulates_alone": FrameColumn(YES_NO, "whether one replica above M0 has to accumulate"),
        },
    ),
    "refusals": FrameSchema((JobRefused,), {**JOB, "reason": FrameColumn(TEXT, "why the job was refused")}),
    "rounds": FrameSchema(
        (RoundDecided,),
        {
            "round": FrameColumn(WHOLE, "number of the round"),
            "trigger": FrameColumn(TEXT, "why the round took place"),
            "value": FrameColumn(REAL, "the policy's objective, where it has one"),
            "bound": FrameColumn(REAL, "what no placement could exceed, where the policy knows it"),
            "decision_s": FrameColumn(REAL, "seconds that the decision took"),
        },
    ),
    "states": FrameSchema(
        (JobStateChanged,),
        {
            **JOB,
            "old": FrameColumn(TEXT, "state before"),
            "new": FrameColumn(TEXT, "state after"),
            "reason": FrameColumn(TEXT, "why"),
        },
    ),
    "processes": FrameSchema(
        (ReplicaStarted, ReplicaExited, VerificationStarted),
        {
            **JOB,
            **GENERATION,
            "node": FrameColumn(TEXT, "node on which the process runs"),
            "replica": FrameColumn(TEXT, "name of the process, unique in the run"),
            "pid": FrameColumn(WHOLE, "process id"),
            "exit_code": FrameColumn(WHOLE, "exit code; negative: the signal that ended it"),
        },
    ),
    "generations": FrameSchema(
        (GenerationStarted,),
        {
            **JOB,
            **GENERATION,
            "old_replicas": FrameColumn(WHOLE, "replicas of the group before"),
            "allocation_nodes": FrameColumn(
                pl.List(TEXT),
                "nodes of the group, in rank order",
                "allocation",
                lambda allocation: [placement.node for placement in allocation],
            ),
            "allocation_replicas": FrameColumn(
                pl.List(WHOLE),
                "replicas on each of these nodes",
                "allocation",
                lambda allocation: [placement.replicas for placement in allocation],
            ),
            **CONFIG,
            "state_from": FrameColumn(TEXT, "source of the state: survivor, checkpoint or scratch"),
            "seconds_lost": FrameColumn(REAL, "seconds without a training step"),
            "progress": FrameColumn(REAL, "progress at the start, in AdaScale steps"),
            "progress_lost": FrameColumn(REAL, "AdaScale steps that have to be repeated"),
            "first_step_s": FrameColumn(REAL, "seconds of the first step"),
        },
    ),
    "batches": FrameSchema(
        (BatchChanged,),
        {
            **JOB,
            **GENERATION,
            **CONFIG,
            "total_batch": FrameColumn(WHOLE, "total batch in examples"),
            "step": FrameColumn(WHOLE, "step of the job"),
        },
    ),
    "samples": FrameSchema(
        (TrainingSample,),
        {
            **JOB,
            **GENERATION,
            "nodes": FrameColumn(WHOLE, "nodes that hold replicas"),
            "replicas": FrameColumn(WHOLE, "replicas"),
            **CONFIG,
            "window_s": FrameColumn(REAL, "seconds that the sample covers"),
            "steps": FrameColumn(WHOLE, "steps in the window"),
            "timed_steps": FrameColumn(WHOLE, "steps behind the times; with 0 the times are 0"),
            "accumulation_s": FrameColumn(REAL, "median seconds of a pass that only accumulates"),
            "step_s": FrameColumn(
                REAL, "median seconds of a step's last pass, with synchronisation and update"
            ),
            "sync_s": FrameColumn(REAL, "median seconds of the all-reduce"),
            "total_steps": FrameColumn(WHOLE, "steps since the job's start"),
            "total_examples": FrameColumn(WHOLE, "examples since the job's start"),
            "progress": FrameColumn(REAL, "progress since the job's start, in AdaScale steps"),
            "epoch": FrameColumn(WHOLE, "epoch"),
            "loss": FrameColumn(REAL, "training loss"),
            "gain": FrameColumn(REAL, "AdaScale's gain: AdaScale steps a step"),
            **STATISTICS,
        },
    ),
    "evaluations": FrameSchema(
        (Evaluated,),
        {
            **JOB,
            "progress": FrameColumn(REAL, "progress at the evaluation, in AdaScale steps"),
            "step": FrameColumn(WHOLE, "step of the job"),
            "metric": FrameColumn(REAL, "metric on held-out data"),
            "reached": FrameColumn(YES_NO, "whether it reached the target"),
        },
    ),
    "checkpoints": FrameSchema(
        (CheckpointSaved, CheckpointFellBack),
        {
            **JOB,
            "path": FrameColumn(TEXT, "file"),
            "digest": FrameColumn(TEXT, "digest of the file"),
            "size_bytes": FrameColumn(WHOLE, "bytes of the file"),
            "save_s": FrameColumn(REAL, "seconds to save it"),
            "progress": FrameColumn(REAL, "progress that it holds, in AdaScale steps"),
            "fallback": FrameColumn(TEXT, "older file that was used instead"),
            "reason": FrameColumn(TEXT, "why it was saved, or could not be used"),
        },
    ),
    "verifications": FrameSchema(
        (Verified,),
        {
            **JOB,
            "ok": FrameColumn(YES_NO, "whether the verifier found nothing wrong"),
            "metric": FrameColumn(REAL, "metric that the verifier measured"),
            "reported_metric": FrameColumn(REAL, "metric that the job had reported"),
            "epochs": FrameColumn(WHOLE, "finished epochs whose ledger was checked"),
            "findings": FrameColumn(pl.List(TEXT), "what the verifier found wrong"),
        },
    ),
    "ends": FrameSchema(
        (JobCompleted, JobFailed, JobCancelled),
        {
            **JOB,
            "verified": FrameColumn(YES_NO, "completed, and its verifier agreed"),
            "metric": FrameColumn(REAL, "metric at completion"),
            "progress": FrameColumn(REAL, "progress at completion, in AdaScale steps"),
            "reason": FrameColumn(TEXT, "why the job failed"),
            "output_tail": FrameColumn(TEXT, "end of what a failed job printed"),
        },
    ),
    "models": FrameSchema(
        (ModelFitted,),
        {
            **JOB,
            "alpha_c": FrameColumn(REAL, "seconds of a pass, constant part", "parameters.alpha_c"),
            "beta_c": FrameColumn(REAL, "seconds of a pass for each example", "parameters.beta_c"),
            "alpha_n": FrameColumn(REAL, "seconds of synchronising across nodes", "parameters.alpha_n"),
            "beta_n": FrameColumn(REAL, "the same, for each replica above two", "parameters.beta_n"),
            "alpha_r": FrameColumn(REAL, "seconds of synchronising within a node", "parameters.alpha_r"),
            "beta_r": FrameColumn(REAL, "the same, for each replica above two", "parameters.beta_r"),
            "gamma": FrameColumn(REAL, "overlap of computing and synchronising, from 1", "parameters.gamma"),
            "update_s": FrameColumn(REAL, "seconds that every step costs on top", "parameters.update_s"),
            **STATISTICS,
            "error": FrameColumn(REAL, "root mean squared logarithmic error of the fit"),
            "points": FrameColumn(WHOLE, "configurations that the fit is made of"),
            "fit_s": FrameColumn(REAL, "seconds that the fit took"),
        },
    ),
    "bad_messages": FrameSchema(
        (BadMessage,),
        {
            "service": FrameColumn(TEXT, "service that refused a message"),
            "error": FrameColumn(TEXT, "what was wrong with it"),
        },
    ),
    "drops": FrameSchema(
        (EventsDropped,),
        {
            "source": FrameColumn(TEXT, "service whose events are lost"),
            "incarnation": FrameColumn(TEXT, "its incarnation"),
            "first_seq": FrameColumn(WHOLE, "first lost number"),
            "last_seq": FrameColumn(WHOLE, "last lost number"),
        },
    ),
}
"""Frames with one row for each event."""

PARTS: Mapping[str, FrameSchema] = {
    "decisions": FrameSchema(
        (RoundDecided,),
        {
            **JOB,
            "replicas": FrameColumn(
                WHOLE, "replicas that the round gives the job; null: the round leaves it alone"
            ),
            "nodes": FrameColumn(WHOLE, "nodes on which they are"),
            **CONFIG,
            "reason": FrameColumn(NAME, "the policy's sentence on the job"),
        },
    ),
    "allocations": FrameSchema(
        (RoundDecided,),
        {
            **JOB,
            "node": FrameColumn(TEXT, "node on which the round places replicas"),
            "replicas": FrameColumn(WHOLE, "replicas of the job on this node"),
        },
    ),
}
"""Frames with several rows for each round: one for each job, and one for each job and node."""

JOBS = {
    "submitted_s": FrameColumn(REAL, "when the job was submitted, in seconds on the scheduler's clock"),
    "ended_s": FrameColumn(REAL, "when it ended; null while it has not"),
    "end": FrameColumn(TEXT, "completed, failed or cancelled"),
    "jct_s": FrameColumn(REAL, "seconds from submission to verified completion, of completed jobs"),
}
"""Added to the columns of `submissions`: the frame `jobs` has one row for each job."""
