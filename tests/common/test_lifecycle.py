"""Signals set a flag, timers keep their intervals, closing is ordered and bounded, errors are for people."""

import os
import select
import signal
import subprocess
import sys

import pytest

from common.lifecycle import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    EndpointError,
    StopFlag,
    Timers,
    UserError,
    close_in_order,
    delayed_signals,
    service_main,
    signals_as_interrupt,
)


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stop():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = StopFlag().install()
    yield stop
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)
    stop.close()


def readable(fd):
    return bool(select.select([fd], [], [], 0)[0])


def run_service(body, **environment):
    """Run `service_main("demo", body)` in its own process; `body` is the text of a lambda."""
    code = f"""
import os, signal, sys, time
from common.lifecycle import *
def fail(error): raise error
sys.exit(service_main("demo", {body}))
"""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=30,
    )


class TestStopFlag:
    @pytest.mark.parametrize(
        ("number", "exit_code"), [(signal.SIGTERM, EXIT_OK), (signal.SIGINT, EXIT_INTERRUPTED)]
    )
    def test_a_signal_sets_the_flag_and_wakes_the_loop(self, stop, number, exit_code):
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert readable(stop.wakeup_fd)
        assert stop.exit_code == exit_code

    def test_a_request_sets_it_like_a_signal(self, stop):
        stop.request()
        assert stop.requested
        assert readable(stop.wakeup_fd)

    def test_draining_forgets_any_number_of_wake_ups(self, stop):
        for _ in range(100_000):
            stop.request()
        stop.drain()
        assert not readable(stop.wakeup_fd)
        assert stop.requested

    def test_a_second_interrupt_kills_a_process_that_does_not_look(self):
        done = run_service(
            "lambda config, stop: [os.kill(os.getpid(), signal.SIGINT), os.kill(os.getpid(), signal.SIGINT)]"
        )
        assert done.returncode == -signal.SIGINT


class TestTimers:
    def test_a_later_call_is_made_once_when_it_is_due(self, clock):
        timers, calls = Timers(clock), []
        timers.call_later(1.0, lambda: calls.append("late"))
        timers.call_later(0.5, lambda: calls.append("early"))
        assert timers.seconds_to_next() == 0.5
        timers.run_due()
        assert calls == []
        clock.now_s += 1.0
        timers.run_due()
        timers.run_due()
        assert calls == ["early", "late"]
        assert timers.seconds_to_next() is None

    def test_a_periodic_call_keeps_its_beat(self, clock):
        timers, calls = Timers(clock), []
        timers.every(1.0, lambda: calls.append(clock.now_s))
        for _ in range(30):
            clock.now_s += 0.25
            timers.run_due()
        assert calls == [101.0, 102.0, 103.0, 104.0, 105.0, 106.0, 107.0]

    def test_calls_that_a_busy_loop_missed_are_skipped(self, clock):
        timers, calls = Timers(clock), []
        timers.every(1.0, lambda: calls.append(clock.now_s))
        clock.now_s += 10.5
        timers.run_due()
        timers.run_due()
        assert calls == [110.5]
        assert timers.seconds_to_next() == pytest.approx(1.0)

    def test_a_cancelled_timer_is_not_called(self, clock):
        timers, calls = Timers(clock), []
        timers.call_later(0.1, lambda: calls.append("later")).cancel()
        every = timers.every(0.1, lambda: [calls.append("every"), every.cancel()])
        clock.now_s += 1.0
        timers.run_due()
        clock.now_s += 1.0
        timers.run_due()
        assert calls == ["every"]
        assert timers.seconds_to_next() is None

    def test_a_call_planned_by_a_due_call_waits_for_the_next_time(self, clock):
        timers, calls = Timers(clock), []

        def again():
            calls.append(clock.now_s)
            timers.call_later(0.0, again)

        timers.call_later(0.0, again)
        timers.run_due()
        assert len(calls) == 1
        assert timers.seconds_to_next() == 0.0


class TestCloseInOrder:
    def test_each_step_gets_the_seconds_that_are_left(self, clock):
        got = []

        def step(left_s):
            got.append(left_s)
            clock.now_s += 1.5

        assert close_in_order([("a", step), ("b", step), ("c", step)], 2.0, clock) == []
        assert got == [2.0, 0.5, 0.0]

    def test_a_step_that_raises_does_not_stop_the_others(self, clock, capfd):
        ran = []

        def broken(_left_s):
            raise RuntimeError("no more")

        assert close_in_order([("broken", broken), ("last", ran.append)], 1.0, clock) == ["broken"]
        assert ran == [1.0]
        assert "RuntimeError: no more" in capfd.readouterr().err


