"""The definition of an experiment, its runs in order, and the workload of each run."""

from pathlib import Path

import pytest

from common.config import Config
from common.lifecycle import UserError
from services.experiment.plan import (
    EXPERIMENTS,
    Definition,
    PlannedRun,
    expected_s,
    plan_isolated_runs,
    plan_runs,
    read_definition,
    select_runs,
    shifted,
    with_cluster,
    with_seeds,
    workload_maker,
)
from tests.fixtures.profiles import write_profiles
from workloads.applications import applications
from workloads.files.generate import RECIPES
from workloads.files.toml_text import workload_text
from workloads.files.workload_file import Workload, read_workload

POLICIES = ("fixed", "dynamic", "pollux")
DEFINITION = Definition(policies=POLICIES, sets=("steady", "burst", "tail", "diurnal"), seeds=(1, 2))
OWN_SET = """
name = "mine"
seed = 5

[[job]]
application = "digits-cnn"
id = "first"
settings = { learning_rate = 1e-05 }

[[job]]
application = "matfac"
at_s = 1.5
seed = 7
batch_size = 512
replicas = 2
"""


def defined(folder: Path, text: str) -> Definition:
    (folder / "some.toml").write_text(text)
    return read_definition(folder / "some.toml")


def test_policies_of_the_same_jobs_run_in_succession_seed_by_seed() -> None:
    runs = plan_runs(DEFINITION)
    groups = [runs[first : first + 3] for first in range(0, len(runs), 3)]
    assert [{(run.seed, run.set) for run in group} for group in groups] == [
        {(seed, name)} for seed in (1, 2) for name in DEFINITION.sets
    ]
    assert all({run.policy for run in group} == set(POLICIES) for group in groups)


def test_policies_take_turns_to_be_first() -> None:
    firsts = [run.policy for run in plan_runs(DEFINITION)[::3]]
    assert firsts == ["fixed", "dynamic", "pollux", "fixed", "dynamic", "pollux", "fixed", "dynamic"]


def test_of_two_policies_each_is_first_equally_often_on_every_set() -> None:
    runs = plan_runs(DEFINITION, ["pollux", "dynamic"])
    firsts = [(run.set, run.policy) for run in runs[::2]]
    assert {run.policy for run in runs} == {"dynamic", "pollux"}
    assert sorted(firsts) == sorted(
        (name, policy) for name in {run.set for run in runs} for policy in ("dynamic", "pollux")
    )


def test_more_seeds_keep_the_order_of_the_former_ones() -> None:
    more = with_seeds(DEFINITION, 4)
    assert more.seeds == (1, 2, 3, 4)
    assert plan_runs(more)[: len(plan_runs(DEFINITION))] == plan_runs(DEFINITION)
    assert with_seeds(DEFINITION, 1).seeds == (1,)


def test_the_plan_can_be_restricted_to_names_that_it_has() -> None:
    runs = select_runs(plan_runs(DEFINITION), ["pollux"], ["tail"])
    assert runs == [PlannedRun(set="tail", policy="pollux", seed=seed) for seed in (1, 2)]
    with pytest.raises(UserError, match=r"--policy 'sia': allowed: fixed, dynamic, pollux"):
        select_runs(plan_runs(DEFINITION), ["sia"], [])
    with pytest.raises(UserError, match="--set 'demo': allowed: steady, burst, tail, diurnal"):
        select_runs(plan_runs(DEFINITION), [], ["demo"])


