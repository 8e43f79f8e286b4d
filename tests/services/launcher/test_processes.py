"""The ladder that stops processes, on real processes."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from services.launcher.processes import (
    STOP_TIMES,
    StopTimes,
    family_of,
    running_python,
    start_python,
    stop_processes,
    stop_started,
)

LONG = StopTimes(ask_s=20.0, terminate_s=20.0, kill_s=20.0)
NO_PATIENCE = StopTimes(ask_s=0.0, terminate_s=0.1, kill_s=20.0)
UNTIL_INPUT_ENDS = "print(flush=True); import sys; sys.stdin.read()"
SLEEPS = "print(flush=True); import time; time.sleep(60)"
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
HAS_A_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '''{SLEEPS}''']).wait()"


@contextmanager
def python(code: str) -> Iterator[subprocess.Popen[str]]:
    """A program that has printed its first line."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with start_python("-c", code, environment={}, **pipes) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            for member in family_of([process.pid])():
                member.kill()


def test_the_whole_ladder_is_over_before_honcho_kills() -> None:
    assert sum(STOP_TIMES) < 4.0


def test_a_process_that_stops_when_it_is_asked_gets_no_signal() -> None:
    with python(UNTIL_INPUT_ENDS) as process:

        def ask(timeout_s: float) -> None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout_s)

        assert stop_processes(family_of([process.pid]), ask, LONG) == ()
        assert process.returncode == 0


def test_a_process_that_does_not_stop_when_it_is_asked_gets_sigterm() -> None:
    with python(SLEEPS) as process:
        asked_s: list[float] = []
        assert stop_processes(family_of([process.pid]), asked_s.append, LONG) == ()
        assert asked_s == [LONG.ask_s]
        assert family_of([process.pid])() == []


def test_a_process_that_ignores_sigterm_is_killed_and_named() -> None:
    with python(IGNORES_SIGTERM) as process:
        (killed,) = stop_processes(family_of([process.pid]), times=NO_PATIENCE)
        assert killed.startswith(f"{process.pid} {sys.executable} -c")
        assert family_of([process.pid])() == []


def test_an_interrupt_while_it_waits_kills_the_rest_at_once() -> None:
    def interrupted(timeout_s: float) -> None:
        raise KeyboardInterrupt

    with python(IGNORES_SIGTERM) as process:
        start_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            stop_processes(family_of([process.pid]), interrupted, LONG)
        assert time.monotonic() - start_s < LONG.ask_s
        assert family_of([process.pid])() == []


def test_a_child_whose_parent_has_ended_is_still_in_the_family() -> None:
    with python(HAS_A_CHILD) as process:
        family = family_of([process.pid])
        (child,) = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        assert family() == [child]
        stop_processes(family, times=NO_PATIENCE)
        assert family() == []


def test_a_started_process_is_stopped_with_its_children_and_its_exit_code_is_known() -> None:
    with python(HAS_A_CHILD) as process:
        family = family_of([process.pid])
        assert len(family()) == 2
        stop_started([process])
        assert family() == []
        assert process.returncode == -15
        assert process.stdout is not None
        assert process.stdout.closed


def test_a_running_program_ends_with_its_block() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        running_python("-c", SLEEPS, environment={}, stdout=subprocess.PIPE) as process,
    ):
        raise ZeroDivisionError
    assert process.returncode == -15
