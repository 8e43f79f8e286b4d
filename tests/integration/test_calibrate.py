"""`coadapt calibrate` with real agents, replicas and verifiers, on the smallest cluster."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from common.config import load_config
from common.types import ApplicationSpec
from services.calibration.calibrate import measurement_conditions
from services.calibration.calibration_plan import Curve, EvaluationWindow, MeasuredPlacement
from services.calibration.finished_parts import FinishedParts
from tests.fixtures import quick_app
from tests.fixtures.command import start_command
from tests.fixtures.leftovers import nothing_left, processes, survivors
from tests.fixtures.measurements import LIFECYCLE, curve_row, measured_point
from workloads.applications import applications
from workloads.files.measured_profile import read_profiles

WAIT_S = 120.0
WITH_AGENTS = 8
"""Processes of a running calibration: itself, the event logger, two agents and their forkservers."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    with nothing_left(
        COADAPT_APPLICATIONS_MODULES=quick_app.MODULE,
        COADAPT_AGENT_SLOTS="1",
        COADAPT_AGENT_SLOT_SPEED="0.5",
        COADAPT_TRAINER_SAMPLE_EVERY_S="0.05",
    ) as marked:
        yield marked


def start(environment: dict[str, str], *arguments: object) -> "subprocess.Popen[str]":
    return start_command("calibrate", *arguments, environment=environment)


