"""A file is replaced as a whole or stays as it was."""

from pathlib import Path

import pytest

from common.atomic_write import write_atomically


def test_new_content_replaces_the_old_and_no_draft_stays(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content in (b"old", b"new"):
        write_atomically(file, content)
        assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", b"text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
