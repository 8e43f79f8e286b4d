import math

import pytest
from msgspec import structs

from analysis.compare.comparison import MEASURES, Comparison, as_json, compare, verdicts
from analysis.compare.pairing import ComparedRun, LeftOut
from analysis.log.frames import from_records
from analysis.log.history import RunHistory
from analysis.run.fairness import IsolatedTime
from analysis.summarize import summarize
from tests.fixtures.logs import written
from tests.fixtures.runs import happenings

JCT, UNFAIR = MEASURES[0], MEASURES[6]


def alone_in_20s(_: RunHistory) -> IsolatedTime:
    return lambda job, share: 20.0


def run(
    of: str, policy: str, seed: int, *jcts_s: float, rescales: int = 0, application: str = ""
) -> ComparedRun:
    name = f"{of}-{policy}-{seed}"
    records = written(happenings(of, policy, seed, jcts_s, rescales, application), name)
    _, summary = summarize(from_records(records), alone_in_20s)
    assert summary.audit.ok, summary.audit.findings
    return ComparedRun(name=name, set=of, policy=policy, seed=seed, summary=summary)


@pytest.fixture(scope="module")
def two_sets() -> Comparison:
    """Ratios of pollux to fixed: 1/2, 1/2, 1/2 on burst, 2, 2, 1 on tail."""
    return compare(
        [
            *(run("burst", "fixed", seed, 20, 40) for seed in (1, 2, 3)),
            *(run("burst", "pollux", seed, 10, 20, rescales=2) for seed in (1, 2, 3)),
            *(run("tail", "fixed", seed, 10) for seed in (1, 2, 3)),
            *(run("tail", "pollux", seed, jct_s) for seed, jct_s in ((1, 20), (2, 20), (3, 10))),
        ]
    )


def test_a_ratio_is_the_geometric_mean_over_the_pairs(two_sets: Comparison) -> None:
    contrast = two_sets.contrast("pollux", "fixed")
    assert contrast is not None
    effect = contrast.overall["mean_jct_ratio"]
    assert effect.value == pytest.approx((0.5**3 * 2 * 2 * 1) ** (1 / 6))
    assert (effect.pairs, effect.better) == (6, 3)
    assert contrast.by_set["burst"]["mean_jct_ratio"].value == pytest.approx(0.5)


def test_the_ratio_of_step_times_is_told_and_is_no_verdict() -> None:
    """Where the machine was not as fast for the one policy as for the other."""
    at = {("fixed", 1): 1.0, ("pollux", 1): 1.2, ("fixed", 2): 1.1, ("pollux", 2): 1.1}
    runs = [
        structs.replace(run("burst", policy, seed, 20), step_time=at[policy, seed])
        for seed in (1, 2)
        for policy in ("fixed", "pollux")
    ]
    comparison = compare([*runs, run("burst", "fixed", 3, 20), run("burst", "pollux", 3, 20)])
    contrast = comparison.contrast("pollux", "fixed")
    assert contrast is not None
    effect = contrast.overall["step_time_ratio"]
    assert (effect.value, effect.pairs) == (pytest.approx(math.sqrt(1.2)), 2)
    jct = contrast.overall["mean_jct_at_equal_steps_ratio"]
    assert (jct.value, jct.pairs) == (pytest.approx(1 / math.sqrt(1.2)), 2)
    content = as_json(comparison)
    assert content["step_time_ratio"]["pollux/fixed"]["ratio"] == effect.value  # type: ignore[index]
    assert "step_time_ratio" not in {verdict.measure for verdict in verdicts(contrast)}
    assert content["policies"]["pollux"]["step_time"] is None, "not of all runs"  # type: ignore[index]
    assert as_json(compare(runs))["policies"]["pollux"]["step_time"] == pytest.approx(1.15)  # type: ignore[index]


def test_the_interval_of_a_set_of_three_seeds_is_their_range(two_sets: Comparison) -> None:
    contrast = two_sets.contrast("pollux", "fixed")
    assert contrast is not None
    tail = contrast.by_set["tail"]["mean_jct_ratio"]
    assert (tail.low, tail.high) == pytest.approx((1.0, 2.0))
    overall = contrast.overall["mean_jct_ratio"]
    assert overall.low is not None
    assert overall.high is not None
    assert 0.5 <= overall.low < 1 < overall.high < 2


def test_the_other_way_round_everything_is_inverse(two_sets: Comparison) -> None:
    one, other = two_sets.contrast("pollux", "fixed"), two_sets.contrast("fixed", "pollux")
    assert one is not None
    assert other is not None
    value, back = one.overall["mean_jct_ratio"], other.overall["mean_jct_ratio"]
    assert value.value is not None
    assert value.high is not None
    assert back.value == pytest.approx(1 / value.value)
    assert back.low == pytest.approx(1 / value.high, rel=0.03)
    assert [contrast.name for contrast in two_sets.shown()] == ["pollux/fixed"]


