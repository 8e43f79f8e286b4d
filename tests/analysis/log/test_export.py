from pathlib import Path

import msgspec
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from analysis.log.export import FORMATS, export
from analysis.log.frames import read
from common.lifecycle import UserError
from common.protocol import JobSubmitted
from tests.fixtures.logs import Happening, add, good_run, save, spec, written


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    own = spec("c", settings={"learning_rate": 0.5})
    happenings: list[Happening] = add(good_run(), "scheduler", 126.9, JobSubmitted(spec=own))
    return save(written(happenings), tmp_path / "run").parent


def test_every_frame_comes_back_from_parquet_as_it_was(run_dir: Path, tmp_path: Path) -> None:
    paths = export(run_dir, "parquet", tmp_path / "out")
    frames = read(run_dir).by_name()
    assert {path.stem for path in paths} == set(frames)
    for path in paths:
        found = pl.read_parquet(path)
        assert_frame_equal(found, frames[path.stem], categorical_as_str=True)


def test_csv_has_the_same_values_and_json_for_lists(run_dir: Path, tmp_path: Path) -> None:
    paths = {path.stem: path for path in export(run_dir, "csv", tmp_path / "out")}
    frames = read(run_dir).by_name()
    assert {name: len(pl.read_csv(path)) for name, path in paths.items()} == {
        name: len(frame) for name, frame in frames.items()
    }
    samples = pl.read_csv(paths["samples"])
    assert samples["progress"].to_list() == frames["samples"]["progress"].to_list()
    settings = pl.read_csv(paths["jobs"]).row(-1, named=True)["settings"]
    assert msgspec.json.decode(settings) == [{"name": "learning_rate", "value": 0.5}]
    nodes = pl.read_csv(paths["generations"])["allocation_nodes"].to_list()
    assert [msgspec.json.decode(text) for text in nodes] == [["n0"], ["n0", "n1"], ["n0"]]


@pytest.mark.parametrize("to", FORMATS)
def test_an_existing_file_is_not_replaced_and_nothing_is_written(
    run_dir: Path, tmp_path: Path, to: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / f"models.{to}").write_text("mine")
    with pytest.raises(UserError, match=rf"models\.{to} exists"):
        export(run_dir, to, out)
    assert [path.name for path in out.iterdir()] == [f"models.{to}"]
    assert (out / f"models.{to}").read_text() == "mine"


def test_an_unknown_format_is_refused_with_those_that_are_allowed(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="xlsx: unknown format; allowed: parquet or csv"):
        export(run_dir, "xlsx", tmp_path / "out")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run in it; needed: the folder of a run, with events\.jsonl"):
        export(tmp_path, "csv", tmp_path / "out")


def test_a_log_without_an_event_is_refused_with_its_fault(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"hello\n")
    with pytest.raises(UserError, match=r"events\.jsonl:1: not JSON.*nothing to export"):
        export(tmp_path, "csv", tmp_path / "out")


def test_a_place_that_cannot_be_written_is_refused(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*file: cannot be written: File exists"):
        export(run_dir, "csv", tmp_path / "file")
