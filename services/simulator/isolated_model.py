"""Isolated times for rho from the calibrated model: the same job, alone on its share, simulated from the
measured profile of its application."""

import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from analysis.log.history import JobHistory, RunHistory
from analysis.run.fairness import IsolatedTime
from analysis.run.step_times import step_factor, step_times
from common.config import load_config
from common.lifecycle import UserError
from common.types import Node
from services.simulator.isolated_times import IsolatedTimes
from services.simulator.worlds.calibrated import CalibratedWorld
from workloads.applications import applications
from workloads.files.measured_profile import PROFILES, MeasuredProfile, read_machine, read_profiles


class Unprofiled(UserError):
    """A run has jobs of an application without a profile, or slots of another speed than profiles are of."""


class IsolatedModel:
    """Called with a run, it gives the isolated times of its jobs, on its nodes and with its rounds."""

    def __init__(self, profiles: Mapping[str, MeasuredProfile], slot_speed: float) -> None:
        """The profiles were measured in slots of that speed."""
        self.profiles, self._slot_speed = profiles, slot_speed
        self._models: dict[tuple[tuple[Node, ...], float], IsolatedTimes] = {}

    def __call__(self, run: RunHistory) -> IsolatedTime | None:
        """None of a run without nodes. Raises Unprofiled."""
        for job in run.jobs.values():
            if job.spec.application not in self.profiles:
                raise Unprofiled(
                    f"{job.spec.application}: no profile of it; there are {', '.join(self.profiles)}"
                )
        started, nodes = run.started, _nodes(run)
        for node in nodes:
            if node.slot_speed != self._slot_speed:
                raise Unprofiled(
                    f"{node.name} had slots of speed {node.slot_speed:g}; the profiles were measured at "
                    f"{self._slot_speed:g}"
                )
        if started is None or not nodes:
            return None
        key = nodes, started.round_s
        if key not in self._models:
            make_world = partial(CalibratedWorld, self.profiles, nodes)
            self._models[key] = IsolatedTimes(make_world, nodes, started.round_s)
        model = self._models[key]

        def time_s(job: JobHistory, share: float) -> float | None:
            seconds = model.time_s(job.spec, job.submitted_s, share)
            return seconds if math.isfinite(seconds) else None

        return time_s

    def step_time(self, run: RunHistory) -> float | None:
        """What its steps took over what was measured of them."""
        return step_factor(step_times(run), self.profiles)


def _nodes(run: RunHistory) -> tuple[Node, ...]:
    """Every node that ever joined, by name; where its store listens does not matter to a job alone."""
    return tuple(
        Node(name=node.name, slots=node.slots, slot_speed=node.slot_speed) for node in run.nodes
    )


def calibrated(folder: Path | None) -> IsolatedModel:
    """From the profiles in `folder`, or from those of the project. Raises UserError."""
    known, place = applications(load_config(os.environ).applications.modules), folder or PROFILES
    return IsolatedModel(read_profiles(place, known), read_machine(place).slot_speed)


def source(folder: Path | None) -> str:
    return f"the calibrated model of {folder}" if folder else "the calibrated model of workloads/profiles"
