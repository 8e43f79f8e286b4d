import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.command import run_command
from tests.fixtures.profiles import write_profiles
from tests.fixtures.runs import put, put_experiment


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put_experiment(tmp_path_factory.mktemp("experiment"))


def printed(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run_command("compare", *arguments)
    return code, *capfd.readouterr()


def put_pair(place: Path) -> None:
    for policy in ("fixed", "pollux"):
        put(place, "tail", policy, 1, [10.0])


def test_the_report_has_tables_verdicts_and_notes(
    experiment: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text, _ = printed(capfd, experiment)
    assert code == 0
    assert "8 runs of 2 policies, 2 sets (burst-tuned, tail-tuned), 2026-11-30" in text
    assert "Mean JCT, pollux / fixed: 0.5" in text
    assert "Left out: nothing." in text
    assert "Isolated times were not checked" in text
    assert "This is no evidence about many-GPU training in production." in text


def test_a_run_that_is_left_out_is_listed_and_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    put_pair(tmp_path)
    put(tmp_path, "tail", "pollux", 2, [10.0])
    code, text, _ = printed(capfd, tmp_path, "--markdown")
    assert code == 1
    assert "- tail-fixed-2: no such run; without this partner: tail-pollux-2\n" in text
    assert "| pollux/fixed | 1 | 1.00 |\n" in text


def test_lost_runs_that_were_repeated_are_listed_and_do_not_fail(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    put_pair(tmp_path)
    put(tmp_path / "lost", "tail", "fixed", 1, [10.0], noisy=True, reason="load 3.1 > 1.5")
    code, text, _ = printed(capfd, tmp_path, "--json")
    assert code == 0
    assert json.loads(text)["left_out"] == [
        {"run": "lost/tail-fixed-1", "why": "lost: noisy: load 3.1 > 1.5"}
    ]


def test_json_has_the_figures_and_their_context(experiment: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, text, _ = printed(capfd, experiment, "--json", "--baseline", "fixed")
    found = json.loads(text)
    assert code == 0
    assert list(found["mean_jct_ratio"]) == ["pollux/fixed"]
    ratios = [(10 + 11) / (20 + 21), (10 + 12) / (20 + 22), (30 + 31) / (60 + 61), (30 + 32) / (60 + 62)]
    product = ratios[0] * ratios[1] * ratios[2] * ratios[3]
    assert found["mean_jct_ratio"]["pollux/fixed"]["ratio"] == pytest.approx(product**0.25)
    assert found["mean_jct_ratio"]["pollux/fixed"]["pairs"] == 4
    assert set(found["by_set"]) == {"burst-tuned", "tail-tuned"}
    assert found["verdicts"][0]["pair"] == "pollux/fixed"
    assert (found["machine"], found["date"]) == ({"cores": 2}, "2026-11-30")
    assert (found["versions"], found["code"]) == ({"torch": "2"}, "abc")
    assert found["noise"]["fixed"]["wall_s"] == {"least": 21.0, "median": (22.0 + 61.0) / 2, "most": 62.0}
    assert found["noise"]["fixed"]["foreign_cpu_fraction"]["most"] == 0.01
    assert found["noise"]["fixed"]["steal_fraction"] is None
    assert found["noise"]["pollux"]["wall_s"] is None
    assert found["memory"] == ["pollux"]
    assert {"method", "scope", "rho", "isolated", "policies", "runs"} <= set(found)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profiles(tmp_path_factory.mktemp("profiles"))


@pytest.fixture(scope="module")
def written_out(experiment: Path, profiles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    assert run_command("compare", experiment, "--out", out, "--profiles", profiles) == 0
    return out


def test_another_process_writes_the_same_files(
    experiment: Path, profiles: Path, written_out: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            Path(sys.executable).with_name("coadapt"),
            "compare",
            str(experiment),
            "--out",
            "again",
            "--json",
            "--profiles",
            str(profiles),
        ],
        cwd=tmp_path,
        capture_output=True,
        timeout=50,
        check=True,
    )
    assert done.stdout == (written_out / "comparison.json").read_bytes()
    names = sorted(path.name for path in written_out.iterdir())
    figures = ["goodput", "jct", "mean-jct-ratio", "rho", "timeline"]
    traced = [f"{name}.{kind}" for name in figures for kind in ("json", "svg")]
    assert names == sorted(["comparison.json", "comparison.md", *traced])
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (written_out / name).read_bytes()


def test_every_run_has_its_step_time(written_out: Path) -> None:
    found = json.loads((written_out / "comparison.json").read_text())
    assert set(found["step_times"]) == set(found["runs"])
    assert min(found["step_times"].values()) > 0
    assert found["policies"]["fixed"]["step_time"] > 0
    assert found["step_time_ratio"]["pollux/fixed"]["pairs"] == 4


def test_a_figure_names_the_logs_behind_it(experiment: Path, written_out: Path) -> None:
    traced = json.loads((written_out / "timeline.json").read_text())
    assert traced["figure"] == "timeline.svg"
    names = [run["run"] for run in traced["runs"]]
    assert [name.rpartition("-")[0] for name in names] in (
        ["burst-pollux", "burst-fixed"],
        ["tail-pollux", "tail-fixed"],
    )
    log = (experiment / names[0] / "events.jsonl").read_bytes()
    assert traced["runs"][0]["sha256"] == hashlib.sha256(log).hexdigest()
    assert len(json.loads((written_out / "rho.json").read_text())["runs"]) == 8
    assert "![rho](rho.svg)" in (written_out / "comparison.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{empty}"], "no run in it"),
        (["{missing}"], "no such file or folder"),
        (["{one}"], "usable runs of at least two policies are needed; found: fixed"),
        (["{apart}"], "no two usable runs have the same set and seed"),
        (
            ["{apart}", "--baseline", "srtf"],
            "--baseline 'srtf': it has no usable run; allowed: fixed, pollux",
        ),
        (["{apart}", "--json", "--markdown"], "--json, --markdown: only one of them is allowed"),
        (["{apart}", "--profiles", "{empty}"], "machine.toml"),
    ],
)
def test_what_cannot_be_compared_gives_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    (tmp_path / "empty").mkdir()
    put(tmp_path / "one", "tail", "fixed", 1, [10.0])
    put(tmp_path / "apart", "tail", "fixed", 1, [10.0])
    put(tmp_path / "apart", "tail", "pollux", 2, [10.0])
    places = {name: tmp_path / name for name in ("empty", "missing", "one", "apart")}
    code, out, problem = printed(capfd, *(argument.format(**places) for argument in arguments))
    assert (code, out) == (2, "")
    assert expected in problem
    assert problem.count("\n") == 1


def test_rho_from_other_models_than_the_profiles_is_reported(
    experiment: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots of these runs had another speed than those of the project's profiles."""
    code, out, err = printed(capfd, experiment)
    assert code == 0
    reason = "the models in each run's own log, as in summarize (n0 had slots of speed 0.2; "
    assert err.startswith(f"compare: rho comes from {reason}")
    assert "there is no calibrated model" in " ".join(out.split())
    monkeypatch.setenv("COADAPT_APPLICATIONS_MODULES", "no.such.module")
    code, out, err = printed(capfd, experiment)
    assert (code, out) == (2, "")
    assert err.startswith("coadapt: application module 'no.such.module': cannot be imported")


def test_a_folder_that_cannot_be_written_is_named(
    experiment: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = printed(capfd, experiment, "--out", tmp_path / "file")
    assert code == 2
    assert "file: cannot be written" in err
