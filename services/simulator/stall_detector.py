"""Recognizes a simulated run that will never end. Pure."""

import math
from itertools import islice

from services.scheduler.state import State
from services.simulator.worlds.interface import World

IDLE_ROUNDS = 1000
"""Rounds without progress, or at one instant, after which a run may count as stalled."""
IDLE_RESTARTS = 10
"""The time without progress must also exceed this many restarts: short rounds pass quickly."""
MAX_ROUNDS = 1_000_000
MAX_NAMED_JOBS = 10


class StallDetector:
    """To be asked after every round."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._progress: tuple[int, float] = (-1, 0.0)
        """Jobs that have ended, and the progress of all jobs together."""
        self._idle_rounds = 0
        self._idle_since_s = 0.0
        self._instant_s = -math.inf
        self._instant_rounds = 0

    def problem(self, state: State, now_s: float) -> str:
        """Why the run should be given up, with the jobs that are left; empty while it gets on."""
        self._count_round(state, now_s)
        idle_s = now_s - self._idle_since_s
        if self._idle_rounds > IDLE_ROUNDS and idle_s > self._patience_s(state):
            problem = f"no job made progress for {idle_s:g} s"
        elif self._instant_rounds > IDLE_ROUNDS:
            problem = f"there were more than {IDLE_ROUNDS} rounds at this instant"
        elif state.rounds >= MAX_ROUNDS:
            problem = f"there were {MAX_ROUNDS} rounds"
        else:
            return ""
        named = islice(state.jobs.values(), MAX_NAMED_JOBS)
        waiting = "; ".join(f"{job.spec.id} ({job.state}): {job.reason}" for job in named)
        unnamed = len(state.jobs) - MAX_NAMED_JOBS
        more = f"; and {unnamed} more" if unnamed > 0 else ""
        return f"given up at {now_s:g} s, when {problem}: {waiting}{more}"

    def _count_round(self, state: State, now_s: float) -> None:
        progress = (len(state.ended), sum(profile.progress for profile in state.profiles.values()))
        if progress != self._progress:
            self._progress, self._idle_rounds, self._idle_since_s = progress, 0, now_s
        self._idle_rounds += 1
        if now_s != self._instant_s:
            self._instant_s, self._instant_rounds = now_s, 0
        self._instant_rounds += 1

    def _patience_s(self, state: State) -> float:
        overhead_s = max((self._world.overhead_s(job.spec) for job in state.jobs.values()), default=0.0)
        return IDLE_RESTARTS * (self._world.restart_s + overhead_s)
