import json
from pathlib import Path

import pytest

from analysis.report.sensitivity_report import Axis, Study, SweepOutcome, encoded, figures, markdown, study

ROUND = Axis("round", "seconds between two rounds", ("1", "2"), default="2", policies=("fixed", "pollux"))
ABLATION = Axis("ablation", "half of it", ("as by default",), "as by default", ("fixed", "pollux"))
TIMES_S = {
    ("1", "fixed"): (10.0, 40.0),
    ("2", "fixed"): (10.0, 20.0),
    ("1", "pollux"): (5.0, 20.0),
    ("2", "pollux"): (5.0, 5.0),
}
"""By point and policy, on two workloads."""


def outcomes(axis: Axis) -> list[SweepOutcome]:
    return [
        SweepOutcome(
            axis.name, point, policy, workload, 1, TIMES_S[point if point in "12" else "2", policy][k]
        )
        for point in axis.points
        for policy in axis.policies
        for k, workload in enumerate(("a", "b"))
    ]


def found() -> Study:
    runs = [*outcomes(ROUND), *outcomes(ABLATION)]
    return study("osdi21", "0", "fixed", [ROUND, ABLATION], runs, {"interference": "no such notion"})


def test_ratios_are_taken_workload_by_workload_to_the_baseline_and_to_the_default_point():
    cell = found().sweeps["round"].points["1"]["pollux"]
    assert cell.mean_jct_s == 12.5
    assert (cell.over_baseline.mean, cell.over_baseline.least, cell.over_baseline.most) == (0.5, 0.5, 0.5)
    assert cell.over_default.mean == pytest.approx(2.0)  # the geometric mean of 1 and 4
    assert (cell.over_default.least, cell.over_default.most, cell.over_default.runs) == (1.0, 4.0, 2)
    default = found().sweeps["round"].points["2"]["pollux"]
    assert (default.over_default.mean, default.over_baseline.least) == (1.0, 0.25)


def test_a_run_without_a_figure_is_named_and_its_partner_not_counted():
    runs = [r for r in outcomes(ROUND) if (r.point, r.policy, r.workload) != ("1", "fixed", "b")]
    runs.append(SweepOutcome("round", "1", "fixed", "b", 1, None, "j failed: no"))
    result = study("osdi21", "0", "fixed", [ROUND], runs, {})
    assert result.left_out == {"round 1, fixed on b, seed 1": "j failed: no"}
    assert result.sweeps["round"].points["1"]["pollux"].over_baseline.runs == 1
    alone = study("osdi21", "0", "fixed", [ROUND], [r for r in runs if r.policy == "pollux"], {})
    assert alone.sweeps["round"].points["1"]["pollux"].over_baseline is None
    assert "| 1 | - | - |" in markdown(alone)


def test_the_table_marks_the_default_point_and_says_what_is_left_out():
    text = markdown(found())
    assert "| 1 | 25.0 s; 1.414 | 0.500 (0.50-0.50); 2.000 |" in text
    assert "| **2** | 15.0 s; 1.000 | 0.354 (0.25-0.50); 1.000 |" in text
    assert "| **as by default** | 15.0 s | 0.354 (0.25-0.50) |" in text
    assert "* interference: no such notion" in text
    single = [run for run in outcomes(ROUND) if run.workload == "a"]
    assert "| 1 | 10.0 s; 1.000 | 0.500; 1.000 |" in markdown(
        study("osdi21", "0", "fixed", [ROUND], single, {})
    )


def test_json_holds_every_cell():
    tree = json.loads(encoded(found()))
    assert tree["workloads"] == ["a", "b"]
    assert tree["sweeps"]["round"]["points"]["1"]["pollux"]["over_default"]["most"] == 4.0


def test_the_same_study_draws_the_same_figures(tmp_path: Path):
    both = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        paths = figures(found(), tmp_path / name)
        both.append([(path.name, path.read_bytes()) for path in paths])
    assert [name for name, _ in both[0]] == [f"sensitivity-osdi21-{n}.svg" for n in ("round", "ablation")]
    assert both[0] == both[1]
