"""Several files are written all or none."""

from pathlib import Path

import pytest

from workloads.files.file_writer import write_files
from workloads.files.workload_file import WorkloadError


def test_files_and_their_folders_are_created(tmp_path: Path) -> None:
    texts = {tmp_path / "new" / "a.toml": "a", tmp_path / "b.toml": "b"}
    assert write_files(texts, overwrite=False) == list(texts)
    assert {path: path.read_text() for path in texts} == texts
    assert {path.name for path in tmp_path.iterdir()} == {"new", "b.toml"}


def test_a_file_that_has_the_text_already_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("a")
    assert write_files({path: "a"}, overwrite=False) == []


def test_nothing_is_written_when_one_file_exists_with_other_contents(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    second.write_text("mine")
    with pytest.raises(WorkloadError, match=r"b\.toml: exists with other contents; --overwrite replaces it"):
        write_files({first: "a", second: "b"}, overwrite=False)
    assert not first.exists()
    assert second.read_text() == "mine"
    assert write_files({first: "a", second: "b"}, overwrite=True) == [first, second]
    assert second.read_text() == "b"


def test_a_dangling_link_counts_as_an_existing_file(tmp_path: Path) -> None:
    link = tmp_path / "a.toml"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(WorkloadError, match="exists with other contents"):
        write_files({link: "a"}, overwrite=False)
