"""`coadapt simulate` with several policies and workloads: invalid options, and the table."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.main import main as cli
from services.scheduler.policies.registry import BUILT_IN
from services.simulator.cases import every_policy, labels
from tests.fixtures.simulation_cases import write_table

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `coadapt simulate` in this process; returns exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        small = ("--world", "synthetic", "--nodes", "2", "--round-s", "600", "-j", "1")
        monkeypatch.setattr(sys, "argv", ["coadapt", "simulate", *small, *arguments])
        with pytest.raises(SystemExit) as exited:
            cli()
        captured = capsys.readouterr()
        return int(exited.value.code or 0), captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--policy", "fixed"), "give either --workload or --jobs, not both"),
        (("--policy", "fixed", "--jobs", "0"), "allowed: whole numbers from 1 to"),
        (
            ("--policy", "fixed", "--jobs", "3", "--world", "osdi21"),
            "--jobs 3: allowed only with --world synthetic",
        ),
        (("--policy", "best", "--jobs", "3"), "policy 'best': not one of fixed"),
        (("--policy", "tiresias:x=1", "--jobs", "3"), "policy 'tiresias:x=1': 'x': no such parameter"),
        (("--policy", "fixed", "--workload", "nowhere.csv"), "nowhere.csv: "),
    ],
)
def test_an_invalid_option_gives_one_line_and_exit_code_2(
    simulate: Command, arguments: tuple[str, ...], complaint: str
) -> None:
    code, _, err = simulate(*arguments)
    assert code == 2
    assert complaint in err
    assert len(err.splitlines()) == 1


def test_an_invalid_row_is_named_and_nothing_is_simulated(simulate: Command, tmp_path: Path) -> None:
    workload = write_table(tmp_path, "a,0,small,1,128", "b,nan,small,1,128")
    code, out, err = simulate("--policy", "fixed", "--workload", str(workload))
    assert code == 2
    assert out == ""
    assert "row 2 (line 3): time 'nan'" in err


def test_a_folder_stands_for_its_tables_and_all_for_every_policy_of_the_project(tmp_path: Path) -> None:
    for name in ("w-10.csv", "w-2.csv", "notes.txt"):
        (tmp_path / name).write_text("")
    assert list(labels([tmp_path]).values()) == ["w-2", "w-10"]
    assert every_policy(["srtf", "all"])[0] == "srtf"
    assert set(every_policy(["srtf", "all"])) == set(BUILT_IN)


def test_one_table_compares_the_policies(simulate: Command) -> None:
    given = ("--policy", "fixed", "--policy", "pollux", "--jobs", "5", "--fairness")
    code, out, _ = simulate(*given, "--markdown")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("| policy | runs | mean JCT s |")
    assert [line.split()[1] for line in lines[2:]] == ["fixed", "pollux"]
    code, out, _ = simulate(*given, "--json")
    fixed, pollux = json.loads(out)
    assert f"| {fixed['mean_jct_s']:.0f} |" in lines[2]
    assert f"| {pollux['rho']['worst']:.2f} |" in lines[3]
    assert pollux["goodput"] > fixed["goodput"] > 0