def test_an_interrupted_calibration_leaves_nothing_running_and_can_be_continued(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The trainings are prepared; tests/services/calibration/test_calibrate.py makes real ones."""
    spec: ApplicationSpec = quick_app.SPEC
    arguments = "--app", spec.name, "--out", tmp_path, "--seeds", 1, "--busy-before", 1

    first = start(environment, *arguments)
    assert first.stderr is not None
    assert first.stderr.readline().startswith("calibrate: 0/5 ")
    while len(processes(environment)) < WITH_AGENTS:
        with suppress(subprocess.TimeoutExpired):
            first.wait(0.05)
        assert first.returncode is None
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to the whole group
    output, errors = first.communicate(timeout=WAIT_S)
    assert (first.returncode, output) == (130, "")
    assert errors == "calibrate: interrupted: the same command without --fresh continues\n"
    assert not survivors(environment)

    rows = tuple(curve_row(number, 1.0 / number) for number in (1, 2, 3))
    settings = measurement_conditions(load_config(environment), seeds=1) | {"applications": spec.name}
    with FinishedParts(tmp_path, settings, fresh=False) as parts:
        for multiple in (1, 2):
            parts.add(f"quick/{multiple}/0", Curve(rows=rows, reached=True))

    second = start(environment, *arguments)
    output, errors = second.communicate(timeout=WAIT_S)
    assert (second.returncode, output) == (0, f"{tmp_path}: quick\n"), errors
    assert errors.startswith("calibrate: 0/3 ")

    names = {path.name for path in tmp_path.rglob("*.*") if path.is_file()}
    batches = {f"validation-{batch}.csv" for batch in (24, 48)}
    assert names == {"machine.toml", "placements.csv", "scalability.csv"} | batches
    profile = read_profiles(tmp_path, {spec.name: spec})[spec.name]
    for placement, batch in (((1,), 24), ((1,), 48), ((1, 1), 12), ((1, 1), 24)):
        step_s, sync_s = profile.times(placement, batch)
        assert 0.0 < sync_s < step_s < 1.0
    assert profile.times((1, 1), 24)[1] > profile.times((1,), 24)[1]
    assert profile.needed_progress(24, 0.6) == profile.needed_progress(48, 0.6) == 50.0
    costs = profile.costs
    assert min(costs.start_s, costs.resize_s, costs.verify_s) > 0.0
    assert 0.5 < costs.step_overhead < 5.0

    third = start(environment, *arguments)
    output, errors = third.communicate(timeout=WAIT_S)
    assert output == f"{tmp_path}: quick are there already; --fresh measures again\n"
    assert (third.returncode, errors) == (0, "")


@pytest.mark.usefixtures("busy_machine")
def test_nothing_is_measured_on_a_busy_machine(
    coadapt: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, output, errors = coadapt("calibrate", "--out", tmp_path, "--busy-before", "0")
    assert (code, output) == (3, "")
    assert errors.startswith("coadapt: the machine is busy: ")
    assert errors.endswith("stop other processes, or allow more with --busy-before\n")
    part = tmp_path / "part"
    part.mkdir()
    with FinishedParts(part, {"seeds": 1}, fresh=False) as parts:
        parts.add("lives", {})
    kept = {path.name: path.read_bytes() for path in part.iterdir()}
    code, _, _ = coadapt("calibrate", "--out", part, "--busy-before", "0", "--fresh")
    assert code == 3
    assert {path.name: path.read_bytes() for path in part.iterdir()} == kept, "nothing is thrown away"


def test_an_application_with_empty_tables_is_left_out_before_it_is_measured(
    coadapt: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COADAPT_APPLICATIONS_MODULES", quick_app.MODULE)
    monkeypatch.setattr(quick_app, "SPEC", replace(quick_app.SPEC, min_atomic_batch=24))
    code, output, errors = coadapt("calibrate", "--app", "quick", "--out", tmp_path)
    assert (code, output, list(tmp_path.iterdir())) == (2, "", [])
    assert errors.startswith("calibrate: quick is left out: no group of more than 4 replicas")
    assert errors.endswith("coadapt: no application can be measured\n")


@pytest.mark.parametrize("bad", [("quick",), ("quick", "matfac")])
def test_an_application_with_an_unreadable_profile_is_left_out(
    coadapt: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    bad: tuple[str, ...],
) -> None:
    """One or both of two measured applications."""
    monkeypatch.setenv("COADAPT_APPLICATIONS_MODULES", quick_app.MODULE)
    monkeypatch.setenv("COADAPT_AGENT_SLOTS", "1")
    names = "matfac", "quick"
    settings = measurement_conditions(load_config(os.environ), seeds=1) | {"applications": ", ".join(names)}
    evaluations = (EvaluationWindow(count=1, window_s=1.0, steps_s=0.5),)
    point = measured_point(atomic=24, step_s=0.1, sync_s=0.0, pass_s=0.1, evaluations=evaluations)
    row = curve_row(1, 0.5)
    with FinishedParts(tmp_path, settings, fresh=False) as parts:
        parts.add("lives", {name: [LIFECYCLE] for name in names})
        for name in names:
            for digits in ("1", "1-1"):
                parts.add(f"{name}/placement/{digits}", MeasuredPlacement(points=(point,), resize_s=0.1))
            for multiple in (1, 2, 4, 8, 16):
                rows = () if name in bad and multiple == 2 else (row,)
                parts.add(f"{name}/{multiple}/0", Curve(rows=rows, reached=False))
    options = [part for name in names for part in ("--app", name)]
    code, output, errors = coadapt("calibrate", *options, "--out", tmp_path, "--seeds", "1")
    for name in bad:
        assert f"calibrate: {name} is left out: validation-" in errors
    if set(bad) == set(names):
        assert (code, output) == (2, "")
        assert errors.endswith(f"coadapt: {tmp_path}: no profile has been written\n")
        assert list(tmp_path.iterdir()) == []
    else:
        assert (code, output) == (0, f"{tmp_path}: matfac\n")
        known = applications((quick_app.MODULE,))
        assert list(read_profiles(tmp_path, known)) == ["matfac"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--app", "x"], "coadapt: --app 'x': allowed: digits-cnn, mnist1d-conv, char-lm, matfac\n"),
        (["--busy-before", "2"], "coadapt: Invalid value for '--busy-before': '2': allowed: 0 to 1"),
        (["--seeds", "0"], "coadapt: Invalid value for '--seeds': '0': allowed: whole numbers from 1 to"),
        (["--out", "/dev/null/x"], "coadapt: /dev/null/x: cannot be written: Not a directory\n"),
    ],
)
def test_invalid_options_are_refused_with_what_is_allowed(
    coadapt: Callable[..., tuple[int, str, str]], arguments: list[str], error: str
) -> None:
    code, output, errors = coadapt("calibrate", *arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(error)


def test_an_unset_number_of_slots_is_refused(
    coadapt: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COADAPT_AGENT_SLOTS", "0")
    code, _, errors = coadapt("calibrate", "--out", tmp_path)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert errors.startswith("coadapt: agent.slots 0: allowed: 1 or more")
