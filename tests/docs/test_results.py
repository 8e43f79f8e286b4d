"""The numbers on the results page and in the README are those of the published files."""

import json
import re

import pytest

from tests.fixtures.doc_pages import README, ROOT, text_of

PUBLISHED = ROOT / "analysis" / "results"
PAGE = text_of(ROOT / "docs" / "results.md")
SETS = ("burst-tuned", "diurnal-tuned", "steady-tuned", "tail-tuned")
COMPARISON = json.loads((PUBLISHED / "comparison.json").read_text(encoding="utf-8"))
POLICIES = ("fixed", "dynamic", "throughput", "pollux", "coadapt")


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of the table whose first line starts with `heading`, by their first cell."""
    table = PAGE.split(f"\n{heading}")[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]
    return {first: rest for first, *rest in cells}


def shown(found: dict[str, float]) -> str:
    return f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


RATIOS = rows("| ratio of mean JCT |")


def test_every_pair_of_policies_is_on_the_page() -> None:
    pairs = {f"{a}/{b}" for n, b in enumerate(POLICIES) for a in POLICIES[n + 1 :]}
    assert pairs <= set(RATIOS)


@pytest.mark.parametrize("pair", [pair for pair in RATIOS if pair in COMPARISON["mean_jct_ratio"]])
def test_a_ratio_is_the_published_one(pair: str) -> None:
    by_set = [COMPARISON["by_set"][name]["mean_jct_ratio"][pair]["ratio"] for name in SETS]
    assert RATIOS[pair] == [
        shown(COMPARISON["mean_jct_ratio"][pair]),
        shown(COMPARISON["mean_jct_at_equal_steps_ratio"][pair]),
        *(f"{ratio:.2f}" for ratio in by_set),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_means_of_a_policy_are_the_published_ones(policy: str) -> None:
    means = COMPARISON["policies"][policy]
    (cells,) = (
        cells for name, cells in rows("| policy | mean JCT s | p90").items() if name.startswith(policy)
    )
    assert cells[0] == f"{means['mean_jct']:.1f}"
    assert cells[3] == f"{means['goodput']:.0f}"
    assert cells[4] == f"{means['worst_rho']:.2f}"


@pytest.mark.parametrize(
    ("row", "file"),
    [("**21:15**", "fidelity.json"), ("21:15, at the step times of each run", "fidelity-own-steps.json")],
)
def test_the_errors_of_the_simulator_are_the_published_ones(row: str, file: str) -> None:
    errors = json.loads((PUBLISHED / file).read_text(encoding="utf-8"))["mean_jct_error"]
    assert rows("| experiment | fixed |")[row] == [f"{errors[policy]:+.1%}" for policy in POLICIES]


def test_the_readme_shows_ratios_of_the_results_page() -> None:
    shown_ratios = re.findall(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]", text_of(README))
    assert shown_ratios
    assert all(ratio in PAGE for ratio in shown_ratios)
