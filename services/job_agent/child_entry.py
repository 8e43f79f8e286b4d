"""The entry points of the agent's child processes.

Importing this module does not import torch: the fork server has imported it already, and the agent, which
only refers to these functions, never needs it.

A child is forked with SIGINT and SIGTERM blocked, because a terminal or a process manager signals the whole
process group. Only the agent handles Ctrl-C, and the store has to outlive the replicas. A child ends when its
pipe closes, and at the latest when the agent ends.
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
"""The last message of a process whose work is done."""


def replica(connection: Connection, start: bytes, output: str) -> None:
    """Run a replica. `start` is an encoded ReplicaStart, `output` the file for everything that it prints."""
    begin(output)
    from workloads.trainer.replica import run_replica

    run_replica(connection, decode(start, ReplicaStart))
    finish(connection)


def verifier(connection: Connection, start: bytes, output: str) -> None:
    """Run a verifier. `start` is an encoded VerifyStart, `output` the file for everything that it prints."""
    begin(output)
    from workloads.trainer.verify import run_verifier

    run_verifier(connection, decode(start, VerifyStart))
    finish(connection)


def store(connection: Connection, host: str) -> None:
    """Run the node's TCPStore."""
    end_with_agent()
    from workloads.trainer.store import run_store

    run_store(connection, host)


def begin(output: str) -> None:
    """What every process of a job does first. Prints go to the end of `output`, which is created if
    needed."""
    end_with_agent()
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    # Everything printed must be in the file even if the process dies.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def finish(connection: Connection) -> None:
    """Report that the work is done. A process that exits without this has failed, whatever its exit code."""
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        connection.send_bytes(FINISHED)


def end_with_agent() -> None:
    """Exit at once when the agent ends, whatever this process is waiting for."""
    agent = multiprocessing.parent_process()
    assert agent is not None

    def watch() -> None:
        wait([agent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-agent", daemon=True).start()
