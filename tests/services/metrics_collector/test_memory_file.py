"""The memory's file: it is complete or missing, and never stops a collector from starting."""

from pathlib import Path

import msgspec
import pytest

from services.metrics_collector.memory import Memory
from services.metrics_collector.memory_file import load_memory, save_memory
from tests.services.metrics_collector.test_memory import ALL, points


def some_memory() -> Memory:
    memory = Memory()
    memory.learn_points("app", "run/a", points(*ALL))
    memory.learn_need("app", "run/a", 0.9, 120.0)
    return memory


def test_a_saved_memory_is_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "memory.json"
    assert load_memory(path).record() == Memory().record()
    memory = some_memory()
    save_memory(path, memory)
    assert load_memory(path).record() == memory.record()
    assert [entry.name for entry in path.parent.iterdir()] == ["memory.json"], "no other file is left"


@pytest.mark.parametrize("damage", ["cut", "version", "negative", "foreign", "binary"])
def test_a_file_that_cannot_be_used_is_reported_and_moved_aside(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "memory.json"
    save_memory(path, some_memory())
    whole = path.read_bytes()
    record = msgspec.json.decode(whole)
    record["applications"]["app"]["points"][0]["times"]["run/a"][0] = -1.0
    broken = {
        "cut": whole[: len(whole) // 2],
        "version": whole.replace(b'"version": 1', b'"version": 99'),
        "negative": msgspec.json.encode(record),
        "foreign": b'{"answer": 42}',
        "binary": b"\xff\x00",
    }[damage]
    path.write_bytes(broken)
    assert load_memory(path).record() == Memory().record()
    assert (tmp_path / "broken-memory.json").read_bytes() == broken
    assert not path.exists()
    output = capsys.readouterr()
    assert "starts empty" in output.out + output.err


def test_several_broken_files_are_all_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(["broken-memory.json", "broken-2-memory.json", "broken-3-memory.json"]):
        (tmp_path / "memory.json").write_text(f"broken {number}")
        load_memory(tmp_path / "memory.json")
        output = capsys.readouterr()
        assert str(tmp_path / name) in output.out + output.err
        assert (tmp_path / name).read_text() == f"broken {number}"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_path_that_cannot_be_written_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file, not a folder")
    save_memory(tmp_path / "logs" / "memory.json", some_memory())
    output = capsys.readouterr()
    assert "was not written" in output.out + output.err
