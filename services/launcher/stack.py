"""A whole stack on this machine: honcho and the Procfile's processes, started, awaited and stopped.

Each stack has a run of its own and binds free ports on a loopback address of its own, so stacks do not
disturb each other. All its processes have its endpoints in their environment: this is how `Stack.processes`
also finds those that outlived their parents.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
from honcho.environ import parse_procfile

from common.config import (
    CONFIG_FILE,
    PREFIX,
    RESERVED_NAMES,
    Config,
    EndpointsConfig,
    config_environment,
    new_run_id,
)
from common.lifecycle import EXIT_UNAVAILABLE, UserError
from common.messaging.request_reply import ServerUnavailable
from common.protocol import GetJobs, JobTable
from services.launcher.client import Client
from services.launcher.processes import STOP_TIMES, StopTimes, processes_with, stop_processes
from services.launcher.project_files import PROCFILE, PROCFILE_TEXT

OUTPUT_FILE = "stack.log"
START_S = 30.0
STARTING_STOP_TIMES = StopTimes(ask_s=0.5, terminate_s=1.0, kill_s=0.5)
"""For a stack that is not up yet, in which no job can be running."""
POLL_S = 0.05
TAIL_LINES = 15


class StackError(UserError):
    """The stack did not come up, or it ended by itself; the text includes the end of its output."""

    exit_code = EXIT_UNAVAILABLE


class Procfile(NamedTuple):
    """`source` says where the text comes from, for messages."""

    source: str
    text: str

    @property
    def nodes(self) -> set[str]:
        """Names of the nodes whose agents it starts. Raises StackError if it cannot be parsed."""
        try:
            commands = [shlex.split(line) for line in parse_procfile(self.text).processes.values()]
        except (ValueError, AssertionError) as error:  # honcho asserts that names are unique
            raise StackError(f"{self.source}: not a Procfile: {error}") from error
        agents = [words for words in commands if "services.job_agent" in words]
        return {name for words in agents for option, name in pairwise(words) if option == "--node"}


def current_procfile() -> Procfile:
    """The Procfile next to coadapt.toml in the current folder, or the built-in one if these two files are not
    there: a Procfile alone may belong to another program. Raises StackError if it cannot be read."""
    file = Path(PROCFILE)
    if not (file.exists() and Path(CONFIG_FILE).exists()):
        return Procfile("the built-in Procfile", PROCFILE_TEXT)
    try:
        return Procfile(str(file), file.read_text(encoding="utf-8"))
    except OSError as error:
        raise StackError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StackError(f"{file}: not UTF-8 text: {error}") from error


class Stack:
    """A context: inside it scheduler, collector, logger and the Procfile's agents are up.

    `config` is the stack's own: a copy of the given one with its endpoints and its run id. The run's folder
    has the output of the processes and the Procfile that started them.
    """

    def __init__(
        self,
        config: Config,
        environment: Mapping[str, str],
        *,
        procfile: Procfile | None = None,
        start_s: float = START_S,
    ) -> None:
        """`procfile`: `current_procfile()` if not given. Raises StackError or UserError before
        anything is started if the Procfile, the run id or the folder of logs cannot be used."""
        self._procfile = procfile or current_procfile()
        self._nodes = self._procfile.nodes
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
        """Names of the processes that did not stop in time."""
        self._start_s = start_s
        self._environment = stack_environment(self.config, environment)
        self._honcho: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._up = False

    def __enter__(self) -> "Stack":
        try:
            self._start()
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def jobs(self) -> JobTable:
        """The scheduler's job table. Raises StackError if the stack has ended or does not answer."""
        self.check()
        try:
            return self._ask(timeout_s=1.0, attempts=3)
        except ServerUnavailable as error:
            self.check()
            raise StackError(f"the scheduler does not answer: {error}{self._tail()}") from error

    def check(self) -> None:
        """Raises StackError if the stack has ended."""
        code = self._honcho.poll() if self._honcho else None
        if code is not None:
            raise StackError(f"the stack ended by itself with exit code {code}{self._tail()}")

    def processes(self) -> list[psutil.Process]:
        """All living processes of the stack, whatever their parent is by now."""
        mark = "COADAPT_ENDPOINTS_SCHEDULER_REQUESTS"
        return processes_with(mark, self._environment[mark])

    def stop(self) -> int | None:
        """Stop all processes; `killed` then names those that had to be killed.

        Returns honcho's exit code (143 after an orderly stop, -9 if the stack had not come up), or None if
        nothing was started.
        """
        self.killed += stop_processes(
            self.processes, self._ask_honcho_to_stop, STOP_TIMES if self._up else STARTING_STOP_TIMES
        )
        if self._client is not None:
            self._client.close()
            self._client = None
        return self._honcho.poll() if self._honcho else None

    def _ask_honcho_to_stop(self, timeout_s: float) -> None:
        if self._honcho is not None:
            # honcho loses a SIGTERM that arrives while it starts its processes
            self._honcho.send_signal(signal.SIGTERM if self._up else signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._honcho.wait(timeout_s)

    def _start(self) -> None:
        procfile = self.run_dir / PROCFILE
        procfile.write_text(self._procfile.text, encoding="utf-8")
        options = ["--no-colour", "-e", os.devnull, "-f", str(procfile.resolve())]
        with self.output.open("wb") as output:
            self._honcho = subprocess.Popen(
                [sys.executable, "-m", "honcho", *options, "start"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches only us: we stop the stack in order
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

    def _ask(self, timeout_s: float, attempts: int) -> JobTable:
        self._client = self._client or Client(self.config)
        return self._client.ask(GetJobs(), JobTable, timeout_s, attempts)

    def _tail(self) -> str:
        """The last lines of the stack's output, for an error message."""
        lines = self.output.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"; the end of {self.output}:", *(f"    {line}" for line in lines)])


def claim_run_id(config: Config) -> str:
    """Create the folder of a run; returns its id: the configured one, or a new one if none is configured.

    Raises UserError if the configured run exists: a log can hold only one run.
    """
    logs_dir, wanted = Path(config.run.logs_dir), config.run.run_id
    try:
        if not wanted:
            return new_run_id(logs_dir, config.scheduler.policy.partition(":")[0], time.time())
        (logs_dir / wanted).mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(
            f"run_id {wanted}: {logs_dir / wanted} exists already; choose another run_id, or move it away"
        ) from error
    except OSError as error:
        raise UserError(f"logs_dir {logs_dir}: cannot be used: {error.strerror}") from error
    return wanted


def free_endpoints(endpoints: EndpointsConfig) -> EndpointsConfig:
    """Free ports of a loopback address of our own, so that no other process takes them before they are
    bound."""
    names = [name for name in endpoints.__struct_fields__ if name != "keys_dir"]
    with ExitStack() as sockets:
        host = _own_loopback_address()
        chosen = {}
        for name in names:
            listener = sockets.enter_context(socket.socket())
            listener.bind((host, 0))
            chosen[name] = f"tcp://{host}:{listener.getsockname()[1]}"
    return msgspec.structs.replace(endpoints, **chosen)


def _own_loopback_address() -> str:
    """A random address of 127.0.0.0/8, or 127.0.0.1 on systems that have only this one."""
    address = "127.{}.{}.{}".format(*(1 + byte % 254 for byte in os.urandom(3)))
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return "127.0.0.1"
    return address


def stack_environment(config: Config, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that gives processes this configuration, and the Python that runs now."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(PREFIX) or name in RESERVED_NAMES
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    return {**kept, **config_environment(config), "PATH": path}
