from analysis.compare.comparison import JCT, Contrast, Effect, compare
from analysis.compare.intervals import Bounds
from analysis.compare.pairing import ComparedRun
from analysis.compare.verdicts import amount, summary_sentences, verdicts
from tests.fixtures.runs import compared_run, two_pairs_with_one_rho


def against_fixed(runs: list[ComparedRun]) -> Contrast:
    (contrast,) = compare(runs, baselines=["fixed"]).contrasts
    return contrast


def six_seeds(**jcts_s: float) -> list[ComparedRun]:
    """By set, the completion times with pollux; 20 s with fixed."""
    return [
        compared_run(workload, policy, seed, jct_s + seed / 4)
        for workload, pollux_s in jcts_s.items()
        for seed in range(1, 7)
        for policy, jct_s in (("fixed", 20.0), ("pollux", pollux_s))
    ]


def test_an_amount_shows_an_interval_in_square_and_a_range_in_round_brackets() -> None:
    assert amount(JCT, Effect(0.5, Bounds(0.4, 0.625, "interval"), 6, 6)) == "0.50 [0.40, 0.62]"
    assert amount(JCT, Effect(0.5, Bounds(0.4, 0.625, "range"), 3, 3)) == "0.50 (0.40 to 0.62)"
    assert amount(JCT, Effect(0.5, None, 1, 1)) == "0.50"
    assert amount(JCT, Effect(None, None, 0, 0)) == "-"


def test_a_verdict_that_holds_on_every_set_says_so() -> None:
    contrast = against_fixed(six_seeds(burst=10.0, tail=12.0))
    by_measure = {verdict.measure: verdict for verdict in verdicts(contrast)}
    assert by_measure["mean_jct_ratio"].verdict == "better"
    assert by_measure["mean_jct_ratio"].sentence.startswith("Mean JCT, pollux / fixed: 0.5")
    assert by_measure["mean_jct_ratio"].sentence.endswith("(12 pairs, better in 12): better, on every set.")
    assert by_measure["goodput_ratio"].verdict == "better"
    assert by_measure["rescales_difference"].verdict == "inconclusive"
    assert by_measure["rescales_difference"].sentence.startswith("Rescales, pollux - fixed: +0.0 [")
    inverse = compare(six_seeds(burst=10.0, tail=12.0), baselines=["pollux"]).contrasts[0]
    assert verdicts(inverse)[0].verdict == "worse"


def test_a_verdict_names_the_sets_that_differ_from_it() -> None:
    sentence = verdicts(against_fixed(six_seeds(burst=10.0, tail=20.0)))[0].sentence
    assert sentence.endswith("better; better on burst; inconclusive on tail: 1.00 [1.00, 1.00].")


def test_sets_with_few_pairs_have_no_verdict_of_their_own() -> None:
    runs = [run for run in six_seeds(burst=10.0, tail=12.0) if run.seed <= 3]
    sentence = verdicts(against_fixed(runs))[0].sentence
    assert sentence.endswith("(6 pairs, better in 6): better; too few pairs for a verdict on each set.")


def test_fewer_than_five_pairs_are_inconclusive_however_clear_they_look() -> None:
    runs = [run for run in six_seeds(burst=10.0) if run.seed <= 4]
    first = verdicts(against_fixed(runs))[0]
    assert first.verdict == "inconclusive"
    assert first.sentence.endswith("(4 pairs, better in 4): inconclusive, fewer than 5 pairs.")
    single = verdicts(against_fixed(runs[:2]))[0].sentence
    assert single == (
        "Mean JCT, pollux / fixed: 0.51 (1 pair, better in 1): inconclusive, fewer than 5 pairs."
    )


def test_pairs_without_the_measure_are_counted_openly() -> None:
    by_measure = {
        verdict.measure: verdict.sentence for verdict in verdicts(against_fixed(two_pairs_with_one_rho()))
    }
    assert "(1 pair, better in 1; 1 pair without the measure)" in by_measure["worst_rho_ratio"]


def test_step_time_has_no_verdict() -> None:
    found = verdicts(against_fixed(six_seeds(burst=10.0)))
    assert "step_time_ratio" not in {verdict.measure for verdict in found}


def test_one_sentence_sums_up_all_other_measures() -> None:
    on_jct, on_others = summary_sentences(against_fixed(six_seeds(burst=10.0)))
    assert on_jct.startswith("Mean JCT, pollux / fixed")
    assert on_others.startswith("pollux/fixed, other measures: better: p90 JCT, makespan, goodput")
    assert "inconclusive: Jain's index, rescales" in on_others
    assert on_others.endswith("not measured: mean JCT / step time.")
