"""The life of a service: its log, its signals, its timers, its ordered close and its exit code.

A signal only sets a flag. The poll loop (`common.messaging.reactor.Reactor`) wakes up, sees the flag, and the
service closes its parts in order. Importing this module installs nothing.
"""

import contextlib
import heapq
import itertools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from common.codec import printable
from common.config import Config, ConfigError, load_config

MAX_LOG_CHARS = 1000
"""Longest value in a line of a service's log."""
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """An error that a person can fix; `str()` is one line that says how."""

    exit_code = EXIT_BAD_INPUT


class EndpointError(UserError):
    """An endpoint in the configuration cannot be used."""

    TAKEN = "already taken: is another stack running?"

    def __init__(self, endpoint: str, problem: str) -> None:
        super().__init__(f"{endpoint}: {problem}")
        self.endpoint = endpoint


# --------------------------------------------------------------------------- log


class LazyLogger:
    """A structlog logger that imports structlog only when it writes its first line."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_structlog().get_logger(), name)


def get_logger() -> LazyLogger:
    """A logger: `get_logger().info("bound", endpoint=...)` writes one readable line to stderr."""
    return LazyLogger()


def configure_logging(service: str) -> None:
    """Set the service name that starts every line of the log."""
    global _service
    _service = service


_service = ""
_configured: Any = None


def _structlog() -> Any:
    """structlog, configured once. Its import of rich is blocked: it takes a third of the time and 5 MB of
    memory, and a service prints plain lines only."""
    global _configured
    if _configured is None:
        rich = sys.modules.get("rich")
        sys.modules["rich"] = None  # type: ignore[assignment]
        try:
            import structlog
        finally:
            del sys.modules["rich"]
            if rich is not None:
                sys.modules["rich"] = rich
        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
                structlog.processors.format_exc_info,
                _render_line,
            ],
            logger_factory=lambda: structlog.WriteLogger(sys.stderr),
        )
        _configured = structlog
    return _configured


def _render_line(_logger: Any, _method: str, event: Any) -> str:
    trace = event.pop("exception", "")
    head = f"{event.pop('timestamp')} {_service} {event.pop('level')}: {event.pop('event')}".replace(
        "  ", " "
    )
    pairs = "".join(f" {key}={printable(str(value), MAX_LOG_CHARS)}" for key, value in event.items())
    return head + pairs + (f"\n{trace}" if trace else "")


# --------------------------------------------------------------------------- signals


class StopFlag:
    """Set by SIGTERM, by SIGINT, or by `request()`. `wakeup_fd` becomes readable, which wakes a poll loop.

    A second SIGINT kills the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self.interrupted = False
        """Whether SIGINT requested the stop."""
        self.wakeup_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def install(self) -> "StopFlag":
        """Handle SIGTERM and SIGINT of this process. Call it in the main thread."""
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        return self

    def request(self) -> None:
        self.requested = True
        self._wake()

    @property
    def exit_code(self) -> int:
        return EXIT_INTERRUPTED if self.interrupted else EXIT_OK

    def drain(self) -> None:
        """Read the bytes that woke the loop."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wakeup_fd, 512):
                pass

    def close(self) -> None:
        os.close(self.wakeup_fd)
        os.close(self._write_fd)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            self.interrupted = True
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"\0")


@contextlib.contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that it can stop what it has started.

    Only the first signal counts. A signal that the process ignores, such as SIGHUP under nohup, stays
    ignored.
    """

    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # `timeout` sends its signal twice; the second must not interrupt the cleanup
            raise KeyboardInterrupt  # not SystemExit: a user's policy may raise that, and it is caught

    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in wanted}
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def delayed_signals() -> Iterator[None]:
    """Delay signals to the end of the block. What the block creates, such as a process, is then known to the
    code that cleans it up. Call it in the main thread."""
    received: list[int] = []
    raising = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(n))]
    previous = {number: signal.signal(number, lambda n, _: received.append(n)) for number in raising}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for late in received:
            signal.raise_signal(late)


