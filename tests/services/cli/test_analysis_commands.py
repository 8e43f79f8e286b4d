"""Summarize and export: what they refuse. What they print is tested with the analysis."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["missing", "--to", "xml", "--out", "tables"], "'--to': 'xml': allowed: parquet, csv"),
        (["missing", "--to", "csv"], "--out"),
        (["missing", "--to", "csv", "--out", "tables"], "missing: no run in it"),
        ([".", "--to", "csv", "--out", "tables"], "no run in it"),
    ],
)
def test_export_refuses_a_bad_format_and_a_missing_run(refused, arguments, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error in refused("export", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_summary_of_a_missing_folder_exits_2(coadapt, tmp_path):
    result = coadapt("summarize", tmp_path / "missing")
    assert (result.code, result.out) == (2, "")
    assert "missing: no such file" in result.err
