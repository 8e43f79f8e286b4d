from pathlib import Path

import pytest

from analysis.compare.experiment_runs import gather
from services.simulator.isolated_model import IsolatedModel, Unprofiled, load_isolated_model
from services.simulator.isolated_times import IsolatedTimes
from services.simulator.output_folders import claimed
from services.simulator.run_case import simulate
from services.simulator.worlds.calibrated import CalibratedWorld
from tests.fixtures.logs import history_of
from tests.fixtures.profiles import write_profiles
from tests.fixtures.runs import happenings
from tests.fixtures.simulation_cases import case_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def modelled(tmp_path_factory: pytest.TempPathFactory) -> IsolatedModel:
    return load_isolated_model(write_profiles(tmp_path_factory.mktemp("profiles")))


def test_isolated_times_come_from_the_calibrated_world_with_the_nodes_of_the_run(
    modelled: IsolatedModel,
) -> None:
    run = history_of(happenings("tail", "fixed", 1, [10.0, 10.0]))
    time_s = modelled(run)
    assert time_s is not None
    job = run.jobs["job-0"]
    nodes = [node for model in modelled._models.values() for node in model.nodes]
    assert [(node.name, node.slots) for node in nodes] == [("n0", 2)]
    alone = IsolatedTimes(lambda: CalibratedWorld(modelled.profiles, nodes), nodes, round_s=2.0)
    assert time_s(job, 1.5) == alone.time_s(job.spec, job.submitted_s, 1.5)
    slower, faster = time_s(job, 1.0), time_s(job, 2.0)
    assert slower is not None
    assert faster is not None
    assert 0 < faster < slower


def test_runs_on_the_same_nodes_share_simulations(modelled: IsolatedModel) -> None:
    for seed in (1, 2):
        modelled(history_of(happenings("tail", "fixed", seed, [10.0, 10.0])))
    assert len(modelled._models) == 1


def test_the_error_names_an_application_without_a_profile(modelled: IsolatedModel) -> None:
    with pytest.raises(Unprofiled, match=r"smallest: has no profile; profiles exist of .*digits-cnn"):
        modelled(history_of(happenings("tail", "fixed", 1, [10.0], application="smallest")))


def test_the_error_names_a_node_with_another_slot_speed_than_the_profiles(modelled: IsolatedModel) -> None:
    faster = IsolatedModel(modelled.profiles, slot_speed=0.5)
    with pytest.raises(Unprofiled, match=r"n0 had slots of speed 0.2; the profiles were measured at 0.5"):
        faster(history_of(happenings("tail", "fixed", 1, [10.0])))


def test_rho_from_the_log_of_a_simulated_run_equals_the_rho_of_the_simulator(tmp_path: Path) -> None:
    profiles = write_profiles(tmp_path / "profiles")
    demo = ROOT / "workloads" / "sets" / "demo.toml"
    out = tmp_path / "runs"
    case = case_of("calibrated", workload=demo, profiles=profiles, seed=1, out=out, fairness=True)
    with claimed(case.out, [case.run_id]):
        result = simulate(case)
    model = load_isolated_model(profiles)
    (run,) = gather(tmp_path / "runs", model, model.step_time).runs
    assert run.step_time == pytest.approx(1.0, rel=1e-3)
    assert result.rhos
    assert {job.id: job.rho for job in run.summary.per_job} == pytest.approx(result.rhos, rel=1e-3)