def test_what_can_be_0_is_compared_by_its_mean_difference(two_sets: Comparison) -> None:
    contrast = two_sets.contrast("pollux", "fixed")
    assert contrast is not None
    # On burst rho is 1 and 2 with fixed, at most 1 with pollux; two rescales for each of its two jobs there.
    assert contrast.by_set["burst"]["unfair_fraction_difference"].value == pytest.approx(-0.5)
    assert contrast.by_set["burst"]["rescales_difference"].value == pytest.approx(4.0)
    assert contrast.overall["rescales_difference"].value == pytest.approx(2.0)


def test_of_goodput_and_jain_more_is_better(two_sets: Comparison) -> None:
    contrast = two_sets.contrast("pollux", "fixed")
    assert contrast is not None
    burst = contrast.by_set["burst"]["goodput_ratio"]
    assert burst.value == pytest.approx(2.0)
    assert burst.better == 3


def test_a_verdict_says_how_much_and_on_which_sets_not(two_sets: Comparison) -> None:
    contrast = two_sets.contrast("pollux", "fixed")
    assert contrast is not None
    first = verdicts(contrast)[0]
    assert first.verdict == "cannot be told"
    assert first.sentence.startswith("Mean JCT of pollux over that of fixed: 0.89 [0.")
    assert first.sentence.endswith(
        "(6 pairs, 3 of them better): cannot be told; too few pairs on each set alone to tell."
    )


def test_a_verdict_is_plain_when_it_holds_on_every_set() -> None:
    runs = [
        run(of, policy, seed, jct_s)
        for of in ("burst", "tail")
        for seed in range(1, 7)
        for policy, jct_s in (("fixed", 30.0 + seed), ("dynamic", 20.0 + seed))
    ]
    contrast = compare(runs, baselines=["fixed"]).contrasts[0]
    words = {verdict.measure: verdict for verdict in verdicts(contrast)}
    assert words["mean_jct_ratio"].verdict == "better"
    assert words["mean_jct_ratio"].sentence.endswith(
        "(12 pairs, 12 of them better): better, as on every set alone."
    )
    assert words["goodput_ratio"].verdict == "better"
    assert words["rescales_difference"].verdict == "cannot be told"
    back = compare(runs, baselines=["dynamic"]).contrasts[0]
    assert verdicts(back)[0].verdict == "worse"


def test_sets_with_pairs_enough_have_a_verdict_of_their_own() -> None:
    runs = [
        run(of, policy, seed, jct_s)
        for of, ours_s in (("burst", 10.0), ("tail", 20.0))
        for seed in range(1, 7)
        for policy, jct_s in (("fixed", 20.0), ("pollux", ours_s))
    ]
    first = verdicts(compare(runs, baselines=["fixed"]).contrasts[0])[0]
    assert first.sentence.endswith(
        "better; so on burst; cannot be told on tail (1.00 [1.00, 1.00]); "
        "cannot be told of other sets like these."
    )


def test_what_holds_on_these_sets_need_not_on_others_like_them() -> None:
    """Ratios 0.5 on burst and 0.95 on tail: all pairs together say more than two sets can."""
    runs = [
        run(of, policy, seed, jct_s)
        for of, ours_s in (("burst", 10.0), ("tail", 19.0))
        for seed in range(1, 7)
        for policy, jct_s in (("fixed", 20.0), ("pollux", ours_s + seed / 4))
    ]
    contrast = compare(runs, baselines=["fixed"]).contrasts[0]
    found = contrast.overall["mean_jct_ratio"]
    assert found.high is not None
    assert found.high_by_set is not None
    assert found.high < 1 < found.high_by_set
    first = verdicts(contrast)[0]
    assert first.verdict == "better"
    assert first.sentence.endswith("; cannot be told of other sets like these.")
    assert ", by sets [0.5" in first.sentence


def test_one_pair_gives_a_ratio_but_no_verdict() -> None:
    contrast = compare([run("tail", "fixed", 1, 10), run("tail", "pollux", 1, 5)]).shown()[0]
    assert contrast.overall["mean_jct_ratio"].value == pytest.approx(0.5)
    assert contrast.overall["mean_jct_ratio"].low is None
    sentence = verdicts(contrast)[0].sentence
    assert sentence.endswith("fixed: 0.50 (1 pair, 1 of them better, too few for 95%): cannot be told.")


