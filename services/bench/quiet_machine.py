"""Whether a machine is quiet enough for a measurement: readings of its CPU use, and a judgement.

A share of the machine is CPU seconds over all seconds of the cores that this process may use.
- Ours: CPU time of the stack's processes and of this process.
- Foreign: CPU time of all other processes, or all busy time that is not ours, whichever is more. Neither is
  complete: the system counts busy time in ticks, which miss paced processes, and no list has the processes
  that started and ended between two readings.
- Steal: CPU time that a hypervisor gave to other machines.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import psutil
from msgspec import Meta

from common.config import Fraction
from common.lifecycle import EXIT_UNAVAILABLE, UserError
from common.types import Struct

SAMPLE_EVERY_S = 1.0
WATCH_MIN_S = 0.1
SHARED_MEMORY_STEP = 1.02
"""The exact sum of memory is slow: it is made only when the quick sum exceeds its peak by this factor."""


class MachineBusy(UserError):
    """The machine did not become quiet in time."""

    exit_code = EXIT_UNAVAILABLE


class LoadBounds(Struct, frozen=True):
    """How much a run may be disturbed, in shares of the machine."""

    watch_s: Annotated[float, Meta(ge=WATCH_MIN_S, le=600)] = 2.0
    """How long the machine is watched before a run."""
    wait_s: Annotated[float, Meta(ge=0, le=86_400)] = 300.0
    """How long a run waits for a busy machine to become quiet."""
    busy_before: Fraction = 0.10
    """Most CPU used by other processes, and most steal, before a run."""
    foreign_cpu: Fraction = 0.05
    """Most CPU used by other processes during a run."""
    steal: Fraction = 0.02
    """Most steal during a run."""


class Usage(Struct, frozen=True):
    """CPU seconds of the cores that this process may use."""

    all_s: float
    """Busy and idle."""
    busy_s: float
    steal_s: float

    def since(self, before: "Usage") -> "Usage":
        return Usage(
            all_s=self.all_s - before.all_s,
            busy_s=self.busy_s - before.busy_s,
            steal_s=self.steal_s - before.steal_s,
        )


class LoadMeasures(Struct, frozen=True):
    """The conditions of a run. `load` is the system's load average: processes that run or want to run."""

    load_before: float
    load_mean: float
    steal_fraction: float
    foreign_cpu_fraction: float
    peak_memory_bytes: int


# --------------------------------------------------------------------------- judgement


def foreign(used: Usage, ours_s: float, others_s: float) -> float:
    """Share of the machine that other processes used, 0 to 1. `others_s`: CPU seconds by their own clocks."""
    foreign_s = max(used.busy_s - ours_s, others_s, 0.0)
    return min(foreign_s / used.all_s, 1.0) if used.all_s > 0 else 0.0


def steal(used: Usage) -> float:
    return used.steal_s / used.all_s if used.all_s > 0 else 0.0


def too_busy(used: Usage, ours_s: float, others_s: float, bounds: LoadBounds) -> str:
    """Why a machine with this usage is too busy to start a run; "" if it is quiet."""
    return _above(
        ("used by other processes", foreign(used, ours_s, others_s), bounds.busy_before),
        ("stolen by the hypervisor", steal(used), bounds.busy_before),
    )


def noise(measures: LoadMeasures, bounds: LoadBounds) -> str:
    """Why a run counts as noisy; "" if it does not."""
    return _above(
        ("used by other processes", measures.foreign_cpu_fraction, bounds.foreign_cpu),
        ("stolen by the hypervisor", measures.steal_fraction, bounds.steal),
    )


def _above(*found: tuple[str, float, float]) -> str:
    return ", ".join(
        f"{100 * share:.1f}% of the CPU {what}, above {100 * bound:g}%"
        for what, share, bound in found
        if share > bound
    )


# --------------------------------------------------------------------------- readings


