"""The whole stack on this machine: honcho and the Procfile, started, waited for, and taken down again.

A stack has a run of its own and binds free ports of a loopback address of its own, so that it meets no
other stack. Every process of it carries the stack's endpoints in its environment; that is how those are
found which outlived their parents.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import msgspec
import psutil
from honcho.environ import parse_procfile

from common.config import (
    PREFIX,
    RESERVED_NAMES,
    Config,
    EndpointsConfig,
    config_environment,
    new_run_id,
)
from common.lifecycle import EXIT_UNAVAILABLE, UserError
from common.messaging.curve_keys import load_keys
from common.messaging.request_reply import RequestClient, ServerUnavailable
from common.protocol import GetJobs, JobTable

ROOT = Path(__file__).resolve().parents[2]
PROCFILE = ROOT / "Procfile"
OUTPUT_FILE = "stack.log"
START_S = 30.0
STOP_S = 4.4
"""Between the stop signal and the killing of what is left; honcho itself kills 5 s after the first exit."""
STARTING_STOP_S = 1.5
KILL_S = 0.5
POLL_S = 0.05
TAIL_LINES = 15


class StackError(UserError):
    """The stack did not come up, or ended by itself; the text has the end of its output."""

    exit_code = EXIT_UNAVAILABLE


class Stack:
    """A context: inside it scheduler, collector, logger and the Procfile's agents are up.

    `config` is that of the stack: a copy of the given one with its own endpoints and run id.
    """

    def __init__(
        self,
        config: Config,
        environment: Mapping[str, str],
        *,
        procfile: Path = PROCFILE,
        start_s: float = START_S,
    ) -> None:
        self._nodes = expected_nodes(procfile)
        run_id = claim_run_id(config)
        self.config = msgspec.structs.replace(
            config,
            run=msgspec.structs.replace(config.run, run_id=run_id),
            endpoints=free_endpoints(config.endpoints),
        )
        self.run_id = run_id
        self.run_dir = config.run_dir(run_id)
        self.output = self.run_dir / OUTPUT_FILE
        self.killed: tuple[str, ...] = ()
        """Names of the processes that did not stop when they were asked to."""
        self._procfile = procfile
        self._start_s = start_s
        self._environment = stack_environment(self.config, environment)
        self._honcho: subprocess.Popen[bytes] | None = None
        self._client: RequestClient | None = None
        self._up = False

    def __enter__(self) -> "Stack":
        try:
            self._start()
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def jobs(self) -> JobTable:
        """The scheduler's job table. Raises StackError when the stack is no longer there."""
        self.check()
        try:
            return self._ask(timeout_s=1.0, attempts=3)
        except ServerUnavailable as error:
            self.check()
            raise StackError(f"the scheduler does not answer: {error}{self._tail()}") from error

    def check(self) -> None:
        code = self._honcho.poll() if self._honcho else None
        if code is not None:
            raise StackError(f"the stack ended by itself with exit code {code}{self._tail()}")

    def processes(self) -> list[psutil.Process]:
        """Every living process of the stack, whoever its parent is by now."""
        mark = "COADAPT_ENDPOINTS_SCHEDULER_REQUESTS"
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(mark) == self._environment[mark] and process.pid != os.getpid():
                    found.append(process)
            except psutil.Error:
                continue  # gone, a zombie, or another user's
        return found

    def stop(self) -> int | None:
        """Ask all to stop, and kill after `STOP_S` what did not; earlier where no job can have started.

        Returns honcho's exit code (143 after an orderly stop, -9 where the stack had not come up); None when
        nothing had been started.
        """
        wait_s = STOP_S if self._up else STARTING_STOP_S
        deadline_s = time.monotonic() + wait_s
        try:
            if self._honcho and self._honcho.poll() is None:
                # honcho loses a SIGTERM that comes while it starts its processes
                self._honcho.send_signal(signal.SIGTERM if self._up else signal.SIGKILL)
                self._honcho.wait(wait_s)
            orphans = self.processes()
            for process in orphans:
                process.terminate()
            psutil.wait_procs(orphans, timeout=max(deadline_s - time.monotonic(), 0.0))
        except (subprocess.TimeoutExpired, psutil.NoSuchProcess):
            pass
        finally:  # also where a second Ctrl-C ended the waiting
            self._kill_the_rest()
        return self._honcho.poll() if self._honcho else None

    def _start(self) -> None:
        options = ["--no-colour", "-e", os.devnull, "-f", str(self._procfile)]
        with self.output.open("wb") as output:
            self._honcho = subprocess.Popen(
                [sys.executable, "-m", "honcho", *options, "start"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is for us, and we pass it on in order
            )

    def _wait_until_up(self) -> None:
        missing = {"the scheduler"}
        deadline_s = time.monotonic() + self._start_s
        while time.monotonic() < deadline_s:
            self.check()
            try:
                missing = self._nodes - {node.name for node in self._ask(timeout_s=0.25, attempts=1).nodes}
            except ServerUnavailable:
                continue
            if not missing:
                self._up = True
                return
            time.sleep(POLL_S)
        raise StackError(
            f"the stack is not up after {self._start_s:g} s; missing: "
            f"{', '.join(sorted(missing))}{self._tail()}"
        )

    def _kill_the_rest(self) -> None:
        deadline_s = time.monotonic() + KILL_S
        while rest := self.processes():  # again, for what one of them had just started
            for process in rest:
                try:
                    name = f"{process.pid} {shlex.join(process.cmdline())}"
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
                self.killed += (name,)
            psutil.wait_procs(rest, timeout=KILL_S)
            if time.monotonic() > deadline_s:
                return

    def _ask(self, timeout_s: float, attempts: int) -> JobTable:
        if self._client is None:
            endpoints = self.config.endpoints
            keys = load_keys(endpoints.keys_dir)
            self._client = RequestClient(endpoints.scheduler_requests, keys, limits=self.config.limits)
        reply = self._client.request(GetJobs(), timeout_s=timeout_s, attempts=attempts)
        if not isinstance(reply, JobTable):
            raise StackError(f"the scheduler answered GetJobs with {type(reply).__name__}")
        return reply

    def _tail(self) -> str:
        """The end of what the stack's processes said, for a person."""
        lines = self.output.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"; the end of {self.output}:", *(f"    {line}" for line in lines)])


