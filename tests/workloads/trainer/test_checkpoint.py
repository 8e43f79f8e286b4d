import errno
import os
import signal
from pathlib import Path

import pytest

from workloads.trainer import checkpoint
from workloads.trainer.checkpoint import CheckpointError, StateLock, load_newest, read, save, saved_in

PAYLOAD = bytes(range(256)) * 40


class Loader:
    """What `load_newest` loaded, and what it had to say."""

    def __init__(self) -> None:
        self.loaded: bytes | None = None
        self.fallbacks: list[tuple[str, str, str]] = []

    def load(self, data: bytes) -> None:
        if data == b"of another job":
            raise CheckpointError("does not fit")
        self.loaded = data

    def newest(self, folder: Path, named: str = "") -> Path | None:
        return load_newest(folder, named, self.load, lambda *said: self.fallbacks.append(said))


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    saved = save(tmp_path, 12, PAYLOAD)
    assert read(saved.path) == PAYLOAD
    assert saved.size_bytes == saved.path.stat().st_size > len(PAYLOAD)
    assert saved.digest.encode() in saved.path.read_bytes()


def test_the_two_newest_are_kept_and_nothing_else(tmp_path: Path) -> None:
    paths = [save(tmp_path, steps, PAYLOAD).path for steps in (9, 10, 100, 1000)]
    assert saved_in(tmp_path) == [paths[3], paths[2]]
    assert {p.name for p in tmp_path.iterdir()} == {paths[3].name, paths[2].name, "saving.lock"}


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "gone"])
def test_a_damaged_checkpoint_is_passed_over_aloud(tmp_path: Path, damage: str) -> None:
    good, bad = save(tmp_path, 1, b"good").path, save(tmp_path, 2, PAYLOAD).path
    data = bad.read_bytes()
    match damage:
        case "truncated":
            bad.write_bytes(data[: len(data) // 2])
        case "flipped":
            bad.write_bytes(data[:-50] + bytes([data[-50] ^ 1]) + data[-49:])
        case "empty":
            bad.write_bytes(b"")
        case "foreign":
            bad.write_bytes(b"of another job")
        case "gone":
            bad.unlink()
    loader = Loader()
    assert loader.newest(tmp_path, named=str(bad)) == good
    assert loader.loaded == b"good"
    [(path, fallback, reason)] = loader.fallbacks
    assert (path, fallback) == (str(bad), str(good))
    assert reason
    assert saved_in(tmp_path) == [good]


def test_a_bad_one_is_not_counted_among_the_two_that_are_kept(tmp_path: Path) -> None:
    good = save(tmp_path, 1, b"good").path
    save(tmp_path, 5, PAYLOAD).path.write_bytes(b"")
    Loader().newest(tmp_path)
    newest = save(tmp_path, 3, PAYLOAD).path
    assert saved_in(tmp_path) == [newest, good]


def test_when_none_is_good_that_is_said_and_nothing_is_loaded(tmp_path: Path) -> None:
    for steps in (1, 2):
        save(tmp_path, steps, b"of another job")
    loader = Loader()
    assert loader.newest(tmp_path) is None
    assert loader.loaded is None
    assert [fallback for _, fallback, _ in loader.fallbacks][-1] == ""
    assert len(loader.fallbacks) == 2


def test_a_newer_one_than_the_one_promised_is_used(tmp_path: Path) -> None:
    promised, newer = save(tmp_path, 1, b"promised").path, save(tmp_path, 2, b"newer").path
    loader = Loader()
    assert loader.newest(tmp_path, named=str(promised)) == newer
    assert not loader.fallbacks


def test_a_full_disk_leaves_the_former_one_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former = save(tmp_path, 1, b"former").path

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, PAYLOAD)
    assert saved_in(tmp_path) == [former]
    assert not list(tmp_path.glob("saving-*"))


@pytest.mark.parametrize("moment", range(12))
def test_killed_in_a_save_there_is_still_a_good_one(tmp_path: Path, moment: int) -> None:
    """The process is killed in its n-th call to the file system."""
    save(tmp_path, 1, b"former")
    pid = os.fork()
    if pid == 0:
        _kill_at(moment)
        save(tmp_path, 2, PAYLOAD)
        os._exit(0)
    os.waitpid(pid, 0)
    loader = Loader()
    assert loader.newest(tmp_path) is not None
    assert loader.loaded in (b"former", PAYLOAD)
    assert not loader.fallbacks
    assert read(save(tmp_path, 3, PAYLOAD).path) == PAYLOAD


def _kill_at(moment: int) -> None:
    import sys

    calls = 0

    def on_event(event: str, arguments: object) -> None:
        nonlocal calls
        if event in ("open", "os.rename", "os.remove", "fcntl.flock", "os.listdir", "os.scandir"):
            calls += 1
            if calls > moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)


def test_state_is_not_read_from_disk_while_somebody_has_it_in_memory(tmp_path: Path) -> None:
    one, other, reader = (StateLock(tmp_path) for _ in range(3))
    assert one.try_share()
    assert other.try_share()
    assert not reader.try_alone()
    one.release()
    assert not reader.try_alone()
    other.release()
    assert reader.try_alone()
    assert not one.try_share()
    assert reader.try_share()
    assert one.try_share()


def test_a_killed_process_does_not_keep_others_from_the_disk(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        StateLock(tmp_path).try_share()
        os.write(writing, b"x")
        signal.pause()
    os.read(reading, 1)
    lock = StateLock(tmp_path)
    assert not lock.try_alone()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert lock.try_alone()


def test_progress_is_noted_for_those_who_resume_from_less(tmp_path: Path) -> None:
    assert checkpoint.noted_progress(tmp_path) == 0.0
    checkpoint.note_progress(tmp_path, 12.25)
    checkpoint.note_progress(tmp_path, 13.5)
    assert checkpoint.noted_progress(tmp_path) == 13.5
