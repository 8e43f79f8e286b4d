"""Progress at several batch sizes: the summary in memory, and one short measurement with real processes."""

from pathlib import Path
from typing import Any

import pytest

from services.bench.scaling import measure, plan, summarize, text
from workloads.applications import applications
from workloads.trainer.standalone.train_alone import TrainingCase, TrainingOutcome, train
from workloads.trainer.training_state import MAX_BAD_STEPS

TINY = ("tests.fixtures.tiny_app",)


def case(**changes: Any) -> TrainingCase:
    return TrainingCase("digits-cnn", 0, 1, "adascale", 48_000)._replace(**changes)


def outcome(progress: float, ended: str = "target", **changes: Any) -> TrainingOutcome:
    given = case(**changes)
    return TrainingOutcome(given, ended, progress, round(progress * 16 * given.multiple / 2), 10, 0.9, 1.0)


AT_M0 = [outcome(400.0), outcome(380.0, seed=1), outcome(460.0, seed=2)]


def row(result: dict[str, Any], rule: str, multiple: int) -> dict[str, Any]:
    [found] = [r for r in result["rows"] if (r["rule"], r["multiple"]) == (rule, multiple)]
    return found


def test_medians_are_compared_with_those_at_the_initial_batch_size() -> None:
    result = summarize([*AT_M0, outcome(440.0, multiple=4)])
    found = row(result, "adascale", 4)
    assert (found["progress"], found["progress_ratio"], found["examples_ratio"]) == (440.0, 1.1, 4.4)
    assert found["within_tolerance"]
    assert result["within_tolerance"]
    assert "largest batch size: holds" in text(result)


def test_progress_that_depends_on_the_batch_is_judged_only_up_to_the_largest_batch() -> None:
    assert not summarize([*AT_M0, outcome(500.0, multiple=8)])["within_tolerance"]
    beyond = summarize([*AT_M0, outcome(420.0, multiple=8), outcome(500.0, multiple=16)])
    assert beyond["within_tolerance"]
    assert not row(beyond, "adascale", 16)["in_bounds"]
    assert "256*" in text(beyond)


def test_other_rules_are_shown_but_not_judged() -> None:
    result = summarize([*AT_M0, outcome(1000.0, multiple=4, rule="linear")])
    assert row(result, "linear", 4)["progress_ratio"] == 2.5
    assert result["within_tolerance"] is None
    assert "AdaScale keeps" not in text(result)


def test_a_run_that_missed_its_target_counts_as_longer_than_all_that_reached_it() -> None:
    two_of_three = [
        outcome(300.0, "budget", multiple=4),
        outcome(410.0, multiple=4, seed=1),
        outcome(430.0, multiple=4, seed=2),
    ]
    result = summarize([*AT_M0, *two_of_three])
    assert row(result, "adascale", 4)["progress"] == 430.0
    assert "1 of 3 missed the target in 48000 examples" in text(result)
    worse = summarize([*AT_M0, *two_of_three[:2], outcome(3.0, "diverged", multiple=4, seed=2)])
    assert row(worse, "adascale", 4)["progress"] is None
    assert not worse["within_tolerance"]
    assert "1 diverged; 2 of 3 missed the target in 48000 examples" in text(worse)


def test_the_initial_batch_size_is_trained_once_for_all_rules() -> None:
    cases = plan(["matfac", "char-lm"], [0, 1], [4, 8], ["adascale", "none"])
    assert len(cases) == 2 * 2 * (1 + 2 * 2)
    assert len({*cases}) == len(cases)
    budget = applications()["matfac"].max_progress * 256
    assert {c.budget_examples for c in cases if c.application == "matfac"} == {budget}


def test_a_run_ends_at_its_target_or_when_its_examples_are_used_up() -> None:
    tiny = TrainingCase("tiny", 0, 2, "adascale", 4800, target=1.0, modules=TINY)
    reached = train(tiny)
    assert (reached.ended, reached.metric <= 1.0) == ("target", True)
    assert reached.examples < 4800
    short = train(tiny._replace(target=0.0))
    assert short.ended == "budget"
    assert 4800 <= short.examples < 4800 + 48
    assert short.progress <= 200.0


@pytest.mark.parametrize(("rule", "worth"), [("linear", 5.0), ("none", 1.0)])
def test_rules_count_steps_as_they_assume(rule: str, worth: float) -> None:
    run = train(TrainingCase("tiny", 0, 5, rule, 2 * 250, target=0.0, modules=TINY))
    # Of 250 examples an epoch has two steps of 120, and one of 10 that is smaller than M0.
    assert (run.steps, run.progress) == (6, 4 * worth + 2)


def test_a_run_whose_gradient_stays_not_finite_has_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "diverging_app.py").write_text(
        "import msgspec\n"
        "from tests.fixtures import tiny_app\n"
        "SPEC = msgspec.structs.replace(tiny_app.SPEC, name='diverging')\n"
        "def build(seed, settings):\n"
        "    return tiny_app.build(seed, {'nan_at': 5.0})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = train(TrainingCase("diverging", 0, 1, "adascale", 10_000, target=0.0, modules=("diverging_app",)))
    assert (run.ended, run.steps) == ("diverged", 4 + MAX_BAD_STEPS)


@pytest.mark.timeout(180)
def test_progress_to_the_target_does_not_depend_on_the_batch_size() -> None:
    """matfac, to a quarter of its progress, at M0 and at its largest batch size."""
    result = measure(["matfac"], [0], [16], ["adascale"], targets={"matfac": 1.2})
    largest = row(result, "adascale", 16)
    assert largest["batch"] == applications()["matfac"].max_batch_size
    assert largest["progress_ratio"] == pytest.approx(1.0, abs=0.2)
