"""The problems of a simulated run, in sentences."""

from msgspec import structs

from services.simulator.run_case import simulate
from tests.fixtures.simulation_cases import synthetic_case


def test_every_kind_of_problem_is_one_line_and_a_good_run_has_none() -> None:
    good = simulate(synthetic_case("fixed", jobs=1))
    assert good.problems == []
    bad = structs.replace(
        good,
        failed={"a": "budget spent"},
        refused={"b": "too large", "c": "too small"},
        undecided="1 of 9 rounds without a decision",
        stalled="given up",
    )
    assert bad.problems == [
        "a failed: budget spent",
        "b refused: too large",
        "c refused: too small",
        "1 of 9 rounds without a decision",
        "given up",
    ]
