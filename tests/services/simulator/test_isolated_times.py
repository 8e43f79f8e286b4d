"""Finish-time fairness in simulation, and the comparison of policies."""

import math

import pytest

from common.types import Node
from services.simulator.isolated_times import IsolatedTimes, mean_active
from services.simulator.policy_table import comparison
from services.simulator.run_case import isolated_times_for, simulate
from services.simulator.worlds.synthetic import APPLICATIONS, SyntheticWorld
from tests.fixtures.simulation_cases import synthetic_case
from workloads.files.workload_file import JobFields, complete_spec


def test_the_mean_number_of_active_jobs_includes_the_job_itself() -> None:
    assert mean_active([(0.0, 10.0)]) == [1.0]
    assert mean_active([(0.0, 10.0), (5.0, 10.0), (20.0, 30.0), (20.0, 30.0)]) == [1.5, 2.0, 2.0, 2.0]
    assert mean_active([]) == []


def test_isolated_times_are_interpolated_between_whole_slots_and_longer_below_one() -> None:
    one_node = [Node(name="n", slots=4, slot_speed=1.0)]
    isolated = IsolatedTimes(lambda: SyntheticWorld(seed=2), one_node, round_s=60.0)
    fields = JobFields(application="medium", id="a", replicas=2, batch_size=64)
    spec = complete_spec(fields, APPLICATIONS, "a", 0)
    one_s, two_s = isolated.time_s(spec, 60.0, 1.0), isolated.time_s(spec, 60.0, 2.0)
    assert two_s < one_s < 2 * two_s
    assert isolated.time_s(spec, 60.0, 1.25) == pytest.approx(0.75 * one_s + 0.25 * two_s)
    assert isolated.time_s(spec, 60.0, 0.5) == pytest.approx(2 * one_s)
    assert isolated.time_s(spec, 50.0, 1.0) == pytest.approx(one_s + 10.0), "it waits for a round"
    assert isolated.time_s(spec, 0.0, 1.0) == pytest.approx(one_s + 60.0), "the first one is not at 0"
    assert isolated.time_s(spec, 60.0, 64.0) == isolated.time_s(spec, 60.0, 4.0), "no more than there are"
    assert math.isfinite(isolated.time_s(spec, 0.0, 3.5))


def test_a_job_that_ran_alone_has_a_rho_of_about_one() -> None:
    one = synthetic_case("pollux", jobs=1, nodes=1, slots=1, fairness=True)
    result = simulate(one)
    assert result.rho is not None
    assert result.rho.worst == pytest.approx(1.0, rel=0.01)
    assert simulate(one).rhos == result.rhos
    assert isolated_times_for(one) is isolated_times_for(
        synthetic_case("fixed", jobs=5, nodes=1, slots=1, fairness=True)
    )


def test_the_comparison_has_one_row_per_policy_with_the_worst_rho_of_all_runs() -> None:
    results = [
        simulate(synthetic_case(policy, label=label, jobs=4, seed=seed, fairness=True))
        for label, seed in (("w1", 1), ("w2", 2))
        for policy in ("fixed", "pollux")
    ]
    lines = [line.strip("| ").split(" | ") for line in comparison(results).splitlines()]
    assert lines[0][0] == "policy"
    assert lines[0][-2:] == ["w1", "w2"]
    assert [line[:2] for line in lines[2:]] == [["fixed", "2"], ["pollux", "2"]]
    pollux = [result for result in results if result.policy == "pollux"]
    assert lines[3][6] == f"{max(r.rho.worst for r in pollux if r.rho):.2f}"
    assert lines[3][-1] == f"{pollux[1].mean_jct_s:.0f}"
