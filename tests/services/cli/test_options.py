"""The parsers of options, and what the help says about them."""

import re

import pytest
import typer

from services.cli.options import integer, number, one_of, real, whole


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", ""],
        ["run", ""],
        ["keys", ""],
        ["summarize", ""],
        ["experiment", ""],
        ["compare", ""],
        ["compare", "logs", "--out", ""],
        ["compare", "logs", "--profiles="],
        ["fidelity", ""],
        ["fidelity", "logs", "--out", ""],
        ["sensitivity", "--world", "calibrated", "--out", ""],
        ["sensitivity", "--world", "osdi21", "--traces", ""],
        ["workload", "generate", "--set", "all", "--out", ""],
        ["calibrate", "--out", ""],
    ],
)
def test_an_empty_path_is_refused(refused, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(*arguments).endswith("'': allowed: a path")
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_accepted_up_to_both_bounds():
    assert [whole(1, 3)(text) for text in ("1", "3")] == [1, 3]
    assert [number(0.5, 2.0, "")(text) for text in ("0.5", "2")] == [0.5, 2.0]


@pytest.mark.parametrize(
    ("parse", "text", "error"),
    [
        (whole(1, 3), "4", "'4': allowed: whole numbers from 1 to 3"),
        (whole(1, 3), "1.5", "'1.5': allowed: whole numbers from 1 to 3"),
        (number(0.0, 1.0, "0 to 1"), "nan", "'nan': allowed: 0 to 1"),
        (one_of(("a", "b")), "c", "'c': allowed: a, b"),
        (integer, "1.5", "'1.5': allowed: whole numbers"),
        (real, "high", "'high': allowed: numbers"),
    ],
)
def test_a_parser_names_the_value_and_what_is_allowed(parse, text, error):
    with pytest.raises(typer.BadParameter, match=f"^{re.escape(error)}$"):
        parse(text)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("simulate", "Allowed: 0.01 to 1000000 seconds."),
        ("simulate", "Allowed: osdi21, calibrated, synthetic."),
        ("experiment", "Allowed: 1 to 1000."),
    ],
)
def test_help_says_what_an_option_allows(coadapt, command, text):
    assert text in " ".join(coadapt(command, "--help").out.split())
