"""A slot is a fraction of a core: the process sleeps so that its CPU clock keeps to that fraction.

What the process uses is read from its own CPU clock (all of its threads, communication included), and what
it may use grows with the wall clock. A debt is carried until it is paid, that of building the task too: a
slow slot starts slowly. What was not used, while waiting for others or oversleeping, may be used later only
up to a short burst, as the kernel's CPU quota does it.
"""

import time
from collections.abc import Callable

BURST_S = 0.1
"""Wall time whose unused CPU time is kept: the kernel's default period of a CPU quota."""


class Pacer:
    """Call `pause` after every piece of work, before its end is timed: then the times of the pieces are those
    of a slower core. At speed 1.0 only a process that keeps several cores busy ever sleeps."""

    def __init__(
        self,
        speed: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0.0 < speed <= 1.0:
            raise ValueError(f"slot speed {speed}: must be in (0, 1]")
        self.speed = speed
        self._clock, self._cpu_clock, self._sleep = clock, cpu_clock, sleep
        self._now_s, self._used_s = clock(), cpu_clock()
        self._left_s = 0.0
        """CPU seconds that may be used; negative: a debt."""

    def pause(self) -> None:
        now_s, used_s = self._clock(), self._cpu_clock()
        self._left_s += (now_s - self._now_s) * self.speed - (used_s - self._used_s)
        self._left_s = min(self._left_s, BURST_S * self.speed)
        self._now_s, self._used_s = now_s, used_s
        if self._left_s < 0.0:
            self._sleep(-self._left_s / self.speed)
