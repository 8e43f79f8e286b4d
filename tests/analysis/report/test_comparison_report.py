import json
from pathlib import Path

from analysis.compare.comparison import compare
from analysis.compare.experiment_runs import gather
from analysis.report.comparison_report import ComparisonReport, markdown, to_json
from tests.fixtures.runs import put


def report(place: Path, seeds: dict[str, int]) -> ComparisonReport:
    """Of two policies with this number of seeds by set."""
    for name, count in seeds.items():
        for seed in range(1, count + 1):
            put(place, name, "fixed", seed, [20.0 + seed])
            put(place, name, "pollux", seed, [10.0 + seed])
    experiment = gather(place)
    return ComparisonReport(experiment, compare(experiment.runs), "a test", is_calibrated=True)


def test_json_says_whether_bounds_are_an_interval_or_a_range(tmp_path: Path) -> None:
    content = json.loads(to_json(report(tmp_path, {"burst": 5, "tail": 3, "steady": 1})))
    overall = content["mean_jct_ratio"]["pollux/fixed"]
    assert list(overall) == ["ratio", "low", "high", "bounds", "pairs"]
    assert (overall["bounds"], overall["pairs"]) == ("interval", 9)
    assert "difference" in content["rescales_difference"]["pollux/fixed"]
    kinds = {
        name: by_measure["mean_jct_ratio"]["pollux/fixed"]["bounds"]
        for name, by_measure in content["by_set"].items()
    }
    assert kinds == {"burst": "interval", "tail": "range", "steady": None}
    assert content["verdicts"][0]["verdict"] == "better"


def test_markdown_shows_intervals_in_square_and_ranges_in_round_brackets(tmp_path: Path) -> None:
    text = markdown(report(tmp_path, {"burst": 5, "tail": 3}))
    (row,) = [line for line in text.splitlines() if line.startswith("| pollux/fixed | 8 |")]
    overall, burst, tail = row.strip("| ").split(" | ")[2:]
    assert "[" in overall
    assert "[" in burst
    assert "(" in tail
    assert text.startswith("16 runs of 2 policies, 2 sets (burst, tail).\n")
    assert "Left out: nothing." in text
