import numpy as np
import pytest

from analysis.compare.comparison import compare
from analysis.report.figures import median_pair, timeline, useful_examples
from tests.analysis.compare.test_comparison import run
from tests.fixtures.logs import good_run, history_of


def test_useful_examples_come_evenly_within_a_samples_window_and_between_two() -> None:
    job = history_of(good_run()).jobs["a"]
    # M0 is 16; samples: 113-115 s up to progress 20, 117-119 s up to 50, 119-121 s up to 80, its end.
    times_s = np.array([110.0, 113.0, 114.0, 115.0, 116.0, 118.0, 119.0, 121.0, 200.0])
    expected = [0, 0, 10, 20, 20, 35, 50, 80, 80]
    assert useful_examples(job, times_s) / 16 == pytest.approx(expected)


def test_the_pair_that_is_drawn_is_that_of_the_median_ratio_to_fixed() -> None:
    runs = [run("tail", "fixed", seed, 10) for seed in (1, 2, 3)]
    runs += [run("tail", "dynamic", seed, 10) for seed in (1, 2, 3)]
    runs += [run("tail", "pollux", seed, jct_s) for seed, jct_s in ((1, 9), (2, 3), (3, 5))]
    pair = median_pair(compare(runs))
    assert pair is not None
    assert [one.name for one in pair] == ["tail-pollux-3", "tail-fixed-3"]


def test_a_timeline_has_a_row_for_each_job_and_a_panel_for_each_policy() -> None:
    history = history_of(good_run())
    panels = timeline({"pollux": history, "fixed": history}, "demo, seed 7").axes
    assert len(panels) == 2
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["a", "b"]
    assert panels[1].get_xlabel() == "time since the first submission, s"
