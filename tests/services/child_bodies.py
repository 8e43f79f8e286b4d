"""What child processes of the agent do in its tests. Small, since every child imports it after its start."""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from services.job_agent import entry

FOREVER_S = 120.0


def echo(connection: Connection, start: bytes, output: str) -> None:
    entry.begin(output)
    connection.send_bytes(b"ready " + start)
    while True:
        connection.send_bytes(connection.recv_bytes())


def talk_and_finish(connection: Connection, start: bytes, output: str) -> None:
    entry.begin(output)
    for number in range(500):
        connection.send_bytes(b"%d" % number)
    entry.finish(connection)


def exit_with(connection: Connection, start: bytes, output: str) -> None:
    entry.begin(output)
    print("last words")
    connection.send_bytes(b"one more thing")
    os._exit(int(start))


def ignore_everything(connection: Connection, start: bytes, output: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    entry.end_with_agent()
    connection.send_bytes(b"ready")
    time.sleep(FOREVER_S)


def tell_signals(connection: Connection, start: bytes, output: str) -> None:
    entry.begin(output)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    names = sorted(signal.Signals(number).name for number in blocked)
    connection.send_bytes(" ".join(["blocked:", *names]).encode())
    print("to stdout")
    print("to stderr", file=sys.stderr)
    entry.finish(connection)
