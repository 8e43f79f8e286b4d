"""The columns of every frame: one `Table` for each kind of event, declared once.

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
class Column:
    """`meaning` says what a value is, and its unit. `path` is the field, with a dot into a nested struct;
    `read` makes the value of the column from that of the field."""

    dtype: pl.DataType
    meaning: str
    path: str = ""
    read: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Table:
    """The columns that events of these types have."""

    types: tuple[type[Struct], ...]
    columns: Mapping[str, Column]

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
    "row": Column(ROW, "row of the event in `events`"),
    "position": Column(ROW, "place of the event in the order of time of all sources, from 0"),
    "time_s": Column(REAL, "when, in seconds on the scheduler's clock"),
}
"""The first columns of every table; a table of several types of events has a column `type` as well."""

EVENTS = {
    "line": Column(pl.UInt32(), "number of the line in the log, from 1"),
    "run_id": Column(NAME, "run that the event belongs to"),
    "source": Column(NAME, "service that published the event"),
    "incarnation": Column(NAME, "one life of that service: it changes with each restart"),
    "seq": Column(WHOLE, "number of the event within (source, incarnation), from 1"),
    "t_s": Column(REAL, "seconds on the source's own monotonic clock"),
    "wall_s": Column(REAL, "UNIX time in seconds"),
    "schema": Column(WHOLE, "version of the event schema"),
    "type": Column(NAME, "type of the event"),
}
"""One row for each valid line of the log, in the order of the file."""
ADDED_TO_EVENTS = {
    "stream": Column(ROW, "number of (source, incarnation), in the order in which they appear"),
    "time_s": Column(REAL, "when, in seconds on the scheduler's clock"),
    "position": Column(ROW, "place in the order of time of all sources, from 0; null where `repeated`"),
    "repeated": Column(YES_NO, "an earlier line has the same source, incarnation and seq"),
}

JOB = {"job_id": Column(TEXT, "job")}
GENERATION = {"generation": Column(WHOLE, "generation of the job's process group or configuration")}
CONFIG = {
    "atomic_batch": Column(WHOLE, "examples that one replica puts through one pass", "config.atomic_batch"),
    "accumulation": Column(WHOLE, "passes of a step that only accumulate", "config.accumulation"),
}
STATISTICS = {
    "sqr": Column(REAL, "squared norm of the gradient, estimated at M0", "statistics.sqr"),
    "var": Column(REAL, "trace of the gradient's covariance at M0, estimated", "statistics.var"),
    "trusted": Column(YES_NO, "whether the estimates may be believed", "statistics.trusted"),
}
"""Null where an event has no gradient statistics."""

TABLES: Mapping[str, Table] = {
    "runs": Table(
        (RunStarted, RunEnded),
        {
            "policy": Column(TEXT, "scheduling policy"),
            "workload": Column(TEXT, "name of the workload"),
            "seed": Column(WHOLE, "seed of the run"),
            "round_s": Column(REAL, "seconds between two rounds"),
            "version": Column(TEXT, "version of coadapt that wrote the log"),
            "reason": Column(TEXT, "why the run ended"),
            "active": Column(pl.List(TEXT), "jobs that were under way when the run ended"),
        },
    ),
    "nodes": Table(
        (AgentJoined, AgentLeft),
        {
            "node": Column(TEXT, "name of the node", "node", _node_name),
            "incarnation": Column(TEXT, "incarnation of the node's agent"),
            "slots": Column(WHOLE, "slots of the node", "node", _of_node("slots")),
            "slot_speed": Column(
                REAL, "fraction of a core that one slot is worth", "node", _of_node("slot_speed")
            ),
            "store_host": Column(TEXT, "host of the node's store", "node", _of_node("store_host")),
            "store_port": Column(WHOLE, "port of the node's store", "node", _of_node("store_port")),
            "reason": Column(TEXT, "why the node left"),
        },
    ),
    "submissions": Table(
        (JobSubmitted,),
        {
            "job_id": Column(TEXT, "job", "spec.id"),
            "application": Column(TEXT, "what it trains", "spec.application"),
            "seed": Column(WHOLE, "seed of the job", "spec.seed"),
            "target": Column(REAL, "metric to reach on held-out data", "spec.target"),
            "max_progress": Column(REAL, "budget in AdaScale steps", "spec.max_progress"),
            "replicas": Column(WHOLE, "requested replicas", "spec.replicas"),
            "batch_size": Column(WHOLE, "requested total batch in examples", "spec.batch_size"),
            "min_batch_size": Column(WHOLE, "M0: initial total batch in examples", "spec.min_batch_size"),
            "max_batch_size": Column(WHOLE, "largest total batch in examples", "spec.max_batch_size"),
            "min_atomic_batch": Column(WHOLE, "fewest examples in a pass", "spec.min_atomic_batch"),
            "max_atomic_batch": Column(WHOLE, "most examples in a pass", "spec.max_atomic_batch"),
            "max_replicas": Column(WHOLE, "most replicas it may get", "spec.max_replicas"),
            "settings": Column(
                pl.List(pl.Struct({"name": TEXT, "value": REAL})),
                "numbers that its user has overridden",
                "spec.settings",
                lambda settings: [{"name": name, "value": value} for name, value in settings.items()],
            ),
            "accumulates_alone": Column(YES_NO, "whether one replica above M0 has to accumulate"),
        },
    ),
    "refusals": Table((JobRefused,), {**JOB, "reason": Column(TEXT, "why the job was refused")}),
    "rounds": Table(
        (RoundDecided,),
        {
            "round": Column(WHOLE, "number of the round"),
            "trigger": Column(TEXT, "why the round took place"),
            "value": Column(REAL, "the policy's objective, where it has one"),
            "bound": Column(REAL, "what no placement could exceed, where the policy knows it"),
            "decision_s": Column(REAL, "seconds that the decision took"),
        },
    ),
    "states": Table(
        (JobStateChanged,),
        {
            **JOB,
            "old": Column(TEXT, "state before"),
            "new": Column(TEXT, "state after"),
            "reason": Column(TEXT, "why"),
        },
    ),
    "processes": Table(
        (ReplicaStarted, ReplicaExited, VerificationStarted),
        {
            **JOB,
            **GENERATION,
            "node": Column(TEXT, "node on which the process runs"),
            "replica": Column(TEXT, "name of the process, unique in the run"),
            "pid": Column(WHOLE, "process id"),
            "exit_code": Column(WHOLE, "exit code; negative: the signal that ended it"),
        },
    ),
    "generations": Table(
        (GenerationStarted,),
        {
            **JOB,
            **GENERATION,
            "old_replicas": Column(WHOLE, "replicas of the group before"),
            "allocation_nodes": Column(
                pl.List(TEXT),
                "nodes of the group, in rank order",
                "allocation",
                lambda allocation: [placement.node for placement in allocation],
            ),
            "allocation_replicas": Column(
                pl.List(WHOLE),
                "replicas on each of these nodes",
                "allocation",
                lambda allocation: [placement.replicas for placement in allocation],
            ),
            **CONFIG,
            "state_from": Column(TEXT, "source of the state: survivor, checkpoint or scratch"),
            "seconds_lost": Column(REAL, "seconds without a training step"),
            "progress": Column(REAL, "progress at the start, in AdaScale steps"),
            "progress_lost": Column(REAL, "AdaScale steps that have to be repeated"),
            "first_step_s": Column(REAL, "seconds of the first step"),
        },
    ),
    "batches": Table(
        (BatchChanged,),
        {
            **JOB,
            **GENERATION,
            **CONFIG,
            "total_batch": Column(WHOLE, "total batch in examples"),
            "step": Column(WHOLE, "step of the job"),
        },
    ),
    "samples": Table(
        (TrainingSample,),
        {
            **JOB,
            **GENERATION,
            "nodes": Column(WHOLE, "nodes that hold replicas"),
            "replicas": Column(WHOLE, "replicas"),
            **CONFIG,
            "window_s": Column(REAL, "seconds that the sample covers"),
            "steps": Column(WHOLE, "steps in the window"),
            "timed_steps": Column(WHOLE, "steps behind the times; with 0 the times are 0"),
            "accumulation_s": Column(REAL, "median seconds of a pass that only accumulates"),
            "step_s": Column(REAL, "median seconds of a step's last pass, with synchronisation and update"),
            "sync_s": Column(REAL, "median seconds of the all-reduce"),
            "total_steps": Column(WHOLE, "steps since the job's start"),
            "total_examples": Column(WHOLE, "examples since the job's start"),
            "progress": Column(REAL, "progress since the job's start, in AdaScale steps"),
            "epoch": Column(WHOLE, "epoch"),
            "loss": Column(REAL, "training loss"),
            "gain": Column(REAL, "AdaScale's gain: AdaScale steps a step"),
            **STATISTICS,
        },
    ),
    "evaluations": Table(
        (Evaluated,),
        {
            **JOB,
            "progress": Column(REAL, "progress at the evaluation, in AdaScale steps"),
            "step": Column(WHOLE, "step of the job"),
            "metric": Column(REAL, "metric on held-out data"),
            "reached": Column(YES_NO, "whether it reached the target"),
        },
    ),
    "checkpoints": Table(
        (CheckpointSaved, CheckpointFellBack),
        {
            **JOB,
            "path": Column(TEXT, "file"),
            "digest": Column(TEXT, "digest of the file"),
            "size_bytes": Column(WHOLE, "bytes of the file"),
            "save_s": Column(REAL, "seconds to save it"),
            "progress": Column(REAL, "progress that it holds, in AdaScale steps"),
            "fallback": Column(TEXT, "older file that was used instead"),
            "reason": Column(TEXT, "why it was saved, or could not be used"),
        },
    ),
    "verifications": Table(
        (Verified,),
        {
            **JOB,
            "ok": Column(YES_NO, "whether the verifier found nothing wrong"),
            "metric": Column(REAL, "metric that the verifier measured"),
            "reported_metric": Column(REAL, "metric that the job had reported"),
            "epochs": Column(WHOLE, "finished epochs whose ledger was checked"),
            "findings": Column(pl.List(TEXT), "what the verifier found wrong"),
        },
    ),
    "ends": Table(
        (JobCompleted, JobFailed, JobCancelled),
        {
            **JOB,
            "verified": Column(YES_NO, "completed, and its verifier agreed"),
            "metric": Column(REAL, "metric at completion"),
            "progress": Column(REAL, "progress at completion, in AdaScale steps"),
            "reason": Column(TEXT, "why the job failed"),
            "output_tail": Column(TEXT, "end of what a failed job printed"),
        },
    ),
    "models": Table(
        (ModelFitted,),
        {
            **JOB,
            "alpha_c": Column(REAL, "seconds of a pass, constant part", "parameters.alpha_c"),
            "beta_c": Column(REAL, "seconds of a pass for each example", "parameters.beta_c"),
            "alpha_n": Column(REAL, "seconds of synchronising across nodes", "parameters.alpha_n"),
            "beta_n": Column(REAL, "the same, for each replica above two", "parameters.beta_n"),
            "alpha_r": Column(REAL, "seconds of synchronising within a node", "parameters.alpha_r"),
            "beta_r": Column(REAL, "the same, for each replica above two", "parameters.beta_r"),
            "gamma": Column(REAL, "overlap of computing and synchronising, from 1", "parameters.gamma"),
            "update_s": Column(REAL, "seconds that every step costs on top", "parameters.update_s"),
            **STATISTICS,
            "error": Column(REAL, "root mean squared logarithmic error of the fit"),
            "points": Column(WHOLE, "configurations that the fit is made of"),
            "fit_s": Column(REAL, "seconds that the fit took"),
        },
    ),
    "bad_messages": Table(
        (BadMessage,),
        {
            "service": Column(TEXT, "service that refused a message"),
            "error": Column(TEXT, "what was wrong with it"),
        },
    ),
    "drops": Table(
        (EventsDropped,),
        {
            "source": Column(TEXT, "service whose events are lost"),
            "incarnation": Column(TEXT, "its incarnation"),
            "first_seq": Column(WHOLE, "first lost number"),
            "last_seq": Column(WHOLE, "last lost number"),
        },
    ),
}
"""Frames with one row for each event."""

PARTS: Mapping[str, Table] = {
    "decisions": Table(
        (RoundDecided,),
        {
            **JOB,
            "replicas": Column(
                WHOLE, "replicas that the round gives the job; null: the round leaves it alone"
            ),
            "nodes": Column(WHOLE, "nodes on which they are"),
            **CONFIG,
            "reason": Column(NAME, "the policy's sentence on the job"),
        },
    ),
    "allocations": Table(
        (RoundDecided,),
        {
            **JOB,
            "node": Column(TEXT, "node on which the round places replicas"),
            "replicas": Column(WHOLE, "replicas of the job on this node"),
        },
    ),
}
"""Frames with several rows for each round: one for each job, and one for each job and node."""

JOBS = {
    "submitted_s": Column(REAL, "when the job was submitted, in seconds on the scheduler's clock"),
    "ended_s": Column(REAL, "when it ended; null while it has not"),
    "end": Column(TEXT, "completed, failed or cancelled"),
    "jct_s": Column(REAL, "seconds from submission to verified completion, of completed jobs"),
}
"""Added to the columns of `submissions`: the frame `jobs` has one row for each job."""
