"""Where the agent's child processes begin. Importing this module does not import torch: the forkserver has it
already, and the agent, which only names these functions, never needs it.

A child is forked with SIGINT and SIGTERM blocked, since a terminal or a process manager signals the whole
group: Ctrl-C is for the agent alone, and the store outlives the replicas. It ends when its pipe closes, and
in any case with the agent.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection, wait

from common.codec import decode
from common.protocol import ReplicaStart, VerifyStart

FINISHED = b""
"""Last message of a process that ends because its work is done."""


def replica(connection: Connection, start: bytes, output: str) -> None:
    """A replica: `start` is an encoded ReplicaStart, `output` the file for all that it prints."""
    begin(output)
    from workloads.trainer.replica import run_replica

    run_replica(connection, decode(start, ReplicaStart))
    finish(connection)


def verifier(connection: Connection, start: bytes, output: str) -> None:
    """A verifier: `start` is an encoded VerifyStart."""
    begin(output)
    from workloads.trainer.verify import run_verifier

    run_verifier(connection, decode(start, VerifyStart))
    finish(connection)


def store(connection: Connection, host: str) -> None:
    """The node's TCPStore."""
    end_with_agent()
    from workloads.trainer.store import run_store

    run_store(connection, host)


def begin(output: str) -> None:
    """What every process of a job does first; `output` is created or appended to."""
    end_with_agent()
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    # What is printed must be in the file when the process dies.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def finish(connection: Connection) -> None:
    """Say that the work is done: exiting without this word is a failure, whatever the exit code."""
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        connection.send_bytes(FINISHED)


def end_with_agent() -> None:
    """Exit at once when the agent has died, whatever this process is waiting for."""
    agent = multiprocessing.parent_process()
    assert agent is not None

    def watch() -> None:
        wait([agent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-agent", daemon=True).start()
