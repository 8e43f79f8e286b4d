"""Isolated times for rho from the calibrated model: the same job, alone on its share, simulated from the
measured profile of its application."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from analysis.fairness import IsolatedTime
from analysis.load import JobHistory, Replay
from common.lifecycle import UserError
from common.protocol import AgentJoined
from common.types import Node
from services.simulator.calibrated import CalibratedWorld
from services.simulator.isolated import Isolated
from workloads.measured import PROFILES, Measured, read_profiles
from workloads.tasks import applications


class Unprofiled(UserError):
    """A run has jobs of an application without a profile."""


class Modelled:
    """Called with a run, it gives the isolated times of its jobs, on its nodes and with its rounds."""

    def __init__(self, profiles: Mapping[str, Measured]) -> None:
        self.profiles = profiles
        self._models: dict[tuple[tuple[Node, ...], float], Isolated] = {}

    def __call__(self, replayed: Replay) -> IsolatedTime | None:
        """None of a run without nodes. Raises Unprofiled."""
        for job in replayed.run.jobs.values():
            if job.spec.application not in self.profiles:
                raise Unprofiled(
                    f"{job.spec.application}: no profile of it; there are {', '.join(self.profiles)}"
                )
        started, nodes = replayed.run.started, _nodes(replayed)
        if started is None or not nodes:
            return None
        key = nodes, started.round_s
        if key not in self._models:
            make_world = partial(CalibratedWorld, self.profiles, nodes)
            self._models[key] = Isolated(make_world, nodes, started.round_s)
        model = self._models[key]

        def time_s(job: JobHistory, share: float) -> float | None:
            seconds = model.time_s(job.spec, job.submitted_s, share)
            return seconds if math.isfinite(seconds) else None

        return time_s


def _nodes(replayed: Replay) -> tuple[Node, ...]:
    """Everybody who ever joined, by name; where its store listens does not matter to a job alone."""
    joined = (line.event.node for line in replayed.lines if isinstance(line.event, AgentJoined))
    named = {node.name: Node(name=node.name, slots=node.slots, slot_speed=node.slot_speed) for node in joined}
    return tuple(named[name] for name in sorted(named))


def calibrated(folder: Path | None) -> Modelled:
    """From the profiles in `folder`, or from those of our own applications. Raises UserError."""
    return Modelled(read_profiles(folder or PROFILES, applications()))


def source(folder: Path | None) -> str:
    return f"the calibrated model of {folder}" if folder else "the calibrated model of workloads/profiles"