class TestServiceMain:
    @pytest.fixture(autouse=True)
    def restore_signals(self, stop):
        """`service_main` handles the signals of this process; this restores the previous handlers."""

    def test_the_body_gets_the_configuration_and_its_exit_code_is_returned(self, monkeypatch):
        monkeypatch.setenv("COADAPT_SCHEDULER_ROUND_S", "7")
        assert service_main("demo", lambda config, stop: int(config.scheduler.round_s)) == 7

    def test_a_bad_configuration_is_one_line_and_exit_code_2(self, monkeypatch, capsys):
        monkeypatch.setenv("COADAPT_SCHEDULER_ROUND_S", "-1")
        assert service_main("demo", lambda config, stop: 0) == EXIT_BAD_INPUT
        assert capsys.readouterr().err == "demo: COADAPT_SCHEDULER_ROUND_S='-1': Expected `float` > 0.0\n"

    def test_an_error_for_people_is_one_line_and_its_exit_code(self, capsys):
        def body(config, stop):
            raise UserError("no such policy")

        assert service_main("demo", body) == EXIT_BAD_INPUT
        assert capsys.readouterr().err == "demo: no such policy\n"

    def test_an_endpoint_error_names_the_key_of_the_configuration(self, monkeypatch, capsys):
        def body(config, stop):
            raise EndpointError(config.endpoints.logger_events, "already taken")

        monkeypatch.setenv("COADAPT_ENDPOINTS_LOGGER_EVENTS", "tcp://127.0.0.1:1")
        assert service_main("demo", body) == EXIT_BAD_INPUT
        expected = "demo: tcp://127.0.0.1:1: already taken (configured as endpoints.logger_events)\n"
        assert capsys.readouterr().err == expected

    def test_a_bug_is_a_traceback_and_exit_code_1(self):
        done = run_service("lambda config, stop: 1 / 0")
        assert done.returncode == EXIT_FAILED
        assert "ZeroDivisionError" in done.stderr
        assert "demo error: stopped by a bug" in done.stderr

    def test_exit_codes_are_those_of_the_design(self):
        assert (EXIT_BAD_INPUT, EXIT_UNAVAILABLE, EXIT_INTERRUPTED) == (2, 3, 130)


class TestLog:
    def test_a_line_is_plain_text_with_time_service_level_and_pairs(self):
        done = run_service('lambda config, stop: get_logger().info("bound", endpoint="tcp://x", n=3) or 0')
        clock_time, rest = done.stderr.split(" ", 1)
        assert len(clock_time.split(":")) == 3
        assert rest == "demo info: bound endpoint=tcp://x n=3\n"

    def test_a_value_cannot_forge_a_line(self):
        done = run_service(r'lambda config, stop: get_logger().info("bad", text="a\nb\x1b[31m") or 0')
        assert done.stderr.endswith(r"bad text=a\nb\x1b[31m" + "\n")
        assert done.stderr.count("\n") == 1

    def test_logging_imports_neither_rich_nor_numpy(self):
        loaded = '[get_logger().info("x"), "rich" in sys.modules or "numpy" in sys.modules][1]'
        assert run_service(f"lambda config, stop: int({loaded})").returncode == 0

    def test_rich_can_still_be_imported_after_a_line_was_logged(self):
        done = run_service('lambda config, stop: [get_logger().info("x"), __import__("rich.table"), 0][2]')
        assert done.returncode == 0, done.stderr

    def test_a_log_without_lines_loads_no_library(self):
        done = run_service('lambda config, stop: int("structlog" in sys.modules)')
        assert done.returncode == 0


def test_a_signal_that_comes_twice_does_not_interrupt_the_cleanup():
    taken_down = []

    def block():
        with signals_as_interrupt():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGHUP)
                taken_down.append(True)

    with pytest.raises(SystemExit) as exited:
        block()
    assert exited.value.code == 128 + signal.SIGTERM
    assert taken_down
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_ends_a_block_through_code_that_catches_system_exit():
    def block():
        with signals_as_interrupt():
            try:
                signal.raise_signal(signal.SIGTERM)
            except (Exception, SystemExit):
                pytest.fail("taken for a mistake")

    with pytest.raises(SystemExit) as exited:
        block()
    assert exited.value.code == 128 + signal.SIGTERM


def test_an_ignored_hangup_does_not_end_the_block():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_interrupt():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_delayed_signal_raises_after_the_block():
    made = []

    def block():
        with delayed_signals():
            signal.raise_signal(signal.SIGINT)
            made.append(True)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert made
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
