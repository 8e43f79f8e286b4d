"""Pacing: a slot is a fraction of a core, and a replica sleeps so that it uses no more CPU time than that.

The pacer reads the CPU time of the whole process, with all its threads and its communication. The CPU time
that it allows grows with the wall clock. A process that has used too much sleeps until it has caught up; that
includes the time it took to build the task, so a slow slot also starts slowly. A process that has used less,
because it waited for others or overslept, may use the difference later, up to a short burst. The kernel's CPU
quota works the same way.
"""

import time
from collections.abc import Callable

BURST_S = 0.1
"""Unused CPU time is kept for this much wall time: the kernel's default period of a CPU quota."""


class Pacer:
    """Limits this process to `speed` cores, 0 < speed <= 1.

    Call `pause` after every piece of work, before you read the time of its end: the piece then takes as long
    as on a slower core. At speed 1.0 only a process that keeps several cores busy ever sleeps.
    """

    def __init__(
        self,
        speed: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0.0 < speed <= 1.0:
            raise ValueError(f"slot speed {speed}: allowed: above 0, at most 1")
        self.speed = speed
        self._clock, self._cpu_clock, self._sleep = clock, cpu_clock, sleep
        self._now_s, self._used_s = clock(), cpu_clock()
        self._left_s = 0.0
        """CPU seconds that the process may use now; negative: it has used too much."""

    def pause(self) -> None:
        now_s, used_s = self._clock(), self._cpu_clock()
        self._left_s += (now_s - self._now_s) * self.speed - (used_s - self._used_s)
        self._left_s = min(self._left_s, BURST_S * self.speed)
        self._now_s, self._used_s = now_s, used_s
        if self._left_s < 0.0:
            self._sleep(-self._left_s / self.speed)
