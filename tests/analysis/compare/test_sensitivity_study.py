import json
import math

import pytest

from analysis.compare.sensitivity_study import RatioSpread, SweepOutcome, encoded, study
from tests.fixtures.studies import ROUND, outcomes, two_sweeps


def test_ratios_are_taken_per_workload_to_the_baseline_and_to_the_default_point():
    points = two_sweeps().sweeps["round"].points
    varied, default = points["1"]["pollux"], points["2"]["pollux"]
    assert varied.mean_jct_s == 12.5
    assert varied.over_baseline == RatioSpread(mean=0.5, least=0.5, most=0.5, runs=2)
    assert varied.over_default == RatioSpread(pytest.approx(math.sqrt(1.0 * 4.0)), 1.0, 4.0, 2)
    assert default.over_baseline == RatioSpread(pytest.approx(math.sqrt(0.5 * 0.25)), 0.25, 0.5, 2)
    assert default.over_default == RatioSpread(1.0, 1.0, 1.0, 2)


def test_a_run_that_did_not_complete_is_named_and_its_partner_has_no_ratio():
    runs = [run for run in outcomes(ROUND) if (run.point, run.policy, run.workload) != ("1", "fixed", "b")]
    runs.append(SweepOutcome("round", "1", "fixed", "b", 1, None, "j failed: no"))
    found = study("osdi21", "0", "fixed", [ROUND], runs, {})
    assert found.left_out == {"round 1, fixed on b, seed 1": "j failed: no"}
    cell = found.sweeps["round"].points["1"]["pollux"]
    assert cell.mean_jct_s == 12.5
    assert cell.over_baseline is not None
    assert cell.over_baseline.runs == 1


def test_without_a_baseline_there_is_no_ratio_to_it():
    runs = [run for run in outcomes(ROUND) if run.policy == "pollux"]
    points = study("osdi21", "0", "fixed", [ROUND], runs, {}).sweeps["round"].points
    assert points["1"]["pollux"].over_baseline is None
    assert points["1"]["fixed"].mean_jct_s is None


def test_json_holds_every_cell():
    content = json.loads(encoded(two_sweeps()))
    assert content["workloads"] == ["a", "b"]
    assert content["left_out"] == {"interference": "not in this world"}
    assert content["sweeps"]["round"]["points"]["1"]["pollux"]["over_default"]["most"] == 4.0
