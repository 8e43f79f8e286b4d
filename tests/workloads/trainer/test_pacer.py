import hashlib
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.trainer.pacer import BURST_S, Pacer

SPEEDS = [0.1, 0.2, 0.3, 0.5, 0.8, 0.9]


class Machine:
    """Wall and CPU clock of a process; sleep wakes up late, as in reality."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s, self.used_s, self.late_s, self.sleeps = 0.0, 0.0, late_s, 0

    def work(self, cpu_s: float, threads: int = 1) -> None:
        """`cpu_s` of every thread."""
        self.now_s += cpu_s
        self.used_s += cpu_s * threads

    def wait(self, wall_s: float) -> None:
        self.now_s += wall_s

    def sleep(self, duration_s: float) -> None:
        self.sleeps += 1
        self.now_s += duration_s + self.late_s

    def pacer(self, speed: float) -> Pacer:
        return Pacer(speed, lambda: self.now_s, lambda: self.used_s, self.sleep)


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("late_s", [0.0, 0.002])
@pytest.mark.parametrize("step_s", [0.0003, 0.01])
def test_the_share_of_the_core_is_the_slots_speed(speed: float, late_s: float, step_s: float) -> None:
    machine = Machine(late_s)
    pacer = machine.pacer(speed)
    while machine.now_s < 10.0:
        machine.work(step_s)
        pacer.pause()
    assert machine.used_s / machine.now_s == pytest.approx(speed, rel=0.005)


def test_one_piece_of_work_takes_as_long_as_on_a_core_of_that_speed() -> None:
    machine = Machine()
    pacer = machine.pacer(0.25)
    ends_s = []
    for cpu_s in (0.002, 0.5, 0.0, 0.01):
        machine.work(cpu_s)
        pacer.pause()
        ends_s.append(machine.now_s)
    assert ends_s == pytest.approx([0.008, 2.008, 2.008, 2.048])


def test_waiting_for_others_counts_as_time_in_which_the_core_was_not_used() -> None:
    machine = Machine()
    pacer = machine.pacer(0.25)
    while machine.now_s < 10.0:
        machine.work(0.002)
        pacer.pause()
        machine.work(0.0005)
        machine.wait(0.004)
    assert machine.used_s / machine.now_s == pytest.approx(0.25, rel=0.005)


@pytest.mark.parametrize("speed", [*SPEEDS, 1.0])
def test_cpu_time_of_helper_threads_counts(speed: float) -> None:
    machine = Machine()
    pacer = machine.pacer(speed)
    while machine.now_s < 10.0:
        machine.work(0.002)
        machine.work(0.001, threads=3)
        pacer.pause()
    assert machine.used_s / machine.now_s == pytest.approx(speed, rel=0.005)


def test_a_long_wait_allows_only_a_short_burst() -> None:
    machine = Machine()
    pacer = machine.pacer(0.5)
    machine.wait(60.0)
    pacer.pause()
    for _ in range(2):
        machine.work(0.05)
        pacer.pause()
    assert machine.now_s == pytest.approx(60.1)
    for _ in range(2):
        machine.work(0.05)
        pacer.pause()
    assert machine.now_s == pytest.approx(60.1 + 2 * 0.1)


@given(st.lists(st.tuples(st.floats(0.0, 0.3), st.floats(0.0, 0.3)), min_size=1, max_size=50))
def test_the_cpu_clock_never_runs_ahead_by_more_than_a_burst(work: list[tuple[float, float]]) -> None:
    machine = Machine()
    pacer = machine.pacer(0.3)
    marks = [(0.0, 0.0)]
    for cpu_s, wall_s in work:
        machine.work(cpu_s)
        machine.wait(wall_s)
        pacer.pause()
        marks.append((machine.now_s, machine.used_s))
    for start, used_before in marks:
        used_s, wall_s = machine.used_s - used_before, machine.now_s - start
        assert used_s <= 0.3 * (wall_s + BURST_S) + 1e-9


def test_a_slot_of_a_whole_core_never_sleeps() -> None:
    machine = Machine()
    pacer = machine.pacer(1.0)
    for _ in range(100):
        machine.work(0.01)
        pacer.pause()
    assert machine.sleeps == 0


@pytest.mark.parametrize("speed", [0.0, -0.5, 1.01, float("nan")])
def test_an_impossible_speed_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="above 0, at most 1"):
        Pacer(speed)


def test_a_real_process_with_a_helper_thread_keeps_to_its_share() -> None:
    """However busy the machine is: a process never gets more CPU time than it takes."""
    data = bytes(2_000_000)

    def work() -> None:
        hashlib.sha256(data)  # without the interpreter's lock

    pacer = Pacer(0.3)
    start_s, used_s = time.monotonic(), time.process_time()
    while time.monotonic() - start_s < 0.8:
        helper = threading.Thread(target=work)
        helper.start()
        work()
        helper.join()
        pacer.pause()
    share = (time.process_time() - used_s) / (time.monotonic() - start_s)
    assert 0.0 < share <= 0.3 * 1.02
