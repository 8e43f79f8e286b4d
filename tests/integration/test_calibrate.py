"""`coadapt calibrate` with real agents, replicas, verifiers: the smallest cluster, a tiny application."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.config import load_config
from common.types import ApplicationSpec
from services.bench.calibration.journal import Journal
from services.bench.calibration.plan import Curve, Row
from services.bench.calibration.run import conditions
from tests.integration import quick_app
from tests.leftovers import nothing_left, survivors
from workloads.measured import read_profiles

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    with nothing_left(
        COADAPT_APPLICATIONS_MODULES=quick_app.MODULE,
        COADAPT_AGENT_SLOTS="1",
        COADAPT_AGENT_SLOT_SPEED="0.5",
        COADAPT_TRAINER_SAMPLE_EVERY_S="0.1",
    ) as marked:
        yield marked


def start(environment: dict[str, str], *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli", "calibrate", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_an_interrupted_calibration_leaves_nothing_running_and_is_gone_on_with(
    environment: dict[str, str], tmp_path: Path
) -> None:
    spec: ApplicationSpec = quick_app.SPEC
    arguments = "--app", spec.name, "--out", tmp_path, "--seeds", 1

    first = start(environment, *arguments)
    assert first.stderr is not None
    assert first.stderr.readline().startswith("calibrate: 0/5 ")
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to the whole group
    output, errors = first.communicate(timeout=WAIT_S)
    assert (first.returncode, output, errors) == (130, "", "")
    assert not survivors(environment)

    rows = tuple(
        Row(progress=20.0 * n, iteration=n, metric=1.0 / n, sqr=1.0, var=2.0, trusted=1.0) for n in (1, 2, 3)
    )
    settings = conditions(load_config(environment), seeds=1) | {"applications": spec.name}
    with Journal(tmp_path, settings, fresh=False) as journal:
        journal.add("quick/2/0", Curve(rows=rows, reached=True))

    second = start(environment, *arguments)
    output, errors = second.communicate(timeout=WAIT_S)
    assert (second.returncode, output) == (0, f"{tmp_path}: quick\n"), errors
    assert errors.startswith("calibrate: 0/4 ")

    names = {path.name for path in tmp_path.rglob("*.*") if path.is_file()}
    batches = {f"validation-{batch}.csv" for batch in (24, 48)}
    assert names == {"machine.toml", "placements.csv", "scalability.csv"} | batches
    profile = read_profiles(tmp_path, {spec.name: spec})[spec.name]
    for placement, batch in (((1,), 24), ((1,), 48), ((1, 1), 12), ((1, 1), 24)):
        step_s, sync_s = profile.times(placement, batch)
        assert 0.0 < sync_s < step_s < 1.0
    assert profile.times((1, 1), 24)[1] > profile.times((1,), 24)[1]
    assert 0.0 < profile.needed_progress(24, 0.9) <= profile.needed_progress(24, 0.4) < spec.max_progress
    assert profile.needed_progress(48, 0.4) == 60.0
    costs = profile.costs
    assert min(costs.start_s, costs.resize_s, costs.verify_s) > 0.0
    assert 0.5 < costs.step_overhead < 5.0

    third = start(environment, *arguments)
    output, errors = third.communicate(timeout=WAIT_S)
    assert output == f"{tmp_path}: quick are there already; --fresh measures again\n"
    assert (third.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--app", "x"], "coadapt: --app 'x': allowed: digits-cnn, mnist1d-conv, char-lm, matfac\n"),
        (["--seeds", "0"], "coadapt: Invalid value for '--seeds': '0': allowed: whole numbers from 1 to"),
        (["--out", "/dev/null/x"], "coadapt: /dev/null/x: cannot be written: Not a directory\n"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_is_allowed(
    coadapt: Callable[..., tuple[int, str, str]], arguments: list[str], error: str
) -> None:
    code, output, errors = coadapt("calibrate", *arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(error)


def test_nodes_without_a_number_of_slots_are_refused(
    coadapt: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COADAPT_AGENT_SLOTS", "0")
    code, _, errors = coadapt("calibrate", "--out", tmp_path)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert errors.startswith("coadapt: agent.slots 0: allowed: 1 or more")
