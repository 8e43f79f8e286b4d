"""A written profile is what simulations read."""

import tomllib
from pathlib import Path

from services.calibration.profile_files import read_former_machine, write_machine, write_profile
from tests.fixtures.measurements import COSTS, GRID, curve_row
from workloads.applications import applications
from workloads.files.measured_profile import read_profiles

DIGITS = applications()["digits-cnn"]


def test_a_written_profile_can_be_read_by_simulations(tmp_path: Path):
    """The tables of a former calibration are removed."""
    folder = tmp_path / DIGITS.name
    folder.mkdir()
    (folder / "validation-17.csv").write_text("old")
    write_profile(folder, 4, GRID, {16: [curve_row(1, 0.5), curve_row(2, 0.97)], 32: [curve_row(1, 0.98)]})
    machine = {
        "processor": 'a "fast" one',
        "slot_speed": 0.2,
        "nodes": 2,
        "slots": 4,
        "versions": {"torch": "2"},
        "applications": {DIGITS.name: COSTS, 'a.b of "mine"': COSTS},
    }
    write_machine(tmp_path, machine)
    assert read_former_machine(tmp_path) == machine
    assert tomllib.loads((tmp_path / "machine.toml").read_text()) == machine
    profile = read_profiles(tmp_path, applications())[DIGITS.name]
    assert profile.batches == (16, 32)
    assert profile.times((1, 2), 16) == (0.05, 0.01)
    assert (profile.pass_s((1, 2), 16), profile.pass_s((1,), 16)) == (0.035, 0.045)
    assert profile.times((4, 4), 16) == (0.1, 0.01)
    assert profile.needed_progress(16, DIGITS.target) == 50.0
    assert profile.costs.evaluation_slot_s == 0.3
