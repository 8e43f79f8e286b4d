"""The options of calibrate and of the benchmarks; what they measure is tested next to the benchmarks."""

import json

import pytest

from services.bench import scaling
from services.calibration import calibrate
from services.cli.measure_commands import RULES

RANGES = {
    ("resize", "--rounds"): "whole numbers from 1 to 1000",
    ("overhead", "--pairs"): "whole numbers from 1 to 1000",
    ("overhead", "--seconds"): "0.05 to 3600 seconds",
    ("pacing", "--seconds"): "0.2 to 600 seconds",
    ("scaling", "--seeds"): "whole numbers from 1 to 1000",
    ("decision", "--jobs"): "whole numbers from 1 to 100000",
    ("decision", "--nodes"): "whole numbers from 1 to 16384",
    ("decision", "--slots"): "whole numbers from 1 to 64",
    ("decision", "--rounds"): "whole numbers from 1 to 10000",
    ("decision", "--seed"): "whole numbers from 0 to 2147483647",
}
APPLICATIONS = "digits-cnn, mnist1d-conv, char-lm, matfac"


@pytest.mark.parametrize("value", ["-1", "x", "nan", "inf", "9" * 26])
@pytest.mark.parametrize(("benchmark", "option"), RANGES)
def test_a_number_out_of_range_is_refused_with_the_range(refused, benchmark, option, value):
    allowed = RANGES[benchmark, option]
    assert (
        refused("bench", benchmark, option, value)
        == f"coadapt: Invalid value for '{option}': '{value}': allowed: {allowed}"
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["resize", "--app", "x"], f"--app 'x': allowed: {APPLICATIONS}"),
        (["scaling", "--app", "imagenet"], f"--app 'imagenet': allowed: {APPLICATIONS}"),
        (["scaling", "--rules", "adascale,best"], "'best': allowed: adascale, linear, none"),
        (["scaling", "--multiples", "1,0"], "--multiples '1,0': '0': allowed: whole numbers from 1 to 1024"),
        (["scaling", "--multiples", "x"], "--multiples 'x': 'x': allowed: whole numbers"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_is_allowed(refused, arguments, error):
    assert error in refused("bench", *arguments)


def test_the_rules_of_the_help_are_those_of_the_benchmark():
    assert RULES == scaling.RULES


def test_a_benchmark_prints_one_json_object(coadapt):
    result = coadapt("bench", "decision", "--jobs", 3, "--nodes", 2, "--slots", 2, "--rounds", 1, "--json")
    assert result.code == 0
    found = json.loads(result.out)
    assert (found["benchmark"], found["jobs"], found["nodes"], found["slots"]) == ("decision", 3, 2, 2)
    assert found["machine"]["cores"] >= 1


def test_calibrate_does_not_write_into_an_installed_package(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "PROFILES", tmp_path / "site-packages/workloads/profiles")
    assert refused("calibrate") == "coadapt: --out DIR: needed, because coadapt does not run from a checkout"
    assert list(tmp_path.iterdir()) == []


def test_calibrate_refuses_an_unknown_application(refused, tmp_path):
    assert f"--app 'x': allowed: {APPLICATIONS}" in refused(
        "calibrate", "--app", "x", "--out", tmp_path / "profiles"
    )
    assert list(tmp_path.iterdir()) == []
