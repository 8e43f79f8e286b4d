"""How a service lives: its log, its signals, its periodic tasks, its ordered close, its exit code.

Signals only set a flag; the poll loop (`common.messaging.reactor.Reactor`) wakes, sees it, and the service
closes in its own order. Nothing here installs anything at import.
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
"""Of one value in a line of the log."""
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """Something that a person has to mend: `str()` is the one line for them."""

    exit_code = EXIT_BAD_INPUT


class EndpointError(UserError):
    """An endpoint of the configuration that cannot be used."""

    TAKEN = "already taken: is another stack running?"

    def __init__(self, endpoint: str, problem: str) -> None:
        super().__init__(f"{endpoint}: {problem}")
        self.endpoint = endpoint


# --------------------------------------------------------------------------- log


class LazyLogger:
    """A structlog logger that is only made, and structlog only imported, at the first line that it writes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_structlog().get_logger(), name)


def get_logger() -> LazyLogger:
    """`get_logger().info("bound", endpoint=...)`: one readable line on stderr, `configure_logging` or not."""
    return LazyLogger()


def configure_logging(service: str) -> None:
    """Name the service in every line of its log. Costs nothing before the first line."""
    global _service
    _service = service


_service = ""
_configured: Any = None


def _structlog() -> Any:
    """structlog, set up once. Its own import of rich (a third of the time and 5 MB of memory) is kept
    away: a service prints plain lines."""
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
    """Set by SIGTERM or SIGINT, or by `request()`; readable on `wakeup_fd` so that a poll loop wakes.

    After the first SIGINT a second one kills the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self.interrupted = False
        """Asked to stop by SIGINT rather than by SIGTERM."""
        self.wakeup_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def install(self) -> "StopFlag":
        """Take over SIGTERM and SIGINT of this process; only from the main thread."""
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
        """Forget the bytes that woke the loop."""
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
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that what it started is taken down; the first of
    them, and none that the process ignores, as it does SIGHUP under nohup."""

    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # `timeout` sends its signal twice: the second must not end the taking down
            raise KeyboardInterrupt  # SystemExit may be a policy's of a user's own, and the scheduler goes on

    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    former = {number: signal.signal(number, stop) for number in wanted}
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def delayed_signals() -> Iterator[None]:
    """Signals that would raise within the block do so at its end: what it makes, such as a process, is then
    in the hands of who takes it down. For the main thread."""
    received: list[int] = []
    raising = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(n))]
    former = {number: signal.signal(number, lambda n, _: received.append(n)) for number in raising}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        for late in received:
            signal.raise_signal(late)


@contextlib.contextmanager
def blocked_signals(*numbers: int) -> Iterator[None]:
    """Processes that the block starts never hear of these signals, nor do theirs; who starts them ends them.
    Here a signal that comes meanwhile is heard at the end of the block."""
    from multiprocessing import resource_tracker  # for the few that start processes

    resource_tracker.ensure_running()  # its start would unblock them
    former = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


# --------------------------------------------------------------------------- periodic tasks


class Timer:
    """Handle of a planned call."""

    def __init__(self, due_s: float, interval_s: float | None, handler: Callable[[], None]) -> None:
        self.due_s = due_s
        self.interval_s = interval_s
        self.handler = handler
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Timers:
    """Planned calls, run by whoever owns the loop. `clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()

    def every(self, interval_s: float, handler: Callable[[], None]) -> Timer:
        """Call every `interval_s`, first after one interval; beats that a busy loop missed are skipped."""
        return self._push(Timer(self._clock() + interval_s, interval_s, handler))

    def call_later(self, delay_s: float, handler: Callable[[], None]) -> Timer:
        return self._push(Timer(self._clock() + delay_s, None, handler))

    def seconds_to_next(self) -> float | None:
        """Seconds until the next call is due, 0 when it is overdue; None without any."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None

    def run_due(self) -> None:
        """Call what is due now; what these calls plan waits for the next round."""
        now_s = self._clock()
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heapq.heappop(self._heap)[2])
        for timer in due:
            if timer.cancelled:
                continue
            if timer.interval_s is not None:
                beat_s = timer.due_s + timer.interval_s
                timer.due_s = beat_s if beat_s > now_s else now_s + timer.interval_s
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
    """Run every step, each with the seconds that are left of `deadline_s` (never negative).

    A step that raises is logged with its traceback and does not keep the others from running. Returns the
    names of the steps that raised.
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
    """What every `python -m services.X` does: configuration, log, signals, and errors for people.

    `body` runs the service until the flag is set and returns an exit code. A ConfigError or UserError ends
    as one line on stderr and its exit code; anything else that `body` raises is a bug: a traceback in the
    log, and exit code 1.
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
    """A honcho that is killed, or whose terminal is closed, tells its processes nothing. It is our parent's
    parent; a system without process descriptors leaves the stack to its user."""
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
    values = msgspec.structs.asdict(config.endpoints) if config else {}
    keys = [key for key, value in values.items() if value == endpoint]
    return f" (configured as endpoints.{keys[0]})" if keys else ""
