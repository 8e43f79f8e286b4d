"""Simulate: what it prints, what it keeps, and what it refuses.

Sensitivity and fidelity are tested with the modules that they call."""

import json
import re
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from analysis.summarize import main as summarize
from services.cli import simulate_commands
from services.simulator.cases import CLUSTERS
from services.simulator.output_folders import LOCK_FILE
from services.simulator.run_case import simulate as simulate_case
from services.simulator.sweeps import BASELINES, sweeps
from tests.fixtures.profiles import write_profiles
from tests.fixtures.simulation_cases import case_of
from workloads.files.generate import REQUESTS

TABLE = "name,time,application,num_replicas,batch_size\na,0,small,1,128\nb,30,small,2,256\n"
PATIENCE_S = 30.0
FIGURES = {"mean_jct_s", "p99_jct_s", "makespan_s", "jcts_s", "rounds", "decision_ms", "wall_s", "cpu_s"}


@pytest.fixture
def simulate(coadapt, monkeypatch):
    monkeypatch.delenv("COADAPT_OSDI21", raising=False)
    return partial(coadapt, "simulate")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(TABLE)
    return path


def test_one_run_is_one_object_with_a_time_for_each_job(simulate, table: Path) -> None:
    code, out, err = simulate("--workload", table, "--policy", "pollux", "--world", "synthetic", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result.keys() >= FIGURES
    assert set(result["jcts_s"]) == {"a", "b"}
    assert result["mean_jct_s"] == pytest.approx(sum(result["jcts_s"].values()) / 2)
    assert result["decision_ms"].keys() == {"mean", "p99", "max"}
    assert result["refused"] == result["failed"] == {}


def test_results_of_several_processes_come_in_the_order_of_the_runs(simulate, table: Path) -> None:
    code, out, err = simulate(
        "--workload", table, "--policy", "fixed", "--world", "synthetic", "--seed", 1, "--seed", 2, "--json"
    )
    assert code == 0
    assert [result["seed"] for result in json.loads(out)] == [1, 2]
    assert [line.split()[0] for line in err.splitlines()] == ["1/2", "2/2"]


def test_the_same_seed_writes_the_same_log_and_its_audit_is_clean(
    simulate, table: Path, tmp_path: Path, capsys
) -> None:
    logs = []
    for out in (tmp_path / "one", tmp_path / "two"):
        code, *_ = simulate("--workload", table, "--policy", "pollux", "--world", "synthetic", "--out", out)
        assert code == 0
        logs.append((out / "jobs-pollux-0" / "events.jsonl").read_bytes())
    assert logs[0] == logs[1]
    assert summarize([str(tmp_path / "one"), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["audit"]["ok"]
    assert run["jobs"]["verified"] == 2


def test_an_existing_run_is_never_changed(simulate, table: Path, tmp_path: Path) -> None:
    arguments = ("--workload", table, "--policy", "fixed", "--world", "synthetic", "--out", tmp_path / "out")
    assert simulate(*arguments)[0] == 0
    before = (tmp_path / "out" / "jobs-fixed-0" / "events.jsonl").read_bytes()
    code, _, err = simulate(*arguments)
    assert code == 2
    assert "jobs-fixed-0 is there already" in err
    assert (tmp_path / "out" / "jobs-fixed-0" / "events.jsonl").read_bytes() == before


def test_a_running_command_owns_its_runs_and_a_signal_removes_its_processes_and_incomplete_runs(
    simulate, table: Path, tmp_path: Path, capsys
) -> None:
    long = tmp_path / "long.csv"
    rows = (f"j{number},0,large,4,512\n" for number in range(3000))
    long.write_text("".join([TABLE.splitlines(keepends=True)[0], *rows]))
    out = tmp_path / "out"
    arguments = ["--workload", table, "--workload", long, "--policy", "pollux", "--world", "synthetic"]
    arguments += ["-j", "2", "--out", out]
    command = [
        sys.executable,
        "-c",
        "from services.cli.main import main; main()",
        "simulate",
        *map(str, arguments),
    ]
    processes: list[psutil.Process] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stderr is not None
            assert owner.stderr.readline().startswith("1/2 jobs-pollux-0: ")
            processes += psutil.Process(owner.pid).children(recursive=True)
            assert len(processes) >= 2
            code, _, err = simulate(*arguments)
            assert (code, err.splitlines()[1:]) == (2, [])
            assert "jobs-pollux-0 is being written by another command" in err
            owner.send_signal(signal.SIGTERM)
            assert owner.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM
            _, left = psutil.wait_procs(processes, timeout=PATIENCE_S)
            assert left == []
        finally:
            owner.kill()
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    assert {path.name for path in out.iterdir()} == {LOCK_FILE, "jobs-pollux-0"}
    assert summarize([str(out), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_a_run_that_cannot_be_written_leaves_nothing_and_can_be_repeated(
    simulate, table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ("--workload", table, "--policy", "fixed", "--world", "synthetic", "--out", out)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, former[1]))  # as a disk that is full soon
    try:
        code, _, err = simulate(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert code == 1
    assert "cannot be written: File too large" in err
    assert [path.name for path in out.iterdir()] == [LOCK_FILE]
    assert simulate(*arguments)[0] == 0


def test_the_remains_of_a_killed_command_are_no_run_and_the_next_command_removes_them(
    simulate, table: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "out"
    arguments = ("--workload", table, "--policy", "fixed", "--world", "synthetic", "--out")
    assert simulate(*arguments, tmp_path / "whole")[0] == 0
    log = (tmp_path / "whole" / "jobs-fixed-0" / "events.jsonl").read_bytes()
    left = out / ".jobs-fixed-0" / "7" / "events.jsonl"
    left.parent.mkdir(parents=True)
    left.write_bytes(log[: len(log) // 2])
    assert summarize([str(out)]) == 2
    assert "no run in it" in capsys.readouterr().err
    assert simulate(*arguments, out)[0] == 0
    assert {path.name for path in out.iterdir()} == {LOCK_FILE, "jobs-fixed-0"}
    assert (out / "jobs-fixed-0" / "events.jsonl").read_bytes() == log


def test_a_run_id_never_starts_with_a_dot(simulate, table: Path, tmp_path: Path) -> None:
    hidden = table.rename(table.with_name(".jobs.csv"))
    arguments = ("--workload", hidden, "--policy", "fixed", "--world", "synthetic", "--json")
    assert json.loads(simulate(*arguments)[1])["run_id"] == "-jobs-fixed-0"


def test_a_run_in_which_every_job_is_refused_fails_and_says_so(simulate, table: Path) -> None:
    arguments = ("--workload", table, "--policy", "fixed", "--world", "synthetic", "--nodes", 1, "--slots", 1)
    table.write_text(TABLE.splitlines(keepends=True)[0] + "a,0,small,64,4096\nb,0,small,2,256\n")
    code, out, _ = simulate(*arguments)
    assert code == 1
    assert "jobs-fixed-0: no job ran: 2 of 2 refused" in out
    code, out, _ = simulate(*arguments, "--json")
    assert code == 1
    assert json.loads(out)["idle"]


def test_an_impossible_job_is_reported_and_the_others_are_simulated(simulate, table: Path) -> None:
    table.write_text(TABLE + "c,10,small,64,4096\nd,10,small,1,5\n")
    code, out, _ = simulate(
        "--workload", table, "--policy", "fixed", "--world", "synthetic", "--nodes", 2, "--json"
    )
    assert code == 0
    result = json.loads(out)
    assert set(result["jcts_s"]) == {"a", "b"}
    assert "at most 8, the slots of the cluster" in result["refused"]["c"]
    assert "batch_size 5" in result["refused"]["d"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"--world": "mars"}, "'--world': 'mars': allowed: osdi21, calibrated, synthetic"),
        ({"--policy": "best"}, "policy 'best': not one of fixed"),
        ({"--workload": "nowhere.csv"}, "nowhere.csv: no such file"),
        ({"--nodes": "0"}, "'0': allowed: whole numbers from 1"),
        ({"--nodes": "two"}, "'two': allowed: whole numbers"),
        ({"--slots": "-1"}, "'-1': allowed: whole numbers from 1"),
        ({"--workload": "x" * 5000}, "--workload xxx"),
        ({"--workload": "/dev/null"}, "/dev/null: not a regular file"),
        ({"--policy": "pollux:"}, "policy 'pollux:': '': no such parameter"),
        ({"--policy": "pollux:power=nan"}, "power nan: allowed: 0, and 0.01 to 4 of either sign"),
        ({"--round-s": "nan"}, "'nan': allowed: 0.01 to 1000000 seconds"),
        ({"--round-s": "0"}, "'0': allowed: 0.01 to 1000000 seconds"),
        ({"--round-s": "1e-9"}, "'1e-9': allowed: 0.01 to 1000000 seconds"),
        ({"--round-s": "inf"}, "'inf': allowed: 0.01 to 1000000 seconds"),
        ({"--restart-s": "-1"}, "'-1': allowed: 0 to 1000000 seconds"),
        ({"--restart-s": "1e300"}, "'1e300': allowed: 0 to 1000000 seconds"),
        ({"--world": "osdi21", "--interference": "1"}, "'1': allowed: 0 to 0.99"),
        ({"--interference": "0.5"}, "--interference 0.5: allowed only with --world osdi21"),
        ({"--seed": "-1"}, "'-1': allowed: whole numbers from 0"),
        ({"-j": "0"}, "'0': allowed: whole numbers from 1"),
        ({"--world": "osdi21"}, "--traces DIR: the world osdi21 needs it"),
        ({"--world": "osdi21", "--traces": "."}, "--traces .: no folder `traces` in it"),
        ({"--traces": "."}, "--traces .: allowed only with --world osdi21"),
        ({"--out": ""}, "'--out': '': allowed: a path"),
        ({"--workload": ""}, "'--workload': '': allowed: a path"),
        ({"--out": "/proc/nothing"}, "--out /proc/nothing: cannot be written"),
        ({"--out": "x" * 5000}, "--out xxx"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(simulate, the_error, table: Path, changes, error: str) -> None:
    options = {"--workload": table, "--policy": "fixed", "--world": "synthetic", **changes}
    result = simulate(*(part for pair in options.items() for part in pair))
    assert result.code == 2
    assert error in the_error(result)


def test_two_runs_with_the_same_name_are_refused_before_the_first_starts(simulate, table: Path) -> None:
    for name in ("a b.csv", "a-b.csv"):
        table.with_name(name).write_text(TABLE)
    table.unlink()
    code, out, err = simulate("--workload", table.parent, "--policy", "fixed", "--world", "synthetic")
    assert (code, out) == (2, "")
    assert "a-b-fixed-0: two runs would have this name" in err


@pytest.mark.parametrize(
    "row",
    [
        "x,nan,small,1,128",
        "x,0,small,0,128",
        "a,0,small,1,128",
        "x,0,unknown,1,128",
        "x,0,small,1",
        "x,0,small,1,128,9",
    ],
)
def test_a_broken_row_is_named_by_its_number(simulate, table: Path, row: str) -> None:
    table.write_text(TABLE + row + "\n")
    code, _, err = simulate("--workload", table, "--policy", "fixed", "--world", "synthetic")
    assert code == 2
    assert "row 3" in err
    assert len(err.splitlines()) == 1


# --------------------------------------------------------------------------- the calibrated world

JOBS = 'name = "two"\n[[job]]\napplication = "digits-cnn"\n[[job]]\napplication = "matfac"\nat_s = 2.0\n'


@pytest.fixture
def calibrated(tmp_path: Path) -> tuple[object, ...]:
    profiles = write_profiles(tmp_path / "profiles", matfac=100)
    return ("--world", "calibrated", "--profiles", profiles)


def test_in_the_calibrated_world_a_workload_is_a_toml_file_or_a_table_or_a_set(
    simulate, calibrated, tmp_path: Path
) -> None:
    toml, csv = tmp_path / "two.toml", tmp_path / "table.csv"
    toml.write_text(JOBS)
    rows = "digits-cnn-1,0,digits-cnn,1,16\nmatfac-2,2,matfac,1,256\n"
    csv.write_text(TABLE.splitlines(keepends=True)[0] + rows)
    code, out, _ = simulate(
        "--workload", toml, "--workload", csv, "--policy", "fixed", *calibrated, "--json", "-j", 1
    )
    assert code == 0
    first, second = json.loads(out)
    assert first["label"] == "two"
    assert first["jcts_s"] == second["jcts_s"]
    assert first["jcts_s"].keys() == {"digits-cnn-1", "matfac-2"}
    code, out, _ = simulate("--workload", "demo", "--policy", "fixed", *calibrated, "--json", "--fairness")
    assert code == 0
    result = json.loads(out)
    assert len(result["jcts_s"]) == 9
    assert result["rho"]["worst"] > 0.9
    assert result["rounds"] > result["makespan_s"] / 4, "a round every two seconds, and others"


def test_the_log_of_a_calibrated_run_is_clean_and_has_the_speed_of_its_slots(
    simulate, calibrated, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "out"
    arguments = ("--workload", "demo", "--policy", "pollux", "--memory", *calibrated, "--out", out)
    assert simulate(*arguments)[0] == 0
    log = (out / "demo-pollux-0" / "events.jsonl").read_text()
    assert log.count('"slot_speed":0.2') == 2
    assert summarize([str(out), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["jobs"]["verified"] == 9


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"--profiles": "nowhere"}, "nowhere/machine.toml: cannot be read: No such file or directory; `coad"),
        ({"--world": "synthetic"}, "allowed only with --world calibrated"),
        ({"--workload": "nowhere"}, "--workload nowhere: no such file"),
        ({"--interference": "0.5"}, "--interference 0.5: allowed only with --world osdi21"),
        ({"--slots": "0"}, "'0': allowed: whole numbers from 1"),
        ({"--slots": "5"}, "slots 5: allowed in calibrated: 1 to 4, which were measured"),
    ],
)
def test_bad_input_in_the_calibrated_world_is_one_line_and_exit_2(
    simulate, the_error, calibrated, changes, error: str
) -> None:
    world, profiles = calibrated[1], calibrated[3]
    options = {"--workload": "demo", "--policy": "fixed", "--world": world, "--profiles": profiles, **changes}
    result = simulate(*(part for pair in options.items() for part in pair))
    assert result.code == 2
    assert error in the_error(result)


def test_a_missing_profile_and_an_unknown_application_are_different_errors(
    simulate, calibrated, tmp_path: Path
) -> None:
    folder = tmp_path / "profiles"
    machine = folder / "machine.toml"
    machine.write_text(re.sub(r"\[applications\.matfac\][^\[]*", "", machine.read_text()))
    workload = tmp_path / "one.toml"
    for name, complaint in (
        ("matfac", f"application 'matfac': not in the profiles {folder}; `coadapt calibrate` measures it"),
        ("nothing", "application 'nothing': no such application; allowed: "),
    ):
        workload.write_text(f'[[job]]\napplication = "{name}"\n')
        code, _, err = simulate("--workload", workload, "--policy", "fixed", *calibrated)
        assert code == 2
        assert complaint in err
        assert len(err.splitlines()) == 1


def test_an_unreadable_workload_is_refused_before_the_first_of_several_runs(
    simulate, calibrated, table: Path, tmp_path: Path
) -> None:
    for world in (("--world", "synthetic"), calibrated):
        good = "demo" if world is calibrated else table
        bad = tmp_path / "bad.toml"
        bad.write_text('[[job]]\napplication = "small"\nreplicas = 0\n')
        out = tmp_path / "out"
        code, _, err = simulate(
            "--workload", good, "--workload", bad, "--policy", "fixed", *world, "--out", out
        )
        assert code == 2
        assert "bad.toml: job 1: " in err
        assert len(err.splitlines()) == 1
        assert not out.exists()


def test_a_higher_load_makes_arrivals_denser(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(JOBS)
    case = case_of(
        "calibrated", workload=path, nodes=1, slots=1, profiles=write_profiles(tmp_path / "profiles")
    )
    usual, dense = simulate_case(case), simulate_case(structs.replace(case, load=2.0))
    assert dense.jcts_s["digits-cnn-1"] == usual.jcts_s["digits-cnn-1"]
    assert dense.jcts_s["matfac-2"] == pytest.approx(usual.jcts_s["matfac-2"] + 1.0), "it waits longer"


def test_the_help_of_simulations_names_all_worlds_requests_and_sweeps(coadapt) -> None:
    assert tuple(CLUSTERS) == simulate_commands.WORLDS
    assert tuple(BASELINES) == simulate_commands.SENSITIVITY_WORLDS
    assert simulate_commands.REQUESTS == REQUESTS
    help_text = coadapt("sensitivity", "--help").out
    assert all(name in help_text for world in BASELINES for name in sweeps(world))
