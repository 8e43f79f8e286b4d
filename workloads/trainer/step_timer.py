"""How long the parts of a training step take."""

import time
from collections.abc import Callable

Clock = Callable[[], float]


class StepTimer:
    """Times one step of a replica whose slot has this speed, as a fraction of a core.

    The time of a pass is what it would take if passes followed each other without end: its CPU time divided
    by the speed, or its wall time if that is longer. The wall time alone would be too short: after waiting
    for other replicas, a paced replica may spend at once the CPU time that it saved.
    """

    def __init__(
        self, speed: float, clock: Clock = time.perf_counter, cpu_clock: Clock = time.process_time
    ) -> None:
        self._speed, self._clock, self._cpu_clock = speed, clock, cpu_clock
        self.start()

    def start(self) -> None:
        self.passes_s: list[float] = []
        self.sync_s = 0.0
        self.total_s = 0.0
        """Wall time of the whole step, pauses included."""
        self.start_pass()
        self._start_s = self._pass_start_s

    def start_pass(self) -> None:
        self._pass_start_s, self._pass_start_cpu_s = self._clock(), self._cpu_clock()

    def end_pass(self) -> None:
        """Call this before the pause that follows the pass."""
        wall_s = self._clock() - self._pass_start_s
        cpu_s = self._cpu_clock() - self._pass_start_cpu_s
        self.passes_s.append(max(wall_s, cpu_s / self._speed))

    def start_sync(self) -> None:
        self._sync_start_s = self._clock()

    def end_sync(self) -> None:
        self.sync_s = self._clock() - self._sync_start_s

    def end(self) -> None:
        self.total_s = self._clock() - self._start_s

    @property
    def last_pass_s(self) -> float:
        """The last pass with the all-reduce, the update and everything else: the whole step less the passes
        before the last one."""
        return self.total_s - sum(self.passes_s[:-1])