def test_a_policy_with_parameters_has_its_own_folder() -> None:
    run = PlannedRun(set="tail", policy="pollux:power=0,adapt_batch=false", seed=1)
    assert run.name == "tail-pollux-power-0-adapt_batch-false-1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("policies = [", "not valid TOML"),
        ('sets = ["tail"]\nseeds = [1]', "policies"),
        ('policies = []\nsets = ["tail"]\nseeds = [1]', "policies"),
        ('policies = ["fixed"]\nsets = ["tail"]\nseeds = ["one"]', "seeds"),
        ('policies = ["fixed"]\nsets = ["tail"]\nseeds = [-1]', "seeds"),
        ('policies = ["fixed"]\nsets = ["tail"]\nseeds = [1, 1]', "seeds: 1 is given twice"),
        ('policies = ["fixed"]\nsets = ["night"]\nseeds = [1]', "'night': allowed: burst, diurnal, steady"),
        ('policies = ["fixed"]\nsets = ["a/x.toml", "b/x.toml"]\nseeds = [1]', "the folder x-fixed-1"),
        ('policies = ["fixed"]\nsets = ["tail"]\nseeds = [1]\nnodes = 0', "nodes"),
        ('policies = ["fixed"]\nsets = ["tail"]\nseeds = [1]\nname = "../x"', "name '../x': allowed"),
        ('policies = ["fixed"]\nsets = ["tail"]\nseeds = [1]\ntimeout_s = nan', "timeout_s"),
        ('policies = ["fixed"]\nsets = ["tail"]\nseeds = [1]\nspeed = 1', "slot_speed"),
        ('policies = ["fixed"]\nsets = ["tail"]\nseeds = [1]\n[guard]\nsteal = 2.0', "guard.steal"),
        ('policies = ["fixed"]\nsets = ["tail"]\nseeds = [1]\n[guard]\nload = 2.0', "busy_before"),
    ],
)
def test_an_invalid_definition_is_refused_with_file_and_key(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        defined(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "some.toml"))
    assert expected in str(caught.value)


def test_a_missing_definition_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.toml: cannot be read: No such file"):
        read_definition(tmp_path / "none.toml")


def test_the_experiments_of_the_project_are_valid_and_found_by_name() -> None:
    assert read_definition(Path("realistic")).requests == "realistic"
    definition = read_definition(Path("cpu"))
    assert definition == read_definition(EXPERIMENTS / "cpu.toml")
    assert definition.name == "cpu"
    assert set(definition.sets) == set(RECIPES)
    assert len(plan_runs(definition)) == 5 * 4 * 3
    assert expected_s(plan_runs(definition), {}, definition.run_s) < 2.25 * 3600


def test_the_configuration_has_the_cluster_of_the_definition(tmp_path: Path) -> None:
    text = 'policies = ["fixed"]\nsets = ["tail"]\nseeds = [1]\nslots = 3\nslot_speed = 0.5'
    config = with_cluster(Config(), defined(tmp_path, text))
    assert (config.agent.slots, config.agent.slot_speed) == (3, 0.5)


def test_only_policies_of_the_experiment_can_have_a_memory(tmp_path: Path) -> None:
    text = 'policies = ["fixed"]\nsets = ["tail"]\nseeds = [1]\nmemory = '
    assert defined(tmp_path, f'{text}["fixed"]').memory == ("fixed",)
    with pytest.raises(UserError, match="memory: 'pollux' is not in `policies`"):
        defined(tmp_path, f'{text}["fixed", "pollux"]')


