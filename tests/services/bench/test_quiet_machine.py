"""The CPU use of a machine, and whether it is quiet enough."""

import os
import subprocess
import sys

import psutil
import pytest

from services.bench.quiet_machine import (
    LoadBounds,
    LoadMeasures,
    Meter,
    Usage,
    cpu_s,
    foreign,
    memory_bytes,
    noise,
    read_usage,
    steal,
    too_busy,
    wait_until_quiet,
)

BOUNDS = LoadBounds(busy_before=0.10, foreign_cpu=0.05, steal=0.02)
QUIET = LoadMeasures(
    load_before=0.1, load_mean=2.0, steal_fraction=0.001, foreign_cpu_fraction=0.01, peak_memory_bytes=1
)
BURN = """
import subprocess, sys, time
code = "import time\\nwhile time.process_time() < {seconds}: pass"
if sys.argv[1] == "parent":
    subprocess.run([sys.executable, "-c", code.format(seconds=0.3)], check=True)
print("done", flush=True)
sys.stdin.read()
"""


def used(busy_s: float, steal_s: float = 0.0) -> Usage:
    """Of two cores, in five seconds."""
    return Usage(all_s=10.0, busy_s=busy_s, steal_s=steal_s)


def test_other_processes_used_all_busy_time_that_is_not_ours() -> None:
    assert foreign(used(4.0), ours_s=3.0, others_s=0.9) == pytest.approx(0.1)
    assert foreign(used(4.0), ours_s=4.1, others_s=0.0) == 0.0
    assert foreign(used(4.0), ours_s=4.1, others_s=0.5) == pytest.approx(0.05)
    assert foreign(used(10.1), ours_s=0.0, others_s=0.0) == 1.0
    assert steal(used(1.0, steal_s=0.5)) == pytest.approx(0.05)
    assert foreign(Usage(all_s=0.0, busy_s=0.0, steal_s=0.0), ours_s=0.0, others_s=0.0) == 0.0


def test_a_machine_is_too_busy_because_of_other_processes_or_of_steal() -> None:
    assert too_busy(used(0.9), 0.0, 0.0, BOUNDS) == ""
    assert too_busy(used(1.5), 0.6, 0.0, BOUNDS) == ""
    busy = too_busy(used(1.5), 0.1, 0.0, BOUNDS)
    assert busy == "14.0% of the CPU used by other processes, above 10%"
    assert "20.0% of the CPU stolen" in too_busy(used(0.5, steal_s=2.0), 0.0, 0.0, BOUNDS)


@pytest.mark.parametrize(
    ("disturbed", "reason"),
    [
        ({}, ""),
        ({"foreign_cpu_fraction": 0.05}, ""),
        ({"foreign_cpu_fraction": 0.07}, "7.0% of the CPU used by other processes, above 5%"),
        ({"steal_fraction": 0.03}, "3.0% of the CPU stolen by the hypervisor, above 2%"),
        ({"load_before": 50.0, "load_mean": 50.0}, ""),
    ],
)
def test_a_run_is_noisy_above_the_bounds(disturbed: dict[str, float], reason: str) -> None:
    values = {name: getattr(QUIET, name) for name in LoadMeasures.__struct_fields__} | disturbed
    assert noise(LoadMeasures(**values), BOUNDS) == reason


def test_the_usage_of_the_machine_grows() -> None:
    before = read_usage()
    while (now := read_usage().since(before)).all_s < 0.2:
        pass
    assert 0.0 < now.busy_s < now.all_s + 0.05, "the system's count of idle time may go back a little"


def test_the_wait_for_a_machine_that_is_never_quiet_ends_after_one_more_watch() -> None:
    lines: list[str] = []
    never = LoadBounds(watch_s=0.1, busy_before=1e-9)
    burning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert "used by other processes" in wait_until_quiet(never, lines.append, wait_s=0.6)
        assert len(lines) == 1
        assert wait_until_quiet(LoadBounds(watch_s=0.1, busy_before=1.0), lines.append, wait_s=0.0) == ""
    finally:
        burning.kill()
        burning.wait(10)


def test_other_processes_are_counted_without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    ours: list[psutil.Process] = []
    meter = Meter(lambda: ours)
    with subprocess.Popen([sys.executable, "-c", BURN, "parent"], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"done\n"
        burnt_s = 0.3
        before = meter.measures().foreign_cpu_fraction
        all_s = read_usage().since(meter._before).all_s
        assert before >= 0.9 * burnt_s / all_s
        ours.append(psutil.Process(other.pid))
        # Other processes of this machine may end between two readings.
        monkeypatch.setattr(psutil, "process_iter", lambda: iter(ours))
        assert meter._others.used_s(()) >= burnt_s
        assert meter._others.used_s(ours) == 0.0


def test_the_cpu_time_of_ended_children_is_added_to_their_parent() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", BURN, "parent"], **pipes) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"done\n"
        meter = Meter(lambda: [psutil.Process(parent.pid)])
        assert cpu_s([psutil.Process(parent.pid)]) >= 0.3
        meter.sample()
        measures = meter.measures()
    assert measures.load_mean >= 0.0
    assert measures.peak_memory_bytes > memory_bytes([psutil.Process(os.getpid())], shared_once=True) // 2
    assert 0.0 <= measures.foreign_cpu_fraction <= 1.0


def test_ended_processes_count_as_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        process = psutil.Process(child.pid)
    assert cpu_s([process]) == 0.0
    assert memory_bytes([process], shared_once=True) == memory_bytes([process], shared_once=False) == 0