def claim_run_id(config: Config) -> str:
    """The run id of a stack, its folder made: the wanted one, or a new one.

    Raises UserError when the wanted run is there already: two runs in one log would spoil both.
    """
    logs_dir, wanted = Path(config.run.logs_dir), config.run.run_id
    try:
        if not wanted:
            return new_run_id(logs_dir, config.scheduler.policy.partition(":")[0], time.time())
        (logs_dir / wanted).mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(f"run_id {wanted}: {logs_dir / wanted} is there already") from error
    except OSError as error:
        raise UserError(f"logs_dir {logs_dir}: cannot be used: {error.strerror}") from error
    return wanted


def free_endpoints(endpoints: EndpointsConfig) -> EndpointsConfig:
    """Free ports of a loopback address of our own, so that nobody takes them before they are bound."""
    names = [name for name in endpoints.__struct_fields__ if name != "keys_dir"]
    with ExitStack() as sockets:
        host = ""
        chosen = {}
        for name in names:
            listener = sockets.enter_context(socket.socket())
            host = host or _own_loopback_address()
            listener.bind((host, 0))
            chosen[name] = f"tcp://{host}:{listener.getsockname()[1]}"
    return msgspec.structs.replace(endpoints, **chosen)


def _own_loopback_address() -> str:
    """A random one of 127.0.0.0/8; systems that have only 127.0.0.1 get that."""
    address = "127.{}.{}.{}".format(*(1 + byte % 254 for byte in os.urandom(3)))
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return "127.0.0.1"
    return address


def expected_nodes(procfile: Path) -> set[str]:
    """Names of the nodes whose agents a Procfile starts."""
    try:
        commands = parse_procfile(procfile.read_text()).processes.values()
    except OSError as error:
        raise StackError(f"{procfile}: cannot be read: {error.strerror}") from error
    words = [shlex.split(command) for command in commands]
    return {w[w.index("--node") + 1] for w in words if "services.job_agent" in w and "--node" in w}


def stack_environment(config: Config, environment: Mapping[str, str]) -> dict[str, str]:
    """What gives every process exactly this configuration, and the Python and packages that run now."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(PREFIX) or name in RESERVED_NAMES
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    packages = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    return {**kept, **config_environment(config), "PATH": path, "PYTHONPATH": packages}
