from analysis.fidelity.agreement import compare_pairs
from analysis.report.fidelity_report import markdown
from tests.fixtures.fidelity_pairs import pair


def test_the_heading_counts_agreement_and_inconclusive_sets():
    found = compare_pairs(
        [
            *(pair("steady", "fixed", seed, [20.0 + seed], [21.0]) for seed in (1, 2)),
            *(pair("steady", "pollux", seed, [10.0], [11.0]) for seed in (1, 2)),
            *(pair("burst", "fixed", seed, [10.0], [12.0]) for seed in (1, 2)),
            *(pair("burst", "pollux", seed, [seed * 8.0], [11.0]) for seed in (1, 2)),
        ]
    )
    text = markdown(found)
    assert "## Winners: the same policy on 1 of 2 sets; on 1 more, reality is inconclusive" in text
    assert "| pollux was 13.1% behind, in 1 of 2 seeds; inconclusive |" in text
    assert "| fixed 2.149 (2.100 to 2.200): inconclusive |" in text


def test_a_difference_with_enough_seeds_on_one_side_is_conclusive():
    seeds = range(1, 6)
    found = compare_pairs(
        [
            *(pair("burst", "fixed", seed, [10.0 + seed], [12.0]) for seed in seeds),
            *(pair("burst", "pollux", seed, [14.0 + 1.1 * seed], [11.0]) for seed in seeds),
        ]
    )
    text = markdown(found)
    assert "in 5 of 5 seeds |" in text
    assert "]: conclusive |" in text


def test_one_seed_shows_a_margin_without_bounds():
    found = compare_pairs([pair("s", "fixed", 1, [9.0], [9.0]), pair("s", "pollux", 1, [10.0], [10.0])])
    assert "| pollux 1.111: inconclusive |" in markdown(found)


def test_a_note_follows_the_introduction():
    found = compare_pairs([pair("s", "fixed", 1, [9.0], [9.0])])
    assert "Each run counts the same. Steps are scaled.\n" in markdown(found, "Steps are scaled.")
