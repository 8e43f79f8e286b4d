"""`coadapt workload`, in this process."""

import shlex
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tests.fixtures.profiles import write_profiles
from workloads.applications import applications
from workloads.files.workload_file import read_workload


@pytest.fixture(scope="module")
def profiles(tmp_path_factory) -> Path:
    return write_profiles(tmp_path_factory.mktemp("profiles"))


@pytest.fixture
def generate(coadapt, profiles):
    return partial(coadapt, "workload", "generate", "--profiles", profiles)


def test_a_set_is_printed_or_written(generate, tmp_path) -> None:
    code, printed, _ = generate("--set", "burst", "--requests", "realistic", "--seed", "3")
    assert code == 0
    path = tmp_path / "new" / "mine.toml"
    written = generate("--set", "burst", "--requests", "realistic", "--seed", "3", "--out", str(path))
    assert written == (0, f"{path}: written\n", "")
    assert path.read_text(encoding="utf-8") == printed
    assert read_workload(path, applications(), 8).seed == 3


@pytest.mark.parametrize(
    "options", [(), ("--nodes", 1), ("--nodes", 4), ("--profiles", "my own", "--nodes", 1, "--slots", 2)]
)
def test_the_first_line_of_a_set_makes_it_again(coadapt, tmp_path, monkeypatch, options) -> None:
    monkeypatch.chdir(tmp_path)
    write_profiles(tmp_path / "my own")
    asked = "workload", "generate", "--set", "burst", "--requests", "tuned", "--seed", 3, *options
    code, printed, _ = coadapt(*asked)
    assert code == 0
    command = shlex.split(printed.splitlines()[0].removeprefix("# Made by `").removesuffix("`"))
    assert command == ["coadapt", *map(str, asked)]
    assert coadapt(*command[1:]) == (0, printed, "")


def test_a_set_of_profiles_whose_name_has_several_lines_can_still_be_read(coadapt, tmp_path) -> None:
    folder = write_profiles(tmp_path / "two\nlines")
    code, printed, _ = coadapt("workload", "generate", "--set", "burst", "--profiles", folder)
    assert code == 0
    assert r"two\nlines" in printed.splitlines()[0]
    assert msgspec.toml.decode(printed)["seed"] == 1


def test_all_sets_are_written_into_a_folder_each_under_its_own_name(generate, tmp_path) -> None:
    code, out, _ = generate("--set", "all", "--requests", "all", "--out", str(tmp_path / "sets"))
    assert code == 0
    names = {path.stem for path in (tmp_path / "sets").iterdir()}
    assert names == {
        f"{name}-{kind}" for name in ("steady", "burst", "tail", "diurnal") for kind in ("tuned", "realistic")
    }
    assert out.count(": written\n") == len(names)


def test_no_file_is_overwritten_unless_it_is_asked_for(generate, tmp_path) -> None:
    path = tmp_path / "set.toml"
    path.write_text("mine\n")
    asked = "--set", "burst", "--requests", "realistic", "--out", str(path)
    code, _, err = generate(*asked)
    assert (code, path.read_text()) == (2, "mine\n")
    assert str(path) in err
    assert "--overwrite" in err
    assert generate(*asked, "--overwrite") == (0, f"{path}: written\n", "")
    assert generate(*asked) == (0, f"{path}: unchanged\n", "")


def test_of_several_files_none_is_written_when_one_is_there(generate, tmp_path) -> None:
    (tmp_path / "tail-realistic.toml").write_text("mine\n")
    code, _, err = generate("--set", "all", "--requests", "realistic", "--out", str(tmp_path))
    assert code == 2
    assert "tail-realistic.toml" in err
    assert [path.name for path in tmp_path.iterdir()] == ["tail-realistic.toml"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--set", "calm"), ("--set 'calm'", "steady, burst, tail, diurnal, all")),
        (("--set", "tail", "--requests", "wild"), ("--requests 'wild'", "tuned, realistic, all")),
        (("--set", "all"), ("--out DIR",)),
        (("--set", "tail", "--seed", "-1"), ("'-1'", "whole numbers from 0")),
        (("--set", "tail", "--slots", "0"), ("'0'", "whole numbers from 1")),
        (("--set", "tail", "--profiles", "nowhere"), ("nowhere", "machine.toml")),
        (("--set", "tail", "--out", "/dev/null/x.toml"), ("--out /dev/null/x.toml", "cannot be written")),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(generate, options, said) -> None:
    code, out, err = generate(*options)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    for text in said:
        assert text in err


def test_the_applications_are_those_that_are_configured(generate, monkeypatch) -> None:
    monkeypatch.setenv("COADAPT_APPLICATIONS_MODULES", "no.such.module")
    code, printed, told = generate("--set", "burst")
    assert (code, printed) == (2, "")
    assert told.startswith("coadapt: application module 'no.such.module': cannot be imported")
