"""The simulated twin of a real run: the same workload, policy, seed, cluster and rounds."""

from pathlib import Path

import msgspec

from common.config import Config
from common.eventlog import EVENTS_FILE, EventLogError, read_events
from common.lifecycle import UserError
from common.protocol import AgentJoined, JobSubmitted, RunStarted
from common.types import Node
from services.simulator.cases import SimulationCase
from services.simulator.worlds.simulated_training import TRAINER
from workloads.files.measured_profile import PROFILES, read_machine

CONFIG_FILE, WORKLOAD_FILE = "config.json", "workload.toml"
TAKEN_AS_DEFAULT = (
    "sample_every_s",
    "warmup_steps",
    "newcomers_timeout_s",
    "collective_timeout_s",
    "checkpoint_every_s",
)
"""Settings of the trainer that the calibrated world has by default, whatever the run had. The others only
matter when something fails, which nothing does there."""


class Twin(SimulationCase, frozen=True):
    """`name`: of the real run's folder, and of its own."""

    name: str = ""

    @property
    def run_id(self) -> str:
        return self.name


def twin(
    run: Path, profiles: Path | None, out: Path, step_factors: tuple[tuple[str, float], ...] = ()
) -> Twin:
    """Of the real run in that folder. Raises UserError where it lacks what has to be known, ran at another
    slot speed than the profiles were measured at, or with settings that cannot be simulated."""
    workload, config = run / WORKLOAD_FILE, _config(run / CONFIG_FILE)
    if not workload.is_file():
        raise UserError(
            f"{workload}: no such file; the run cannot be simulated without its workload, which only "
            "runs of `coadapt experiment` keep"
        )
    for key in TAKEN_AS_DEFAULT:
        had, simulated = getattr(config.trainer, key), getattr(TRAINER, key)
        if had != simulated:
            raise UserError(
                f"{run / CONFIG_FILE}: trainer.{key} {had:g}; the world `calibrated` has {simulated:g}, so "
                "that its simulation would be of something else"
            )
    started, nodes = _began(run / EVENTS_FILE)
    speed = read_machine(profiles or PROFILES).slot_speed
    if other := [node for node in nodes if node.slot_speed != speed]:
        raise UserError(
            f"{run}: {other[0].name} had slots of speed {other[0].slot_speed:g}; the profiles in "
            f"{profiles or PROFILES} were measured at {speed:g}"
        )
    if len({node.slots for node in nodes}) != 1:
        raise UserError(f"{run}: needed: nodes of equally many slots, as the simulator has them")
    return Twin(
        name=run.name,
        label=started.workload,
        workload=workload,
        policy=config.scheduler.policy,
        world="calibrated",
        traces=None,
        profiles=profiles,
        nodes=len(nodes),
        slots=nodes[0].slots,
        round_s=started.round_s,
        interference=0.0,
        seed=started.seed,
        restart_s=None,
        out=out,
        restart_penalty_s=config.scheduler.restart_penalty_s,
        memory=config.collector.memory,
        step_factors=step_factors,
    )


def _config(path: Path) -> Config:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Config)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from error


def _began(log: Path) -> tuple[RunStarted, list[Node]]:
    """How it was started, and the nodes that were there when the first job came."""
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
        raise UserError(f"{log}: needed: its start and its nodes, before the first job")
    return started, list(nodes.values())