def test_a_run_without_partner_is_named() -> None:
    runs = [
        run("tail", "fixed", 1, 10),
        run("tail", "pollux", 1, 5),
        run("tail", "pollux", 2, 5),
        run("tail", "pollux", 3, 5),
    ]
    # The sets of an experiment carry their requests, and the names of its folders do not.
    runs = [structs.replace(one, set="tail-tuned") for one in runs]
    noisy = LeftOut(run="tail-fixed-3", why="noisy")
    comparison = compare(runs, [noisy])
    assert comparison.left_out == (
        noisy,
        LeftOut(run="tail-fixed-2", why="there is no such run; unpaired with it: tail-pollux-2"),
    )
    assert comparison.shown()[0].overall["mean_jct_ratio"].pairs == 1
    assert {one.name for one in comparison.common} == {"tail-fixed-1", "tail-pollux-1"}


def test_runs_of_other_jobs_are_no_pair() -> None:
    comparison = compare(
        [
            run("tail", "dynamic", 1, 10),
            run("tail", "fixed", 1, 10, application="matfac"),
            run("tail", "pollux", 1, 5),
        ]
    )
    assert comparison.left_out == (
        LeftOut(run="tail-fixed-1", why="its jobs are not those of tail-dynamic-1"),
    )
    assert comparison.policies == ("dynamic", "pollux")


def test_runs_whose_jobs_ask_for_something_else_are_no_pair() -> None:
    fixed, dynamic, pollux = (run("tail", policy, 1, 10) for policy in ("fixed", "dynamic", "pollux"))
    habit = structs.replace(pollux, requests="realistic")
    tuned = [structs.replace(one, requests="tuned") for one in (fixed, dynamic)]
    assert compare([*tuned, habit]).left_out == (
        LeftOut(run="tail-pollux-1", why="its requests are realistic, those of tail-dynamic-1 tuned"),
    )
    later = structs.replace(pollux, jobs="at 3 s")
    assert compare([fixed, dynamic, later]).left_out == (
        LeftOut(
            run="tail-pollux-1",
            why="its jobs ask for something else, or come at other times, than those of tail-dynamic-1",
        ),
    )


def test_a_second_run_of_the_same_is_left_out() -> None:
    twice = run("tail", "fixed", 1, 10)
    again = ComparedRun(name="tail-fixed-1b", set="tail", policy="fixed", seed=1, summary=twice.summary)
    comparison = compare([twice, again, run("tail", "pollux", 1, 5)])
    assert [entry.run for entry in comparison.left_out] == ["tail-fixed-1b"]


def test_a_measure_that_cannot_be_had_shrinks_its_pairs_openly() -> None:
    records = written(happenings("tail", "fixed", 2, [10]), "tail-fixed-2")
    _, summary = summarize(from_records(records))  # no model, no rho
    without = ComparedRun(name="tail-fixed-2", set="tail", policy="fixed", seed=2, summary=summary)
    runs = [run("tail", "fixed", 1, 10), without, run("tail", "pollux", 1, 5), run("tail", "pollux", 2, 5)]
    contrast = compare(runs).shown()[0]
    assert contrast.overall["mean_jct_ratio"].pairs == 2
    assert contrast.overall["worst_rho_ratio"].pairs == 1
    worst = next(verdict for verdict in verdicts(contrast) if verdict.measure == "worst_rho_ratio")
    assert "1 without the measure" in worst.sentence


def test_baselines_come_first_and_variants_after_what_they_vary() -> None:
    names = ["smallest-first", "coadapt", "pollux-batch-only", "pollux", "dynamic", "fixed", "pollux:power=0"]
    comparison = compare([run("tail", name, 1, 10) for name in names])
    assert comparison.policies == (
        "fixed",
        "dynamic",
        "pollux",
        "pollux-batch-only",
        "pollux:power=0",
        "coadapt",
        "smallest-first",
    )


def test_the_figures_stand_under_measure_and_pair(two_sets: Comparison) -> None:
    found = as_json(two_sets)
    effect = found["mean_jct_ratio"]["pollux/fixed"]  # type: ignore[index]
    assert set(effect) == {"ratio", "low", "high", "pairs", "low_by_set", "high_by_set"}
    assert effect["pairs"] == 6
    assert effect["low_by_set"] <= effect["low"] < effect["high"] < effect["high_by_set"], "the sets differ"
    unfair = found["unfair_fraction_difference"]["fixed/pollux"]  # type: ignore[index]
    assert set(unfair) == {"difference", "low", "high", "pairs", "low_by_set", "high_by_set"}
    assert "low_by_set" not in found["by_set"]["burst"]["mean_jct_ratio"]["pollux/fixed"]  # type: ignore[index]
    assert found["by_set"]["burst"]["mean_jct_ratio"]["pollux/fixed"]["ratio"] == pytest.approx(0.5)  # type: ignore[index]
    fixed = found["policies"]["fixed"]  # type: ignore[index]
    assert fixed["runs"] == 6
    assert fixed["mean_jct"] == pytest.approx((3 * 30 + 3 * 10) / 6)
    assert math.isclose(fixed["worst_rho"], 2.0)
