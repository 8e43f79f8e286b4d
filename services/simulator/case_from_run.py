"""The simulation case of a real run: the same workload, policy, seed, cluster and rounds."""

from pathlib import Path

import msgspec

from analysis.compare.experiment_files import WORKLOAD_FILE
from common.config import Config
from common.eventlog import EVENTS_FILE, EventLogError, read_events
from common.lifecycle import UserError
from common.protocol import AgentJoined, JobSubmitted, RunStarted
from common.types import Node
from services.scheduler.resume import CONFIG_COPY
from services.simulator.cases import SimulationCase
from services.simulator.worlds.simulated_training import TRAINER
from workloads.files.measured_profile import PROFILES, read_machine

FIXED_TRAINER_SETTINGS = (
    "sample_every_s",
    "warmup_steps",
    "newcomers_timeout_s",
    "collective_timeout_s",
    "checkpoint_every_s",
)
"""Trainer settings for which the calibrated world always uses the default. The settings that are not listed
matter only after failures, which that world does not have."""


class CaseFromRun(SimulationCase, frozen=True, kw_only=True):
    name: str = ""
    """Of the real run's folder and of the simulated run's."""

    @property
    def run_id(self) -> str:
        return self.name


def case_from_run(
    run: Path, profiles: Path | None, out: Path, step_factors: tuple[tuple[str, float], ...] = ()
) -> CaseFromRun:
    """The case of the real run in the folder `run`, to be simulated into `out`.

    Raises UserError if the folder lacks something that is needed, if the run had another slot speed than the
    profiles, or settings that cannot be simulated."""
    workload, config = run / WORKLOAD_FILE, _read_config(run / CONFIG_COPY)
    if not workload.is_file():
        raise UserError(
            f"{workload}: no such file; the run cannot be simulated without its workload, which only "
            "runs of `coadapt experiment` keep"
        )
    for key in FIXED_TRAINER_SETTINGS:
        actual, simulated = getattr(config.trainer, key), getattr(TRAINER, key)
        if actual != simulated:
            raise UserError(
                f"{run / CONFIG_COPY}: trainer.{key} {actual:g}; the world `calibrated` has {simulated:g}: "
                "the simulation would not match this run"
            )
    started, nodes = _read_start(run / EVENTS_FILE)
    speed = read_machine(profiles or PROFILES).slot_speed
    if other := [node for node in nodes if node.slot_speed != speed]:
        raise UserError(
            f"{run}: {other[0].name} had slots of speed {other[0].slot_speed:g}; the profiles in "
            f"{profiles or PROFILES} were measured at {speed:g}"
        )
    if len({node.slots for node in nodes}) != 1:
        raise UserError(f"{run}: the simulator needs nodes with equal numbers of slots")
    return CaseFromRun(
        name=run.name,
        label=started.workload,
        workload=workload,
        policy=config.scheduler.policy,
        world="calibrated",
        profiles=profiles,
        nodes=len(nodes),
        slots=nodes[0].slots,
        round_s=started.round_s,
        seed=started.seed,
        out=out,
        restart_penalty_s=config.scheduler.restart_penalty_s,
        memory=config.collector.memory,
        step_factors=step_factors,
    )


def _read_config(path: Path) -> Config:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Config)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from error


def _read_start(log: Path) -> tuple[RunStarted, list[Node]]:
    """How the run was started, and the nodes that had joined before the first job."""
    started: RunStarted | None = None
    nodes: dict[str, Node] = {}
    try:
        for record in read_events(log):
            match record.event:
                case RunStarted():
                    started = started or record.event
                case AgentJoined():
                    nodes[record.event.node.name] = record.event.node
                case JobSubmitted():
                    break
                case _:
                    pass
    except EventLogError as error:
        raise UserError(str(error)) from error
    if started is None or not nodes:
        raise UserError(f"{log}: the start of the run, or its nodes, are missing before the first job")
    return started, list(nodes.values())
