"""The benchmarks of training, each in its smallest form, with all of their real processes."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
COADAPT = (sys.executable, "-m", "services.cli")
WAIT_S = 150.0
MARK = "MARK_OF_A_BENCHMARK"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Of a benchmark that has to end everything which it starts."""
    marked = os.environ | {MARK: uuid.uuid4().hex, "OMP_NUM_THREADS": "1"}
    yield marked
    left = processes(marked)
    for process in left:
        process.kill()
    assert not left


def processes(environment: dict[str, str]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == environment[MARK]:
                found.append(process)
        except psutil.Error:
            continue
    return found


def hear_interrupts() -> None:
    """What a shell starts in the background is deaf to them, and so is its offspring."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def bench(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COADAPT, "bench", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_resize_measures_every_change_and_a_restart_by_torchrun(environment: dict[str, str]) -> None:
    done = bench(environment, "resize", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["transitions"].keys() == {"1->2", "2->4", "4->2", "2->1"}
    pauses_s = [change["p50_s"] for change in found["transitions"].values()]
    assert all(pause_s > 0.0 for pause_s in pauses_s)
    assert all(change["followed_p50_s"] > change["p50_s"] for change in found["transitions"].values())
    assert min(pauses_s) <= found["p50_s"] <= found["p99_s"] <= max(pauses_s)
    assert found["ratio"] == found["torchrun_restart_s"] / found["transitions"]["2->4"]["p50_s"]
    assert found["ratio"] > 5.0
    assert "resize: 5/5  0 s left" in done.stderr


def test_overhead_compares_the_trainer_with_a_bare_loop_and_with_plain_ddp(
    environment: dict[str, str],
) -> None:
    done = bench(environment, "overhead", "--pairs", "1", "--seconds", "0.2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("one_replica", "one_replica_m0", "ddp"):
        case = found["cases"][name]
        assert found[f"{name}_ratio"] == case["ratio"]["p50"]
        assert case["ratio"]["p50"] == case["trainer_steps_per_s"]["p50"] / case["loop_steps_per_s"]["p50"]
        assert case["ratio"]["p50"] > 0.2
    assert [case["total_batch"] for case in found["cases"].values()] == [128, 16, 128]


def test_an_interrupted_benchmark_ends_with_130_and_leaves_nothing(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*COADAPT, "bench", "overhead"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "overhead: 0/42  starts\n"
    assert len(processes(environment)) > 6
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, errors
    assert (output, errors) == ("", "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["resize", "--app", "x"],
            "coadapt: Invalid value: --app 'x': allowed: digits-cnn, mnist1d-conv, char-lm, matfac\n",
        ),
        (["x"], "coadapt: Invalid value: 'x': allowed: resize, overhead"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is_allowed(
    environment: dict[str, str], arguments: list[str], error: str
) -> None:
    done = bench(environment, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(error)
