from pathlib import Path

import pytest

from analysis.compare.experiment_runs import gather
from analysis.compare.pairing import LeftOut
from analysis.log.find_logs import NoRuns
from tests.fixtures.logs import RUN_ID, good_run, save, written
from tests.fixtures.runs import alone_in_20s, put, put_experiment


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put_experiment(tmp_path_factory.mktemp("experiment"))


def test_run_json_says_what_a_run_is(experiment: Path) -> None:
    found = gather(experiment, alone_in_20s)
    assert {(run.set, run.policy, run.seed) for run in found.runs} == {
        (of, policy, seed)
        for of in ("burst-tuned", "tail-tuned")
        for policy in ("fixed", "pollux")
        for seed in (1, 2)
    }
    assert (found.left_out, found.lost, found.date) == ((), (), "2026-11-30")


def test_rho_uses_the_given_isolated_times(experiment: Path) -> None:
    run = next(run for run in gather(experiment, alone_in_20s).runs if run.name == "burst-fixed-2")
    assert [job.rho for job in run.summary.per_job] == pytest.approx([20 / 20, 22 / 20])
    assert run.summary.fairness.unfair_fraction == pytest.approx(0.5)


def test_a_simulated_run_is_identified_by_its_log_and_folder(tmp_path: Path) -> None:
    put(tmp_path, "workload-6", "fixed", 1, [10.0])
    folder = put(tmp_path, "workload-6", "pollux", 1, [10.0])
    folder.rename(tmp_path / "workload-6-pollux-power-0-1")
    assert {(run.set, run.policy, run.seed) for run in gather(tmp_path).runs} == {
        ("workload-6", "fixed", 1),
        ("workload-6", "pollux-power-0", 1),
    }


def test_every_run_that_does_not_count_is_named_with_its_reason(tmp_path: Path) -> None:
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
        "tail-fixed-5": "no run.json: it was interrupted or is still running",
        "tail-fixed-7": "no run.json: it was interrupted or is still running",
        "elsewhere/tail-fixed-8": "is deeper in the folder than the experiment's runs",
    }
    assert found.lost == (
        LeftOut(run="lost/tail-fixed-1", why="lost: noisy: load 3.1 > 1.5"),
        LeftOut(run="lost/tail-fixed-9-1", why="lost: no reason given"),
    )


def test_the_log_has_the_last_word_on_verification(tmp_path: Path) -> None:
    save(written(good_run()), tmp_path / RUN_ID)
    assert gather(tmp_path).left_out == (LeftOut(run=RUN_ID, why="1 of 2 jobs not verified"),)


def test_workload_files_decide_which_jobs_are_the_same(tmp_path: Path) -> None:
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


def test_without_a_workload_file_the_log_decides_which_jobs_are_the_same(tmp_path: Path) -> None:
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
    assert not gather(tmp_path).left_out, "without isolated times there is nothing to check"


def test_a_noisy_run_of_one_job_checks_nothing(tmp_path: Path) -> None:
    put(tmp_path, "tail", "fixed", 1, [10.0])
    put(tmp_path / "isolated", "isolated", "digits-cnn", 1, [16.0], noisy=True, reason="steal of 9%")
    found = gather(tmp_path, alone_in_20s)
    assert not found.alone
    assert [entry.why for entry in found.left_out] == ["noisy: steal of 9%"]


def test_a_single_run_is_no_experiment(tmp_path: Path) -> None:
    folder = put(tmp_path, "tail", "fixed", 1, [10.0])
    with pytest.raises(NoRuns, match="is one run"):
        gather(folder)
    with pytest.raises(NoRuns, match="is a file; needed: the folder"):
        gather(folder / "events.jsonl")
