"""Run and experiment: what they refuse, and what they say without running anything."""

from functools import partial
from pathlib import Path

import pytest

from services.cli.run_commands import readable_duration
from services.experiment.folder import RUN_FILE, ExperimentFolder, write_json
from services.experiment.plan import plan_runs, read_definition

SET = '[[job]]\napplication = "digits-cnn"\n'
DEFINITION = 'policies = ["fixed", "pollux"]\nsets = ["mine.toml"]\nseeds = [1, 2]\n'


@pytest.fixture
def command(coadapt, tmp_path, monkeypatch):
    """`coadapt experiment` in a folder that has a set."""
    (tmp_path / "mine.toml").write_text(SET)
    (tmp_path / "some.toml").write_text(DEFINITION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COADAPT_LOGS_DIR", raising=False)
    return partial(coadapt, "experiment")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["none.toml"], "none.toml: cannot be read"),
        (["some.toml", "--policy", "sia"], "--policy 'sia': allowed: fixed, pollux"),
        (["some.toml", "--set", "tail"], "--set 'tail': allowed: mine"),
        (["some.toml", "--isolated", "--set", "mine"], "--set 'mine': allowed: isolated-digits-cnn-1, isola"),
        (["some.toml", "--seeds", "0"], "'0': allowed: whole numbers from 1"),
        (["some.toml", "--engine", "cloud"], "--engine 'cloud': allowed: dask, loky, multiprocessing, seq"),
        (["some.toml", "-j", "none"], "'none': allowed: whole numbers from 1"),
    ],
)
def test_bad_options_of_experiment_are_one_line_and_exit_2(command, the_error, arguments, error):
    result = command(*arguments)
    assert result.code == 2
    assert error in the_error(result)
    assert not Path("logs").exists()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (DEFINITION.replace("pollux", "sia"), "policy 'sia': not one of"),
        (DEFINITION.replace("pollux", "optimus"), "only a simulator knows"),
        (DEFINITION + "nodes = 3", "nodes 3: allowed: 2, the agents of"),
        (DEFINITION.replace("mine", "other"), "other.toml: cannot be read"),
        (DEFINITION.replace("mine.toml", "steady") + 'profiles = "none"', "none"),
    ],
)
def test_a_definition_that_no_run_could_follow_is_refused_before_the_first(command, the_error, text, error):
    Path("some.toml").write_text(text)
    result = command("some.toml")
    assert result.code == 2
    assert error in the_error(result)
    assert not Path("logs").exists()


@pytest.mark.usefixtures("busy_machine")
def test_a_machine_that_is_too_busy_is_refused_with_3(command):
    Path("some.toml").write_text(DEFINITION + "[guard]\nwatch_s = 0.5\nbusy_before = 1e-9\n")
    code, _, err = command("some.toml")
    assert code == 3
    assert "coadapt: the machine is busy: " in err
    assert "raise the bounds of [guard]" in err
    assert [path.name for path in Path("logs/some").iterdir() if path.is_dir()] == []


def test_a_dry_run_shows_the_plan_and_what_is_left_of_it(command):
    definition = read_definition(Path("some.toml"))
    folder = ExperimentFolder(Path("logs/some"), definition)
    first, second, *_ = plan_runs(definition)
    for run, reason in ((first, ""), (second, "noisy")):
        folder.run_folder(run).mkdir(parents=True)
        write_json(folder.run_folder(run) / RUN_FILE, folder.new_record(run, 1, wall_s=150.0, reason=reason))
    code, out, _ = command("some.toml", "--dry-run")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["1", "mine-fixed-1", "done"],
        ["2", "mine-pollux-1", "done,", "not", "clean:", "noisy"],
        ["3", "mine-pollux-2", "to", "do"],
        ["4", "mine-fixed-2", "to", "do"],
        *[f"2 of 4 runs to do, about 5 min, into {folder.path}".split()],
    ]


def test_a_dry_run_of_isolated_jobs_shows_their_plan(command):
    folder = ExperimentFolder(Path("logs/some"), read_definition(Path("some.toml")))
    code, out, _ = command("some.toml", "--isolated", "--dry-run")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["1", "isolated-digits-cnn-1", "to", "do"],
        ["2", "isolated-digits-cnn-2", "to", "do"],
        ["3", "isolated-digits-cnn-4", "to", "do"],
        *[f"3 of 3 runs to do, about 2 min, into {folder.path}".split()],
    ]


def test_a_finished_experiment_runs_nothing_and_reports_what_is_not_clean(command):
    definition = read_definition(Path("some.toml"))
    folder = ExperimentFolder(Path("logs/some"), definition)
    for run in plan_runs(definition):
        folder.run_folder(run).mkdir(parents=True)
        reason = "too noisy" if run.name == "mine-fixed-2" else ""
        write_json(folder.run_folder(run) / RUN_FILE, folder.new_record(run, 1, wall_s=1.0, reason=reason))
    code, out, err = command("some.toml")
    assert code == 1
    assert err == "coadapt: mine-fixed-2: not clean: too noisy\n"
    assert out.splitlines() == [f"3 of 4 runs are clean: {folder.path}", "next: coadapt compare logs/some"]
    assert command("some.toml", "--policy", "pollux")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["missing.toml"], "missing.toml: cannot be read"),
        (["missing.toml", "--timeout", "-1"], "'--timeout': '-1': allowed: seconds, 0 or more"),
        (["missing.toml", "--timeout", "nan"], "'nan': allowed: seconds"),
        (["mine.toml", "--policy", "best"], "policy 'best': not one of fixed, dynamic"),
        (["mine.toml", "--policy", "optimus"], "only a simulator knows"),
    ],
)
def test_run_refuses_bad_input_before_it_starts_a_stack(refused, arguments, error, tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text(SET)
    monkeypatch.chdir(tmp_path)
    assert error in refused("run", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89.0, "89 s"), (90.0, "2 min"), (3599.0, "1 h 0 min"), (7500.0, "2 h 5 min")],
)
def test_durations_are_readable(seconds, text):
    assert readable_duration(seconds) == text
