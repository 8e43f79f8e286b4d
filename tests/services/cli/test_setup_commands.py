"""Keys and workload generate."""

import shlex
from functools import partial
from pathlib import Path

import msgspec
import pytest

from common.messaging.curve_keys import load_keys
from services.cli.setup_commands import REQUESTS as ALL_REQUESTS
from services.cli.setup_commands import SETS
from tests.fixtures.profiles import write_profiles
from workloads.applications import applications
from workloads.files.generate import RECIPES, REQUESTS
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
def test_the_first_line_of_a_set_is_the_command_that_makes_it(
    coadapt, tmp_path, monkeypatch, options
) -> None:
    monkeypatch.chdir(tmp_path)
    write_profiles(tmp_path / "my own")
    asked = "workload", "generate", "--set", "burst", "--requests", "tuned", "--seed", 3, *options
    code, printed, _ = coadapt(*asked)
    assert code == 0
    command = shlex.split(printed.splitlines()[0].removeprefix("# Made by `").removesuffix("`"))
    assert command == ["coadapt", *map(str, asked)]
    assert coadapt(*command[1:]) == (0, printed, "")


def test_a_line_break_in_the_profiles_path_does_not_break_the_file(coadapt, tmp_path) -> None:
    folder = write_profiles(tmp_path / "two\nlines")
    code, printed, _ = coadapt("workload", "generate", "--set", "burst", "--profiles", folder)
    assert code == 0
    assert r"two\nlines" in printed.splitlines()[0]
    assert msgspec.toml.decode(printed)["seed"] == 1


def test_all_sets_are_written_to_a_folder_one_file_each(generate, tmp_path) -> None:
    code, out, _ = generate("--set", "all", "--requests", "all", "--out", str(tmp_path / "sets"))
    assert code == 0
    names = {path.stem for path in (tmp_path / "sets").iterdir()}
    assert names == {
        f"{name}-{kind}" for name in ("steady", "burst", "tail", "diurnal") for kind in ("tuned", "realistic")
    }
    assert out.count(": written\n") == len(names)


def test_a_file_is_only_replaced_with_overwrite(generate, tmp_path) -> None:
    path = tmp_path / "set.toml"
    path.write_text("mine\n")
    asked = "--set", "burst", "--requests", "realistic", "--out", str(path)
    code, _, err = generate(*asked)
    assert (code, path.read_text()) == (2, "mine\n")
    assert str(path) in err
    assert "--overwrite" in err
    assert generate(*asked, "--overwrite") == (0, f"{path}: written\n", "")
    assert generate(*asked) == (0, f"{path}: unchanged\n", "")


def test_no_file_is_written_when_one_of_several_exists(generate, tmp_path) -> None:
    (tmp_path / "tail-realistic.toml").write_text("mine\n")
    code, _, err = generate("--set", "all", "--requests", "realistic", "--out", str(tmp_path))
    assert code == 2
    assert "tail-realistic.toml" in err
    assert [path.name for path in tmp_path.iterdir()] == ["tail-realistic.toml"]


@pytest.mark.parametrize(
    ("options", "errors"),
    [
        (("--set", "calm"), ("'--set': 'calm'", "steady, burst, tail, diurnal, all")),
        (("--set", "tail", "--requests", "wild"), ("'--requests': 'wild'", "tuned, realistic, all")),
        (("--set", "all"), ("--out DIR",)),
        (("--set", "tail", "--seed", "-1"), ("'-1'", "whole numbers from 0")),
        (("--set", "tail", "--slots", "0"), ("'0'", "whole numbers from 1")),
        (("--set", "tail", "--profiles", "nowhere"), ("nowhere", "machine.toml")),
        (("--set", "tail", "--out", "/dev/null/x.toml"), ("--out /dev/null/x.toml", "cannot be written")),
    ],
)
def test_a_bad_option_is_named_with_its_value_and_what_is_allowed(
    generate, the_error, options, errors
) -> None:
    result = generate(*options)
    assert result.code == 2
    for text in errors:
        assert text in the_error(result)


def test_the_applications_are_those_of_the_configuration(generate, the_error, monkeypatch) -> None:
    monkeypatch.setenv("COADAPT_APPLICATIONS_MODULES", "no.such.module")
    result = generate("--set", "burst")
    assert result.code == 2
    assert "application module 'no.such.module': cannot be imported" in the_error(result)


def test_the_recipes_and_requests_of_the_help_are_all_there_are():
    assert (*RECIPES, "all") == SETS
    assert (*REQUESTS, "all") == ALL_REQUESTS


# --------------------------------------------------------------------------- keys


def test_keys_are_made_once_and_the_command_says_who_needs_which(coadapt, tmp_path):
    folder = tmp_path / "keys"
    made = coadapt("keys", folder, "alice", "bob")
    assert made.code == 0
    files = [f"{name}.{kind}" for name in ("server", "alice", "bob") for kind in ("key", "key_secret")]
    assert made.out.splitlines()[:6] == [str(folder / file) for file in files]
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    assert "endpoints.keys_dir" in made.out
    assert "scheduler, metrics-collector, event-logger: server.key, server.key_secret" in made.out
    keys = load_keys(str(folder))
    assert keys is not None
    assert len(keys.allowed) == 2
    assert "all of these keys exist already" in coadapt("keys", folder, "alice").out
    assert load_keys(str(folder)) == keys


def test_a_client_key_is_made_when_no_name_is_given(coadapt, tmp_path):
    assert coadapt("keys", tmp_path).code == 0
    assert (tmp_path / "client.key_secret").exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["keys", "../x"], "NAME '../x': allowed: at most 64 letters"),
        (["keys", "server"], "NAME 'server': allowed"),
        (["/dev/null/keys"], "/dev/null/keys: cannot be written: Not a directory"),
    ],
)
def test_bad_names_and_folders_of_keys_are_refused(refused, arguments, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error in refused("keys", *arguments)
    assert list(tmp_path.iterdir()) == []
