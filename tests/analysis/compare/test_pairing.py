import pytest
from msgspec import structs

from analysis.compare.pairing import LeftOut, missing_runs, rank, runs_of_same_jobs
from tests.fixtures.runs import compared_run


def test_baselines_come_first_and_variants_after_what_they_vary() -> None:
    names = ["smallest-first", "coadapt", "pollux-batch-only", "pollux", "dynamic", "fixed", "pollux:power=0"]
    assert sorted(names, key=rank) == [
        "fixed",
        "dynamic",
        "pollux",
        "pollux-batch-only",
        "pollux:power=0",
        "coadapt",
        "smallest-first",
    ]


def test_a_run_of_other_jobs_cannot_be_paired() -> None:
    dynamic, pollux = compared_run("tail", "dynamic", 1, 10), compared_run("tail", "pollux", 1, 5)
    fixed = compared_run("tail", "fixed", 1, 10, application="matfac")
    kept, left_out = runs_of_same_jobs([dynamic, fixed, pollux])
    assert kept == [dynamic, pollux]
    assert left_out == [LeftOut(run="tail-fixed-1", why="its jobs differ from those of tail-dynamic-1")]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"requests": "realistic"}, "its requests are realistic; those of tail-dynamic-1 are unknown"),
        (
            {"jobs": "at 3 s"},
            "its jobs make other requests or arrive at other times than those of tail-dynamic-1",
        ),
    ],
)
def test_a_run_whose_jobs_ask_for_something_else_cannot_be_paired(change: dict[str, str], why: str) -> None:
    fixed, dynamic, pollux = (
        compared_run("tail", policy, 1, 10) for policy in ("fixed", "dynamic", "pollux")
    )
    _, left_out = runs_of_same_jobs([fixed, dynamic, structs.replace(pollux, **change)])
    assert left_out == [LeftOut(run="tail-pollux-1", why=why)]


def test_a_second_run_of_one_policy_is_left_out() -> None:
    run = compared_run("tail", "fixed", 1, 10)
    again = structs.replace(run, name="tail-fixed-1b")
    kept, left_out = runs_of_same_jobs([again, run])
    assert kept == [run]
    assert left_out == [LeftOut(run="tail-fixed-1b", why="same set, policy and seed as tail-fixed-1")]


def test_a_missing_run_is_named_like_its_folder_and_with_its_partners() -> None:
    runs = [compared_run("tail", "fixed", 1, 10), compared_run("tail", "pollux", 2, 5)]
    # The sets of an experiment carry their kind of requests; the names of its folders do not.
    runs = [structs.replace(run, set="tail-tuned") for run in runs]
    policies = ("fixed", "pollux", "pollux:power=0")
    found = list(missing_runs(runs, policies, known={"tail-pollux-1", "tail-pollux-power-0-1"}))
    assert [entry.run for entry in found] == ["tail-fixed-2", "tail-pollux-power-0-2"]
    assert found[0].why == "no such run; without this partner: tail-pollux-2"