def read_usage() -> Usage:
    """Usage since the machine was started."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    all_s = busy_s = steal_s = 0.0
    for core, times in enumerate(psutil.cpu_times(percpu=True)):
        if cores is not None and core not in cores:
            continue
        stolen = getattr(times, "steal", 0.0)
        # `user` and `nice` include the time of guests.
        busy = sum(getattr(times, field, 0.0) for field in ("user", "nice", "system", "irq", "softirq"))
        all_s += busy + stolen + times.idle + getattr(times, "iowait", 0.0)
        busy_s += busy
        steal_s += stolen
    return Usage(all_s=all_s, busy_s=busy_s, steal_s=steal_s)


def wait_until_quiet(bounds: LoadBounds, say: Callable[[str], None], wait_s: float) -> str:
    """Watch the machine until it is quiet, for at most `wait_s` and one watch more.

    Returns "", or why it is still busy. `say` gets one line if it has to wait."""
    deadline_s = time.monotonic() + wait_s
    announced = False
    while True:
        before, own_s, others = read_usage(), _own_s(), _OtherProcesses()
        time.sleep(bounds.watch_s)
        problem = too_busy(read_usage().since(before), _own_s() - own_s, others.used_s(()), bounds)
        if not problem or time.monotonic() >= deadline_s:
            return problem
        if not announced:
            say(f"waiting for at most {wait_s:.0f} s until the machine is quieter: {problem}")
            announced = True


def require_quiet(bounds: LoadBounds, else_do: str) -> None:
    """Watch the machine once. Raises MachineBusy, which suggests to stop other processes or to `else_do`."""
    if problem := wait_until_quiet(bounds, print, 0.0):
        raise MachineBusy(f"the machine is busy: {problem}; stop other processes, or {else_do}")


class Meter:
    """Measures a stack and its machine, from its creation to the call of `measures`."""

    def __init__(self, processes: Callable[[], list[psutil.Process]]) -> None:
        """`processes` returns those of the stack."""
        self._processes = processes
        self._before = read_usage()
        self._own_s = _own_s()
        self._others = _OtherProcesses()
        self._load_before = os.getloadavg()[0]
        self._loads: list[float] = []
        self._quick_peak_bytes = 0
        self._peak_bytes = 0
        self._next_s = time.monotonic()

    def sample(self) -> None:
        """Call it often; it reads load and memory about once a second."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + SAMPLE_EVERY_S
        self._loads.append(os.getloadavg()[0])
        processes = [psutil.Process(), *self._processes()]
        quick_bytes = memory_bytes(processes, shared_once=False)
        if quick_bytes > SHARED_MEMORY_STEP * self._quick_peak_bytes:
            self._quick_peak_bytes = quick_bytes
            self._peak_bytes = max(self._peak_bytes, memory_bytes(processes, shared_once=True))

    def measures(self) -> LoadMeasures:
        """Call it while the stack is up: the CPU time of a process cannot be read after its end."""
        processes = self._processes()
        ours_s = _own_s() - self._own_s + cpu_s(processes)
        others_s = self._others.used_s(processes)
        used = read_usage().since(self._before)
        loads = self._loads or [self._load_before]
        return LoadMeasures(
            load_before=self._load_before,
            load_mean=sum(loads) / len(loads),
            steal_fraction=steal(used),
            foreign_cpu_fraction=foreign(used, ours_s, others_s),
            peak_memory_bytes=self._peak_bytes,
        )


class _OtherProcesses:
    """CPU time of all processes except this one, since its creation."""

    def __init__(self) -> None:
        self._before_s = self._read(set())

    def used_s(self, ours: Sequence[psutil.Process]) -> float:
        """CPU seconds of the processes that live now, except `ours`; with those of their ended children."""
        now_s = self._read({process.pid for process in ours})
        return sum(max(used_s - self._before_s.get(key, 0.0), 0.0) for key, used_s in now_s.items())

    @staticmethod
    def _read(excluded_pids: set[int]) -> dict[tuple[int, float], float]:
        """CPU seconds by pid and creation time, since the system may use a pid again."""
        found = {}
        for process in psutil.process_iter():
            if process.pid not in excluded_pids and process.pid != os.getpid():
                try:
                    found[process.pid, process.create_time()] = cpu_s([process])
                except psutil.Error:
                    continue
        return found


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds of these processes and of their ended children, which the system adds to their parent."""
    used_s = 0.0
    for process in processes:
        try:
            used_s += sum(process.cpu_times()[:4])
        except psutil.Error:
            continue
    return used_s


def memory_bytes(processes: Sequence[psutil.Process], *, shared_once: bool) -> int:
    """Memory of these processes. Shared pages count once if `shared_once` (slow), else once per process."""
    found = 0
    for process in processes:
        try:
            if shared_once:
                memory = process.memory_full_info()
                found += getattr(memory, "pss", memory.uss)
            else:
                found += process.memory_info().rss
        except psutil.Error:
            continue
    return found


def _own_s() -> float:
    """CPU seconds of this process, without its children."""
    times = os.times()
    return times.user + times.system
