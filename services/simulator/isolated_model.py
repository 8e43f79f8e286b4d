"""Isolated times for the rho of real runs: each job is simulated alone in the calibrated world."""

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
    """A run has jobs without a profile, or slots of another speed than the profiles."""


class IsolatedModel:
    """Called with a run, it returns the isolated times of the run's jobs on its nodes, with its rounds."""

    def __init__(self, profiles: Mapping[str, MeasuredProfile], slot_speed: float) -> None:
        """`slot_speed` is the speed of the slots in which the profiles were measured."""
        self.profiles, self._slot_speed = profiles, slot_speed
        self._models: dict[tuple[tuple[Node, ...], float], IsolatedTimes] = {}
        """By nodes and round_s."""

    def __call__(self, run: RunHistory) -> IsolatedTime | None:
        """None for a run without nodes. Raises Unprofiled."""
        for job in run.jobs.values():
            if job.spec.application not in self.profiles:
                raise Unprofiled(
                    f"{job.spec.application}: has no profile; profiles exist of {', '.join(self.profiles)}"
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
        model = self._model(nodes, started.round_s)

        def time_s(job: JobHistory, share: float) -> float | None:
            seconds = model.time_s(job.spec, job.submitted_s, share)
            return seconds if math.isfinite(seconds) else None

        return time_s

    def step_time(self, run: RunHistory) -> float | None:
        """Actual over profiled step times of the run."""
        return step_factor(step_times(run), self.profiles)

    def _model(self, nodes: tuple[Node, ...], round_s: float) -> IsolatedTimes:
        if (nodes, round_s) not in self._models:
            make_world = partial(CalibratedWorld, self.profiles, nodes)
            self._models[nodes, round_s] = IsolatedTimes(make_world, nodes, round_s)
        return self._models[nodes, round_s]


def _nodes(run: RunHistory) -> tuple[Node, ...]:
    """All nodes that ever joined, by name. The address of their store is dropped: it would only keep equal
    clusters apart."""
    return tuple(Node(name=node.name, slots=node.slots, slot_speed=node.slot_speed) for node in run.nodes)


def load_isolated_model(folder: Path | None) -> IsolatedModel:
    """The model from the profiles in `folder`, or from those of the project. Raises UserError."""
    known, place = applications(load_config(os.environ).applications.modules), folder or PROFILES
    return IsolatedModel(read_profiles(place, known), read_machine(place).slot_speed)


def model_source(folder: Path | None) -> str:
    return f"the calibrated model of {folder}" if folder else "the calibrated model of workloads/profiles"
