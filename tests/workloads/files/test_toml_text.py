"""TOML that the project writes reads back as it was."""

import math
import tomllib

import pytest

from workloads.files.toml_text import toml_text


def test_tables_and_arrays_of_tables_follow_the_plain_values():
    document = {"a": {"b c": {"x": 1}}, "job": [{"at_s": 0.5, "settings": {"rate": 1e-05}}], "name": "n"}
    assert toml_text(document) == (
        'name = "n"\n\n[a."b c"]\nx = 1\n\n[[job]]\nat_s = 0.5\nsettings = { rate = 1e-05 }\n'
    )
    assert tomllib.loads(toml_text(document)) == document


@pytest.mark.parametrize("value", [True, -3, 0.1, 1e300, math.inf, "", 'a "b" \\ é\n', {}])
def test_every_kind_of_value_reads_back(value: object):
    document = {"row": [{"key": value, "a.b": value}]}
    assert tomllib.loads(toml_text(document)) == document
