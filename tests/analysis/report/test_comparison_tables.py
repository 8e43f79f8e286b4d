from pathlib import Path

import pytest

from analysis.compare.comparison import Comparison, compare
from analysis.compare.experiment_runs import Experiment, gather
from analysis.report.comparison_tables import comparison_tables
from tests.fixtures.runs import alone_in_20s, put, put_experiment


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    place = put_experiment(tmp_path_factory.mktemp("experiment"))
    put(place / "isolated", "isolated", "digits-cnn", 1, [16.0])
    return gather(place, alone_in_20s)


@pytest.fixture(scope="module")
def comparison(experiment: Experiment) -> Comparison:
    return compare(experiment.runs)


def test_every_row_has_a_cell_per_column(experiment: Experiment, comparison: Comparison) -> None:
    found = list(comparison_tables(experiment, comparison))
    assert len(found) == 5
    assert all(len(row) == len(table.columns) for table in found for row in table.rows)


def test_means_are_over_the_runs_that_every_policy_has(
    experiment: Experiment, comparison: Comparison
) -> None:
    means = next(comparison_tables(experiment, comparison))
    assert means.title.startswith("Means over the 4 (set, seed) that every policy has")
    assert [row[:3] for row in means.rows] == [["fixed", "4", "40.8"], ["pollux", "4", "20.8"]]


def test_the_ratio_of_mean_jct_is_shown_overall_and_by_set(
    experiment: Experiment, comparison: Comparison
) -> None:
    _, jct, *_ = comparison_tables(experiment, comparison)
    assert jct.columns == ["policy/baseline", "pairs", "overall", "burst-tuned", "tail-tuned"]
    assert [row[:2] for row in jct.rows] == [["pollux/fixed", "4"]]


def test_conditions_of_the_machine_show_median_and_range(
    experiment: Experiment, comparison: Comparison
) -> None:
    conditions = list(comparison_tables(experiment, comparison))[3]
    assert conditions.rows[0][:2] == ["fixed", "42 (21 to 62)"]
    assert conditions.rows[1][:2] == ["pollux", "-"]


def test_isolated_runs_show_the_error_of_the_model(experiment: Experiment, comparison: Comparison) -> None:
    *_, isolated = comparison_tables(experiment, comparison)
    assert isolated.rows == [
        ["isolated/isolated-digits-cnn-1", "digits-cnn", "1.0", "16.0", "20.0", "+25.0%", "-"]
    ]


def test_tables_without_content_are_not_shown(tmp_path: Path) -> None:
    for policy in ("fixed", "pollux"):
        put(tmp_path, "tail", policy, 1, [10.0])
    experiment = gather(tmp_path)
    means, jct, others = comparison_tables(experiment, compare(experiment.runs))
    assert "pairs" in jct.columns
    assert means.rows
    assert others.rows
