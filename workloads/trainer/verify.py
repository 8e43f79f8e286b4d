"""The verifier: it checks a reported completion in a process that took no part in the training."""

from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from common.codec import encode
from common.protocol import (
    METRIC_TOLERANCE,
    VerificationDone,
    Verified,
    VerifyOrder,
    VerifyStart,
)
from workloads.applications import applications, build_task
from workloads.trainer.checkpoint import CheckpointError, read
from workloads.trainer.evaluation import evaluate
from workloads.trainer.pacer import Pacer
from workloads.trainer.process_group import single_member_group
from workloads.trainer.training_state import TrainingState, meets

PROGRESS_TOLERANCE = 1e-6
"""Largest relative difference between the reported progress and that of the checkpoint."""


@dataclass(frozen=True)
class Verification:
    """`metric` is what the verifier measured, `epochs` how many finished epochs it checked. `findings` has
    one sentence for each thing that is wrong."""

    metric: float
    epochs: int
    findings: tuple[str, ...]


def verify(order: VerifyOrder, pacer: Pacer, application_modules: tuple[str, ...] = ()) -> Verification:
    """Build the task from its seed, load the checkpoint, evaluate it on all held-out data, and check the
    ledger: every example exactly once in every finished epoch, and in the current epoch exactly the examples
    before the sampler's position."""
    spec = order.spec
    application = applications(application_modules)[spec.application]
    task = build_task(spec.application, spec.seed, spec.settings, application_modules)
    state = TrainingState(spec, application, task)
    pacer.pause()
    try:
        state.load_bytes(read(Path(order.checkpoint)))
    except CheckpointError as error:
        return Verification(order.metric, 0, (f"checkpoint {order.checkpoint} {error}",))
    metric = evaluate(task, spec.max_atomic_batch, single_member_group(), pacer)
    findings = []
    if not abs(metric - order.metric) <= METRIC_TOLERANCE:
        findings.append(f"{application.metric} is {metric:.6g}, but {order.metric:.6g} was reported")
    if not meets(application, metric, spec.target):
        findings.append(f"{application.metric} {metric:.6g} does not meet the target {spec.target:g}")
    if not abs(state.progress - order.progress) <= PROGRESS_TOLERANCE * max(order.progress, 1.0):
        findings.append(f"progress is {state.progress:.6g}, but {order.progress:.6g} was reported")
    sampler = state.sampler
    findings.extend(state.ledger.findings(state.fingerprints, sampler.epoch, sampler.used()))
    seen = sampler.epoch * sampler.examples + sampler.cursor
    if state.examples != seen:
        findings.append(f"{state.examples} examples were counted, {seen} lie before the sampler's position")
    return Verification(metric, sampler.epoch, tuple(findings))


def run_verifier(connection: Connection, start: VerifyStart) -> None:
    """Body of the process: sends the event Verified and the fact VerificationDone on `connection`."""
    torch.set_num_threads(1)
    order = start.order
    verdict = verify(order, Pacer(start.slot_speed), start.application_modules)
    connection.send_bytes(
        encode(
            Verified(
                job_id=order.spec.id,
                ok=not verdict.findings,
                metric=verdict.metric,
                reported_metric=order.metric,
                epochs=verdict.epochs,
                findings=verdict.findings,
            )
        )
    )
    connection.send_bytes(
        encode(VerificationDone(job_id=order.spec.id, metric=verdict.metric, findings=verdict.findings))
    )
