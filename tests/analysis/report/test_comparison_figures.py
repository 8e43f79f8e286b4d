import numpy as np
import pytest

from analysis.compare.comparison import compare
from analysis.report.comparison_figures import median_pair, ratios, timeline, useful_examples_at
from tests.fixtures.logs import good_run, history_of
from tests.fixtures.runs import compared_run


def test_useful_examples_grow_evenly_within_the_window_of_a_sample_and_stand_still_between() -> None:
    job = history_of(good_run()).jobs["a"]
    # M0 is 16; samples: 113-115 s up to progress 20, 117-119 s up to 50, 119-121 s up to 80, its end.
    times_s = np.array([110.0, 113.0, 114.0, 115.0, 116.0, 118.0, 119.0, 121.0, 200.0])
    expected = [0, 0, 10, 20, 20, 35, 50, 80, 80]
    assert useful_examples_at(job, times_s) / 16 == pytest.approx(expected)


def test_the_timeline_shows_the_pair_with_the_median_ratio_of_pollux_to_fixed() -> None:
    runs = [compared_run("tail", policy, seed, 10) for policy in ("fixed", "dynamic") for seed in (1, 2, 3)]
    runs += [compared_run("tail", "pollux", seed, jct_s) for seed, jct_s in ((1, 9), (2, 3), (3, 5))]
    pair = median_pair(compare(runs))
    assert pair is not None
    assert [run.name for run in pair] == ["tail-pollux-3", "tail-fixed-3"]


def test_without_pairs_there_is_no_median_pair() -> None:
    apart = [compared_run("tail", "fixed", 1, 10), compared_run("tail", "pollux", 2, 10)]
    assert median_pair(compare(apart)) is None


def test_a_timeline_has_a_row_per_job_and_a_panel_per_policy() -> None:
    history = history_of(good_run())
    panels = timeline({"pollux": history, "fixed": history}, "demo, seed 7").axes
    assert len(panels) == 2
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["a", "b"]
    assert panels[1].get_xlabel() == "time since the first submission, s"


def test_ratios_draw_intervals_solid_and_ranges_dotted() -> None:
    seeds = {"burst": range(1, 6), "tail": range(1, 3)}
    runs = [
        compared_run(name, policy, seed, jct_s + seed)
        for name, of_set in seeds.items()
        for seed in of_set
        for policy, jct_s in (("fixed", 20), ("pollux", 10))
    ]
    (axes,) = ratios(compare(runs)).axes
    bars = [line.get_linestyle() for line in axes.get_lines() if line.get_label().startswith("_")][:3]
    assert bars == ["-", "-", ":"], "overall, burst, tail"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["pollux/fixed"]
