import json
from itertools import count

import pytest

from services.bench.measure import (
    Progress,
    in_turns,
    machine,
    quantile,
    ratio_of_pairs,
    report,
    summary,
    table,
)


def test_a_quantile_lies_between_the_two_nearest_values():
    values = [float(number) for number in range(101, 0, -1)]
    assert quantile(values, 0.5) == 51.0
    assert quantile(values, 0.99) == 100.0
    assert quantile([1.0, 2.0], 0.25) == 1.25
    assert quantile([3.0], 0.99) == 3.0


def test_a_summary_has_the_middle_and_the_ends():
    assert summary([4.0, 1.0, 2.0]) == {
        "n": 3,
        "p50": 2.0,
        "p99": pytest.approx(3.96),
        "least": 1.0,
        "most": 4.0,
    }
    assert summary([1.0], "_s") == {"n": 1, "p50_s": 1.0, "p99_s": 1.0, "least_s": 1.0, "most_s": 1.0}


def test_a_ratio_of_pairs_is_not_moved_by_a_machine_that_becomes_slower():
    of = ratio_of_pairs([8.0, 4.0, 2.0], [10.0, 5.0, 2.5])
    assert (of["p50"], of["least"], of["most"]) == (0.8, 0.8, 0.8)
    with pytest.raises(ValueError, match="longer"):
        ratio_of_pairs([1.0], [1.0, 2.0])


def test_turns_alternate_and_every_second_one_goes_backwards():
    calls: list[str] = []
    ticks = count()

    def measurement(name: str):
        def measure() -> float:
            calls.append(name)
            return float(next(ticks))

        return measure

    done: list[int] = []
    values = in_turns(3, measurement("a"), measurement("b"), done=lambda: done.append(len(calls)))
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert values == [[0.0, 3.0, 4.0], [1.0, 2.0, 5.0]]
    assert done == [1, 2, 3, 4, 5, 6]


def test_progress_tells_the_seconds_left_on_stderr(capsys):
    clock = iter([0.0, 10.0, 30.0])
    progress = Progress("name", 2, lambda: next(clock))
    progress.step("first")
    progress.step("second")
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        "name: 0/2  starts",
        "name: 1/2  10 s left  first",
        "name: 2/2  0 s left  second",
    ]


def test_a_table_has_its_numbers_to_the_right():
    assert table(["name", "ms"], [["a", "10"], ["long", "7"]]) == "name  ms\na     10\nlong   7"


def test_a_report_is_the_text_or_one_json_object_and_says_what_machine_it_was(capsys):
    report({"p50_s": 0.5}, "half a second", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["p50_s"] == 0.5
    assert found["machine"].keys() == machine().keys()
    report({"p50_s": 0.5}, "half a second", as_json=False)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "half a second"
    assert last.startswith(f"{machine()['cores']} cores, load ")
