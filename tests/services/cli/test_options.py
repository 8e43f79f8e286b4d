"""What the command line's parsers refuse."""

import pytest


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
def test_an_empty_path_is_refused(coadapt, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = coadapt(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.endswith("'': allowed: a path")
    assert list(tmp_path.iterdir()) == []
