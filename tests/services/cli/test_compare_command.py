import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.compare.experiment_runs import gather
from analysis.compare.pairing import LeftOut
from analysis.log.find_logs import NoRuns
from analysis.log.history import RunHistory
from analysis.run.fairness import IsolatedTime
from tests.fixtures.command import run_command
from tests.fixtures.logs import RUN_ID, good_run, save, written
from tests.fixtures.profiles import write_profiles
from tests.fixtures.runs import put


def alone_in_20s(_: RunHistory) -> IsolatedTime:
    return lambda job, share: 20.0


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies, two sets, two seeds; nothing is wrong with any run."""
    place = tmp_path_factory.mktemp("experiment")
    for of, length in (("burst", 20.0), ("tail", 60.0)):
        for seed in (1, 2):
            put(
                place,
                of,
                "fixed",
                seed,
                [length, length + seed],
                requests="tuned",
                started="2026-11-30T04:00",
                wall_s=length + seed,
                foreign_cpu_fraction=0.01,
                peak_memory_bytes=1_000_000_000,
            )
            put(place, of, "pollux", seed, [length / 2, length / 2 + seed], requests="tuned")
    (place / "experiment.json").write_text(
        json.dumps(
            {
                "machine": {"cores": 2},
                "date": "2026-11-30",
                "versions": {"torch": "2"},
                "conditions": {"memory": ["pollux"], "code": "abc"},
            }
        )
    )
    return place


def printed(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run_command("compare", *arguments)
    return code, *capfd.readouterr()


# --------------------------------------------------------------------------- what counts


def test_run_json_says_what_a_run_is(experiment: Path) -> None:
    found = gather(experiment, alone_in_20s)
    assert {(run.set, run.policy, run.seed) for run in found.runs} == {
        (of, policy, seed)
        for of in ("burst-tuned", "tail-tuned")
        for policy in ("fixed", "pollux")
        for seed in (1, 2)
    }
    assert (found.left_out, found.lost, found.date) == ((), (), "2026-11-30")


def test_rho_is_over_the_isolated_time_that_is_given(experiment: Path) -> None:
    run = next(run for run in gather(experiment, alone_in_20s).runs if run.name == "burst-fixed-2")
    assert [job.rho for job in run.summary.per_job] == pytest.approx([20 / 20, 22 / 20])
    assert run.summary.fairness.unfair_fraction == pytest.approx(0.5)


def test_a_simulated_run_is_known_by_its_log_and_folder(tmp_path: Path) -> None:
    put(tmp_path, "workload-6", "fixed", 1, [10.0])
    folder = put(tmp_path, "workload-6", "pollux", 1, [10.0])
    folder.rename(tmp_path / "workload-6-pollux-power-0-1")
    assert {(run.set, run.policy, run.seed) for run in gather(tmp_path).runs} == {
        ("workload-6", "fixed", 1),
        ("workload-6", "pollux-power-0", 1),
    }


def test_whatever_does_not_count_is_named_with_its_reason(tmp_path: Path) -> None:
    put(tmp_path, "tail", "fixed", 1, [10.0], noisy=True, reason="steal 9% > 5%")
    put(tmp_path, "tail", "fixed", 2, [10.0], verified=False, reason="a job failed")
    put(tmp_path, "tail", "fixed", 3, [10.0], reason="had to be killed: agent")
    broken = put(tmp_path, "tail", "fixed", 4, [10.0], attempt=1) / "events.jsonl"
    broken.write_bytes(broken.read_bytes()[:-40])
    put(tmp_path, "tail", "fixed", 5, [10.0])
    (put(tmp_path, "tail", "fixed", 6, [10.0], attempt=1) / "run.json").write_text("{")
    save(written(good_run()), tmp_path / "tail-fixed-7")
    put(tmp_path / "elsewhere", "tail", "fixed", 8, [10.0])
    put(tmp_path / "lost", "tail", "fixed", 1, [10.0], noisy=True, reason="load 3.1 > 1.5")
    (tmp_path / "lost" / "tail-fixed-9-1").mkdir()
    (tmp_path / "experiment.json").write_text("{")
    found = gather(tmp_path)
    assert found.runs == ()
    why = {entry.run: entry.why for entry in found.left_out}
    assert why.pop("tail-fixed-4").startswith("audit not clean: ")
    assert why.pop("tail-fixed-6").startswith("run.json: ")
    assert why.pop("experiment.json").startswith("cannot be read (")
    assert why == {
        "tail-fixed-1": "noisy: steal 9% > 5%",
        "tail-fixed-2": "not verified: a job failed",
        "tail-fixed-3": "had to be killed: agent",
        "tail-fixed-5": "no run.json: it was interrupted, or goes on",
        "tail-fixed-7": "no run.json: it was interrupted, or goes on",
        "elsewhere/tail-fixed-8": "lies deeper than the experiment's runs",
    }
    assert found.lost == (
        LeftOut(run="lost/tail-fixed-1", why="lost: noisy: load 3.1 > 1.5"),
        LeftOut(run="lost/tail-fixed-9-1", why="lost: no reason given"),
    )


def test_the_log_has_the_last_word_on_verification(tmp_path: Path) -> None:
    save(written(good_run()), tmp_path / RUN_ID)
    assert gather(tmp_path).left_out == (LeftOut(run=RUN_ID, why="1 of 2 jobs not verified"),)


def test_the_workload_files_of_a_pair_have_to_hold_the_same_jobs(tmp_path: Path) -> None:
    job = '[[job]]\napplication = "digits-cnn"\nat_s = {}\n'
    for policy, content in (
        ("dynamic", job.format(1.0)),
        ("fixed", "# other comment\n" + job.format(1.0)),
        ("pollux", job.format(2.0)),
        ("coadapt", "[[job]"),
    ):
        folder = put(tmp_path, "tail", policy, 1, [10.0], requests="tuned")
        (folder / "workload.toml").write_text(content)
    found = gather(tmp_path)
    assert [entry.run for entry in found.left_out] == ["tail-coadapt-1"]
    assert found.left_out[0].why.startswith("workload.toml: ")
    assert {run.requests for run in found.runs} == {"tuned"}
    dynamic, fixed, pollux = found.runs
    assert dynamic.jobs == fixed.jobs != pollux.jobs


def test_without_a_workload_file_the_log_says_what_jobs_asked_for(tmp_path: Path) -> None:
    put(tmp_path, "tail", "fixed", 1, [10.0])
    log = put(tmp_path, "tail", "pollux", 1, [10.0]) / "events.jsonl"
    log.write_text(log.read_text().replace('"replicas":1,"batch_size":16', '"replicas":2,"batch_size":32'))
    fixed, pollux = gather(tmp_path).runs
    assert fixed.jobs != pollux.jobs


def test_real_runs_of_one_job_check_the_isolated_times(tmp_path: Path) -> None:
    put(tmp_path, "tail", "fixed", 1, [10.0])
    put(tmp_path / "isolated", "isolated", "digits-cnn", 1, [16.0])
    put(tmp_path / "isolated", "isolated", "two", 1, [16.0, 16.0])
    found = gather(tmp_path, alone_in_20s)
    assert [(one.run, one.application, one.slots, one.real_s, one.modelled_s) for one in found.alone] == [
        ("isolated/isolated-digits-cnn-1", "digits-cnn", 1.0, pytest.approx(16.0), 20.0)
    ]
    assert found.alone[0].relative_error == pytest.approx(0.25)
    assert [entry.why for entry in found.left_out] == ["2 jobs: none of them was alone"]
    assert not gather(tmp_path).left_out  # who asks for no isolated times does not miss any


def test_a_noisy_run_of_one_job_checks_nothing(tmp_path: Path) -> None:
    put(tmp_path, "tail", "fixed", 1, [10.0])
    put(tmp_path / "isolated", "isolated", "digits-cnn", 1, [16.0], noisy=True, reason="steal of 9%")
    found = gather(tmp_path, alone_in_20s)
    assert not found.alone
    assert [entry.why for entry in found.left_out] == ["noisy: steal of 9%"]


def test_a_run_is_no_experiment(tmp_path: Path) -> None:
    folder = put(tmp_path, "tail", "fixed", 1, [10.0])
    with pytest.raises(NoRuns, match="is one run"):
        gather(folder)
    with pytest.raises(NoRuns, match="is a file; needed: the folder"):
        gather(folder / "events.jsonl")


# --------------------------------------------------------------------------- the command


def test_it_shows_tables_verdicts_and_what_to_know(
    experiment: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text, _ = printed(capfd, experiment)
    assert code == 0
    assert "8 runs of 2 policies, 2 sets (burst-tuned, tail-tuned), 2026-11-30" in text
    assert "Mean JCT of pollux over that of fixed: 0.5" in text
    assert "Left out: nothing." in text
    assert "Isolated times were not checked" in text
    assert "It says nothing certain about many-GPU training in production." in text


def test_what_is_left_out_is_listed_and_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for policy in ("fixed", "pollux"):
        put(tmp_path, "tail", policy, 1, [10.0])
    put(tmp_path, "tail", "pollux", 2, [10.0])
    code, text, _ = printed(capfd, tmp_path, "--markdown")
    assert code == 1
    assert "- tail-fixed-2: there is no such run; unpaired with it: tail-pollux-2\n" in text
    assert "| pollux/fixed | 1 | 1.00 |\n" in text


def test_lost_runs_that_were_repeated_are_listed_and_do_not_fail(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for policy in ("fixed", "pollux"):
        put(tmp_path, "tail", policy, 1, [10.0])
    put(tmp_path / "lost", "tail", "fixed", 1, [10.0], noisy=True, reason="load 3.1 > 1.5")
    code, text, _ = printed(capfd, tmp_path, "--json")
    assert code == 0
    assert json.loads(text)["left_out"] == [
        {"run": "lost/tail-fixed-1", "why": "lost: noisy: load 3.1 > 1.5"}
    ]


def test_json_has_the_figures_and_everything_about_them(
    experiment: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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


def test_a_process_of_its_own_writes_the_same_files(
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


def test_the_step_time_of_every_run_is_told(written_out: Path) -> None:
    found = json.loads((written_out / "comparison.json").read_text())
    assert set(found["step_times"]) == set(found["runs"])
    assert min(found["step_times"].values()) > 0
    assert found["policies"]["fixed"]["step_time"] > 0
    assert found["step_time_ratio"]["pollux/fixed"]["pairs"] == 4


def test_a_figure_names_the_logs_that_it_is_made_of(experiment: Path, written_out: Path) -> None:
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
        (["{one}"], "usable runs of two policies or more are needed; there: fixed"),
        (["{apart}"], "no two usable runs of the same set and seed"),
        (["{apart}", "--baseline", "srtf"], "--baseline 'srtf': no usable run of it; allowed: fixed, pollux"),
        (["{apart}", "--json", "--markdown"], "one of them at a time"),
        (["{apart}", "--profiles", "{empty}"], "machine.toml"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
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


def test_rho_by_other_models_than_the_profiles_is_told(
    experiment: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots had another speed than the project's profiles are of."""
    code, out, err = printed(capfd, experiment)
    assert code == 0
    told = "the models in each run's own log, as in summarize (n0 had slots of speed 0.2; "
    assert err.startswith(f"compare: rho goes by {told}")
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
