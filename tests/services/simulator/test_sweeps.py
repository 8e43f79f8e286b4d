"""`coadapt sensitivity`: its runs and its results."""

import json
from functools import partial
from pathlib import Path

import pytest

from common.lifecycle import UserError
from services.scheduler.policies.registry import make_policy
from services.simulator.sweeps import BASELINES, distinct_cases, plan_sweep_runs, select_sweeps, sweeps
from tests.fixtures.profiles import write_profiles
from tests.fixtures.simulation_cases import TWO_JOBS, case_of


@pytest.mark.parametrize("world", BASELINES)
def test_every_sweep_has_one_point_with_all_defaults(world: str) -> None:
    base = case_of(world)
    for sweep in sweeps(world).values():
        assert [point.changes for point in sweep.points if point.default] == [{}]
        assert not sweep.default.parameters
        labels = [point.label for point in sweep.points]
        assert len(set(labels)) == len(labels)
        for point in sweep.points:
            assert all(getattr(base, field) != value for field, value in point.changes.items())


@pytest.mark.parametrize("world", BASELINES)
def test_every_policy_of_every_sweep_exists(world: str) -> None:
    for member in plan_sweep_runs(select_sweeps(world, ()), [case_of(world)]):
        make_policy(member.case.policy)


def test_sweeps_share_the_runs_of_the_default_point() -> None:
    runs = plan_sweep_runs(
        select_sweeps("calibrated", ["round", "load"]), [case_of("calibrated", seed=seed) for seed in (1, 2)]
    )
    points, policies, seeds = 5 + 5, 5, 2
    assert len(runs) == points * policies * seeds
    assert len(distinct_cases(runs)) == (points - 1) * policies * seeds


def test_the_load_sweep_skips_workloads_whose_jobs_arrive_together() -> None:
    one = case_of("calibrated")
    runs = plan_sweep_runs(select_sweeps("calibrated", ["round", "load"]), [one], {one.label})
    assert {run.sweep for run in runs} == {"round"}


def test_only_the_parametrised_policies_get_the_parameters_of_a_point() -> None:
    runs = plan_sweep_runs(select_sweeps("osdi21", ["power"]), [case_of("osdi21")])
    asked = {(run.point, run.policy): run.case.policy for run in runs}
    assert asked["0", "pollux"] == "pollux:power=0"
    assert asked["-1", "pollux"] == "pollux"
    assert asked["0", "tiresias"] == "tiresias"


def test_an_unknown_sweep_is_refused_with_the_allowed_names() -> None:
    with pytest.raises(UserError, match="--sweep 'rounds': allowed with --world osdi21: round, restart"):
        select_sweeps("osdi21", ["rounds"])


@pytest.fixture
def sensitivity(coadapt):
    return partial(coadapt, "sensitivity")


def test_one_sweep_over_a_file_in_the_calibrated_world(sensitivity, tmp_path: Path) -> None:
    profiles, jobs = write_profiles(tmp_path / "profiles"), tmp_path / "two.toml"
    jobs.write_text(TWO_JOBS)
    common = ("--world", "calibrated", "--profiles", profiles, "--workload", jobs, "--seeds", 1, "-j", 1)
    code, out, err = sensitivity(*common, "--sweep", "ablation", "--out", tmp_path / "out", "--json")
    assert code == 0, err
    study = json.loads(out)
    (cells,) = study["sweeps"]["ablation"]["points"].values()
    assert cells["fixed"]["over_baseline"]["mean"] == 1.0
    assert cells["pollux"]["mean_jct_s"] < cells["fixed"]["mean_jct_s"]
    assert study["left_out"] == {}
    assert (tmp_path / "out" / "sensitivity-calibrated.json").read_text() == out
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {
        "sensitivity-calibrated.json",
        "sensitivity-calibrated.md",
        "sensitivity-calibrated-ablation.svg",
    }


def test_the_load_sweep_reports_the_workloads_that_it_skips(sensitivity, tmp_path: Path) -> None:
    profiles, burst, two = (
        write_profiles(tmp_path / "profiles"),
        tmp_path / "burst.toml",
        tmp_path / "two.toml",
    )
    burst.write_text(TWO_JOBS.replace("at_s = 1.0", "at_s = 0.0"))
    two.write_text(TWO_JOBS)
    common = ("--world", "calibrated", "--profiles", profiles, "--sweep", "load", "--seeds", 1, "-j", 1)
    code, out, err = sensitivity(*common, "--workload", burst, "--workload", two, "--json")
    assert code == 0, err
    study = json.loads(out)
    assert study["left_out"] == {"load, burst": "its jobs all come at once"}
    assert study["sweeps"]["load"]["points"]["2"]["pollux"]["over_baseline"]["runs"] == 1
    code, out, err = sensitivity(*common, "--workload", burst)
    assert (code, out) == (2, "")
    assert "--sweep load: in every workload all jobs arrive at once" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--world", "mars"), "'--world': 'mars': allowed: calibrated, osdi21"),
        (("--world", "calibrated", "--traces", "."), "--traces .: allowed only with --world osdi21"),
        (("--world", "osdi21", "--profiles", "."), "--profiles .: allowed only with --world calibrated"),
        (("--world", "calibrated", "--requests", "odd"), "'--requests': 'odd': allowed: tuned, realistic"),
    ],
)
def test_an_invalid_option_is_refused(sensitivity, arguments: tuple[str, ...], problem: str) -> None:
    code, out, err = sensitivity(*arguments)
    assert (code, out) == (2, "")
    assert problem in err
