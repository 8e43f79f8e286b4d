"""The benchmarks that train, each in its smallest form and with all its real processes."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from services.bench import overhead, resize
from services.cli.main import main
from tests.fixtures.command import start_command
from tests.fixtures.leftovers import nothing_left, processes

WAIT_S = 150.0
STARTED = {"overhead": 4, "pacing": 3, "scaling": 3}
"""Number of processes in the middle of the start: with event-logger and agents; with resource tracker and
forkserver; with resource tracker and a worker."""

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    with nothing_left(COADAPT_TRAINER_SAMPLE_EVERY_S="0.1") as marked:
        yield marked


Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Bench:
    """Runs a benchmark in this process and returns its result."""

    def run(*arguments: str) -> dict[str, Any]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("tempfile.tempdir", environment["TMPDIR"])
        monkeypatch.setattr("sys.argv", ["coadapt", "bench", *arguments, "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capsys.readouterr()
        assert not ended.value.code, errors
        assert f"{arguments[0]}: 0/" in errors
        assert "  0 s left" in errors
        found: dict[str, Any] = json.loads(output)
        return found

    return run


def test_resize_measures_every_change_and_a_restart_by_torchrun(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one node and with one process of torchrun, since each of them has to import torch."""
    monkeypatch.setattr(resize, "NODES", ("a",))
    monkeypatch.setattr(resize, "SLOTS", 4)
    monkeypatch.setattr(resize, "TORCHRUN_PROCESSES", 1)
    found = bench("resize", "--rounds", "1")
    assert found["transitions"].keys() == {"1->2", "2->4", "4->2", "2->1"}
    pauses_s = [change["p50_s"] for change in found["transitions"].values()]
    assert all(pause_s > 0.0 for pause_s in pauses_s)
    assert all(change["followed_p50_s"] > change["p50_s"] for change in found["transitions"].values())
    assert min(pauses_s) <= found["p50_s"] <= found["p99_s"] <= max(pauses_s)
    assert found["ratio"] == found["torchrun_restart_s"] / found["transitions"]["2->4"]["p50_s"]
    assert found["ratio"] > 5.0


def test_overhead_compares_the_trainer_with_a_loop_of_as_many_ranks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one node, since each of them has to import torch."""
    monkeypatch.setattr(overhead, "NODES", ("a",))
    monkeypatch.setattr(overhead, "SLOTS", 2)
    assert overhead.CASES == {"one_replica": (1, 128), "one_replica_m0": (1, 16), "ddp": (2, 128)}
    monkeypatch.setattr(overhead, "CASES", {"ddp": (2, 128)})
    found = bench("overhead", "--pairs", "1", "--seconds", "0.2")
    case = found["cases"]["ddp"]
    assert found["ddp_ratio"] == case["ratio"]["p50"] > 0.2
    assert case["ratio"]["p50"] == case["trainer_steps_per_s"]["p50"] / case["loop_steps_per_s"]["p50"]


@pytest.mark.parametrize("name", STARTED)
def test_a_benchmark_interrupted_at_a_terminal_ends_with_130_and_leaves_nothing(
    environment: dict[str, str], name: str
) -> None:
    """While torch is being imported for its replicas."""
    process = start_command("bench", name, environment=environment)
    assert process.stderr is not None
    assert process.stderr.readline().startswith(f"{name}: 0/")
    while len(processes(environment)) < STARTED[name]:
        assert process.poll() is None
    # A terminal sends it to the whole process group.
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, output, errors) == (130, "", "")