@contextlib.contextmanager
def blocked_signals(*numbers: int) -> Iterator[None]:
    """Processes started in the block, and their children, never receive these signals: their parent ends
    them. In this process a signal is delayed to the end of the block."""
    from multiprocessing import resource_tracker  # here, because few services start processes

    resource_tracker.ensure_running()  # starting it later would unblock the signals
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


# --------------------------------------------------------------------------- timers


class Timer:
    """A planned call."""

    def __init__(self, due_s: float, interval_s: float | None, handler: Callable[[], None]) -> None:
        self.due_s = due_s
        self.interval_s = interval_s
        self.handler = handler
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Timers:
    """Planned calls, run by the owner of the poll loop. `clock` returns seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()

    def every(self, interval_s: float, handler: Callable[[], None]) -> Timer:
        """Call `handler` every `interval_s`, first after one interval. Calls that a busy loop misses are
        skipped."""
        return self._push(Timer(self._clock() + interval_s, interval_s, handler))

    def call_later(self, delay_s: float, handler: Callable[[], None]) -> Timer:
        """Call `handler` once, after `delay_s`."""
        return self._push(Timer(self._clock() + delay_s, None, handler))

    def seconds_to_next(self) -> float | None:
        """Seconds until the next call is due; 0 if it is overdue, None if there is none."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None

    def run_due(self) -> None:
        """Make the calls that are due now. Calls that these plan wait for the next time."""
        now_s = self._clock()
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heapq.heappop(self._heap)[2])
        for timer in due:
            if timer.cancelled:
                continue
            if timer.interval_s is not None:
                next_s = timer.due_s + timer.interval_s
                timer.due_s = next_s if next_s > now_s else now_s + timer.interval_s
                self._push(timer)
            timer.handler()

    def _push(self, timer: Timer) -> Timer:
        heapq.heappush(self._heap, (timer.due_s, next(self._count), timer))
        return timer


# --------------------------------------------------------------------------- close and exit


def close_in_order(
    steps: Sequence[tuple[str, Callable[[float], object]]],
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run every step (name, function). Each gets the seconds that are left of `deadline_s`, at least 0.

    If a step raises, its traceback is logged and the other steps still run. Returns the names of the steps
    that raised.
    """
    end_s = clock() + deadline_s
    failed = []
    for name, step in steps:
        try:
            step(max(0.0, end_s - clock()))
        except Exception:
            get_logger().exception("closing failed", step=name)
            failed.append(name)
    return failed


def service_main(service: str, body: Callable[[Config, StopFlag], int]) -> int:
    """The main function of every `python -m services.X`: reads the configuration, sets up log and signals,
    and returns the exit code.

    `body` runs the service until the flag is set and returns an exit code. A ConfigError or UserError becomes
    one line on stderr and its exit code. Any other exception is a bug: a traceback in the log and exit code
    1.
    """
    configure_logging(service)
    config = None
    try:
        config = load_config(os.environ)
        stop = StopFlag().install()
        if "HONCHO_PROCESS_NAME" in os.environ:
            _stop_with_honcho(stop)
        return body(config, stop)
    except ConfigError as error:
        print(f"{service}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except EndpointError as error:
        print(f"{service}: {error}{_key_of(error.endpoint, config)}", file=sys.stderr)
        return error.exit_code
    except UserError as error:
        print(f"{service}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception:
        get_logger().exception("stopped by a bug")
        return EXIT_FAILED


def _stop_with_honcho(stop: StopFlag) -> None:
    """Stop when honcho dies. Honcho does not stop its processes if it is killed or its terminal is closed. It
    is the parent of our parent. On a system without process descriptors the user must stop the services."""
    if not hasattr(os, "pidfd_open"):
        return
    parent = os.getppid()
    honcho = int(Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[1])
    ancestors = [os.pidfd_open(pid) for pid in (parent, honcho)]

    def wait() -> None:
        select.select(ancestors, [], [])
        stop.request()

    threading.Thread(target=wait, name="stop-with-honcho", daemon=True).start()


def _key_of(endpoint: str, config: Config | None) -> str:
    """The configuration key of an endpoint, as the end of a message."""
    values = msgspec.structs.asdict(config.endpoints) if config else {}
    keys = [key for key, value in values.items() if value == endpoint]
    return f" (configured as endpoints.{keys[0]})" if keys else ""
