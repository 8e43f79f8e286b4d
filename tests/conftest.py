"""What holds for every test: hypothesis draws the same examples in every run, however slow the machine is.
Ctrl-C is heard by what tests start, also where the tests themselves run in the background of a shell, which
has them ignore it. One thread a process, as under `make test`: on a busy machine threads of torch that wait
for each other make a test of 5 s one of 40 s. And what many tests need: the command, in the test's own
process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # Before anything imports torch.
signal.signal(signal.SIGINT, signal.default_int_handler)


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def coadapt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    from services.cli.main import main
    from services.simulator.parallel import THREAD_VARIABLES

    for name in THREAD_VARIABLES:  # which commands may set, for themselves alone
        monkeypatch.setenv(name, "1")

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["coadapt", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        captured = capsys.readouterr()
        return Outcome(int(exited.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """One of its cores works for somebody else."""
    burn = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(burn, stdout=subprocess.PIPE) as burning:
        assert burning.stdout is not None
        burning.stdout.readline()
        try:
            yield
        finally:
            burning.kill()