def test_a_users_own_set_is_found_next_to_the_definition_and_its_seeds_are_shifted(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.toml").write_text(OWN_SET)
    definition = defined(tmp_path, 'policies = ["fixed"]\nsets = ["mine.toml"]\nseeds = [1, 2]')
    assert plan_runs(definition)[0].name == "mine-fixed-1"
    workloads = workload_maker(definition, applications())
    plain = read_workload(tmp_path / "mine.toml", applications())
    seeds = []
    for seed in (1, 2):
        workload, text = workloads("mine", seed)
        assert workload == shifted(plain, seed)
        (tmp_path / "written.toml").write_text(text)
        assert read_workload(tmp_path / "written.toml", applications()) == workload
        assert [row.at_s for row in workload.rows] == [row.at_s for row in plain.rows]
        seeds += [row.spec.seed for row in workload.rows]
    assert len(set(seeds)) == 4


def test_a_recipe_gives_the_same_jobs_for_the_same_seed_only(tmp_path: Path) -> None:
    text = 'policies = ["fixed"]\nsets = ["steady"]\nseeds = [1]\nprofiles = "measured"'
    write_profiles(tmp_path / "measured")
    workloads = workload_maker(defined(tmp_path, text), applications())
    first = workloads("steady", 1)
    assert first == workloads("steady", 1)
    assert first[0].rows != workloads("steady", 2)[0].rows
    (tmp_path / "written.toml").write_text(first[1])
    assert read_workload(tmp_path / "written.toml", applications()) == first[0]


def test_a_job_that_the_cluster_cannot_run_is_reported_before_any_run(tmp_path: Path) -> None:
    (tmp_path / "wide.toml").write_text(
        '[[job]]\napplication = "digits-cnn"\nreplicas = 9\nbatch_size = 64\n'
    )
    definition = defined(tmp_path, 'policies = ["fixed"]\nsets = ["wide.toml"]\nseeds = [1]')
    with pytest.raises(UserError, match=r"wide.toml: job 1: replicas 9: allowed: at most 8"):
        workload_maker(definition, applications())("wide", 1)


def alone(tmp_path: Path, text: str) -> dict[str, Workload]:
    """The workloads of the isolated runs of a definition by name, as read from their files."""
    runs, workloads = plan_isolated_runs(defined(tmp_path, text), applications())
    assert {(run.policy, run.is_isolated) for run in runs} == {("pollux:adapt_replicas=false", True)}
    assert [run.name for run in runs] == [run.set for run in runs]
    found = {}
    for run in runs:
        workload, text = workloads(run.set, run.seed)
        (tmp_path / "written.toml").write_text(text)
        found[run.name] = read_workload(tmp_path / "written.toml", applications())
        assert found[run.name] == workload
    return found


def test_isolated_runs_have_every_application_with_one_two_and_four_replicas(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(OWN_SET)
    found = alone(tmp_path, 'policies = ["fixed"]\nsets = ["mine.toml"]\nseeds = [3, 1]')
    assert list(found) == [f"isolated-{name}-{n}" for name in ("digits-cnn", "matfac") for n in (1, 2, 4)]
    for name, workload in found.items():
        (row,) = workload.rows
        application, _, replicas = name.removeprefix("isolated-").rpartition("-")
        spec = applications()[application]
        assert (row.at_s, row.spec.seed, row.spec.application) == (0.0, 3, application)
        assert (row.spec.replicas, row.spec.batch_size) == (int(replicas), spec.initial_batch_size)
        assert (row.spec.target, row.spec.max_progress) == (spec.target, spec.max_progress)
        assert row.spec.settings == {}


def test_isolated_runs_have_no_more_replicas_than_job_and_cluster_allow(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[[job]]\napplication = "matfac"\n')
    text = 'policies = ["fixed"]\nsets = ["mine.toml"]\nseeds = [1]\nnodes = 1\nslots = 3'
    assert list(alone(tmp_path, text)) == ["isolated-matfac-1", "isolated-matfac-2"]


def test_a_written_workload_file_has_the_jobs_own_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(OWN_SET)
    text = workload_text(read_workload(tmp_path / "mine.toml", applications()))
    assert 'id = "first"' in text
    assert "settings = { learning_rate = 1e-05 }" in text


def test_the_expected_time_comes_from_runs_of_the_set_then_of_any_then_from_the_definition() -> None:
    tail, burst = (PlannedRun(set=name, policy="fixed", seed=1) for name in ("tail", "burst"))
    assert expected_s([tail, burst], {}, 100.0) == 200.0
    assert expected_s([tail], {burst: 40.0}, 100.0) == 40.0
    done = {burst: 40.0, PlannedRun(set="tail", policy="pollux", seed=1): 20.0}
    assert expected_s([tail, tail], done, 100.0) == 40.0
