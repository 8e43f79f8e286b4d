"""The finished parts of a calibration, and the calibrations that cannot use them."""

from pathlib import Path

import pytest

from common.lifecycle import UserError
from services.calibration.calibration_plan import LifecycleTimes
from services.calibration.finished_parts import FILE, FinishedParts
from tests.fixtures.measurements import LIFECYCLE


def test_a_second_calibration_finds_the_finished_parts(tmp_path: Path):
    with FinishedParts(tmp_path, {"seeds": 3}, fresh=False) as parts:
        assert len(parts) == 0
        parts.add("times", [LIFECYCLE])
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"part":"half')
    with FinishedParts(tmp_path, {"seeds": 3}, fresh=False) as parts:
        assert len(parts)
        assert "times" in parts
        assert "half" not in parts
        assert parts.get("times", list[LifecycleTimes]) == [LIFECYCLE]
        parts.add("b", 1)
        with pytest.raises(UserError, match=r"calibration\.jsonl: b: Expected `str`.*; --fresh starts over"):
            parts.get("b", str)
    with FinishedParts(tmp_path, {"seeds": 3}, fresh=False) as parts:
        assert parts.get("b", int) == 1
        parts.remove()
    assert list(tmp_path.iterdir()) == []


def test_parts_with_other_settings_are_refused_unless_fresh(tmp_path: Path):
    with FinishedParts(tmp_path, {"slot_speed": 0.2}, fresh=False) as parts:
        parts.add("a", 1)
    with pytest.raises(UserError, match=r"begun with slot_speed 0\.2, which is 0\.5 now; --fresh"):
        FinishedParts(tmp_path, {"slot_speed": 0.5}, fresh=False)
    with FinishedParts(tmp_path, {"slot_speed": 0.5}, fresh=True) as parts:
        assert "a" not in parts


def test_two_calibrations_cannot_write_one_folder(tmp_path: Path):
    with (
        FinishedParts(tmp_path, {}, fresh=False),
        pytest.raises(UserError, match="another calibration is writing it"),
    ):
        FinishedParts(tmp_path, {}, fresh=True)


def test_an_unwritable_folder_and_a_damaged_file_are_reported(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be written: "):
        FinishedParts(tmp_path / "file", {}, fresh=False)
    (tmp_path / FILE).write_text("{}\n{}\n")
    with pytest.raises(UserError, match=r"calibration\.jsonl: cannot be read: .*; --fresh starts over"):
        FinishedParts(tmp_path, {}, fresh=False)
