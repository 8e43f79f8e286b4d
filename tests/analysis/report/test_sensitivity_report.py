from pathlib import Path

from analysis.compare.sensitivity_study import study
from analysis.report.sensitivity_report import figures, markdown
from tests.fixtures.studies import ROUND, outcomes, two_sweeps


def test_the_table_marks_the_default_point_and_lists_what_is_left_out():
    text = markdown(two_sweeps())
    assert "| 1 | 25.0 s; 1.414 | 0.500 (0.50-0.50); 2.000 |" in text
    assert "| **2** | 15.0 s; 1.000 | 0.354 (0.25-0.50); 1.000 |" in text
    assert "| **as by default** | 15.0 s | 0.354 (0.25-0.50) |" in text
    assert "* interference: not in this world" in text


def test_a_ratio_of_one_run_has_no_range():
    single = [run for run in outcomes(ROUND) if run.workload == "a"]
    text = markdown(study("osdi21", "0", "fixed", [ROUND], single, {}))
    assert "| 1 | 10.0 s; 1.000 | 0.500; 1.000 |" in text


def test_a_point_without_its_baseline_shows_dashes():
    runs = [run for run in outcomes(ROUND) if run.policy == "pollux"]
    assert "| 1 | - | - |" in markdown(study("osdi21", "0", "fixed", [ROUND], runs, {}))


def test_the_same_study_draws_the_same_figures(tmp_path: Path):
    drawn = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        paths = figures(two_sweeps(), tmp_path / name)
        drawn.append([(path.name, path.read_bytes()) for path in paths])
    assert [name for name, _ in drawn[0]] == [
        "sensitivity-osdi21-round.svg",
        "sensitivity-osdi21-ablation.svg",
    ]
    assert drawn[0] == drawn[1]
