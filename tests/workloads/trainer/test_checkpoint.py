import contextlib
import ctypes
import errno
import io
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.fixtures import tiny_app
from tests.fixtures.replica_fleet import TIMEOUT_S, context, tiny_spec
from workloads.trainer import checkpoint
from workloads.trainer.checkpoint import (
    UNFINISHED,
    CheckpointError,
    StateLock,
    load_newest,
    read,
    save,
    saved_in,
)
from workloads.trainer.training_state import TrainingState

PAYLOAD = bytes(range(256)) * 40
KILLS = 50
WEIGHTS_BYTES = 400_000
CLONE_NEWNS, CLONE_NEWUSER, MS_RDONLY, MS_REMOUNT = 0x20000, 0x10000000, 1, 32


class Loader:
    """Records what `load_newest` loaded and which checkpoints it could not use."""

    def __init__(self) -> None:
        self.loaded: bytes | None = None
        self.fallbacks: list[tuple[str, str, str]] = []

    def say(self, path: str, fallback: str, reason: str) -> None:
        self.fallbacks.append((path, fallback, reason))

    def load(self, data: bytes) -> None:
        if data == b"of another job":
            raise CheckpointError("does not fit")
        self.loaded = data

    def newest(self, folder: Path, named: str = "") -> Path | None:
        return load_newest(folder, named, self.load, self.say)


def test_a_saved_checkpoint_is_read_back(tmp_path: Path) -> None:
    saved = save(tmp_path, 12, PAYLOAD)
    assert read(saved.path) == PAYLOAD
    assert saved.size_bytes == saved.path.stat().st_size > len(PAYLOAD)
    assert saved.digest.encode() in saved.path.read_bytes()


def test_the_two_newest_are_kept_and_nothing_else(tmp_path: Path) -> None:
    paths = [save(tmp_path, steps, PAYLOAD).path for steps in (9, 10, 100, 1000)]
    assert saved_in(tmp_path) == [paths[3], paths[2]]
    assert {p.name for p in tmp_path.iterdir()} == {paths[3].name, paths[2].name, "saving.lock"}


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "gone"])
def test_a_damaged_checkpoint_is_skipped_and_reported(tmp_path: Path, damage: str) -> None:
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


def test_a_damaged_checkpoint_does_not_count_among_the_two_kept(tmp_path: Path) -> None:
    good = save(tmp_path, 1, b"good").path
    save(tmp_path, 5, PAYLOAD).path.write_bytes(b"")
    Loader().newest(tmp_path)
    newest = save(tmp_path, 3, PAYLOAD).path
    assert saved_in(tmp_path) == [newest, good]


def test_without_a_usable_checkpoint_nothing_is_loaded_and_all_are_reported(tmp_path: Path) -> None:
    for steps in (1, 2):
        save(tmp_path, steps, b"of another job")
    loader = Loader()
    assert loader.newest(tmp_path) is None
    assert loader.loaded is None
    assert [fallback for _, fallback, _ in loader.fallbacks][-1] == ""
    assert len(loader.fallbacks) == 2


def test_a_newer_checkpoint_than_the_named_one_is_used(tmp_path: Path) -> None:
    promised, newer = save(tmp_path, 1, b"promised").path, save(tmp_path, 2, b"newer").path
    loader = Loader()
    assert loader.newest(tmp_path, named=str(promised)) == newer
    assert not loader.fallbacks


def test_a_full_disk_leaves_the_previous_checkpoint_intact(tmp_path: Path) -> None:
    def fill() -> None:
        mount(tmp_path, "size=64k")
        former = save(tmp_path, 1, PAYLOAD).path
        with pytest.raises(OSError, match="No space left") as caught:
            save(tmp_path, 2, PAYLOAD * 10)
        assert caught.value.errno == errno.ENOSPC
        assert saved_in(tmp_path) == [former]
        assert read(former) == PAYLOAD
        # What could not be written takes no room either.
        assert not (tmp_path / UNFINISHED).exists()
        checkpoint.note_progress(tmp_path, 1.0)
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "filler").write_bytes(bytes(100_000))
        checkpoint.note_progress(tmp_path, 2.0)
        assert checkpoint.noted_progress(tmp_path) == 2.0
        (tmp_path / "filler").unlink()
        assert read(save(tmp_path, 3, PAYLOAD).path) == PAYLOAD

    in_a_process_of_its_own(fill)


def test_a_folder_that_became_read_only_still_has_what_was_saved(tmp_path: Path) -> None:
    def protect() -> None:
        mount(tmp_path, "size=64k")
        former, newest = save(tmp_path, 1, b"good").path, save(tmp_path, 2, PAYLOAD).path
        newest.write_bytes(b"damaged")
        mount(tmp_path, "", MS_REMOUNT | MS_RDONLY)
        with pytest.raises(OSError, match="Read-only file system"):
            save(tmp_path, 3, PAYLOAD)
        checkpoint.note_progress(tmp_path, 1.0)
        loader = Loader()
        assert loader.newest(tmp_path) == former
        assert [path for path, _, _ in loader.fallbacks] == [str(newest)]

    in_a_process_of_its_own(protect)


def in_a_process_of_its_own(body: Callable[[], None]) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        except PermissionError as error:
            os.write(writing, str(error).encode())
            os._exit(2)
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as answer:
        text = answer.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 2:
        pytest.skip(f"no file system can be mounted here: {text}")
    assert code == 0, text


def mount(folder: Path, options: str, flags: int = 0) -> None:
    """A small file system in memory that only this process sees; as root of a name space of its own, where
    it is not root otherwise."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> bool:
        return getattr(libc, name)(*arguments) == 0

    alone = flags & MS_REMOUNT or call("unshare", CLONE_NEWNS) or call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    source, kind = b"tmpfs", b"tmpfs"
    if not alone or not call("mount", source, os.fsencode(folder), kind, flags, options.encode()):
        raise PermissionError(os.strerror(ctypes.get_errno()))


@pytest.mark.parametrize("moment", range(12))
def test_a_process_killed_while_saving_leaves_a_usable_checkpoint(tmp_path: Path, moment: int) -> None:
    """Kill the process in its n-th call to the file system."""
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
    calls = 0

    def on_event(event: str, arguments: object) -> None:
        nonlocal calls
        if event in ("open", "os.rename", "os.remove", "fcntl.flock", "os.listdir", "os.scandir"):
            calls += 1
            if calls > moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)


def test_a_kill_at_any_moment_of_a_save_loses_nothing_saved_before(tmp_path: Path) -> None:
    """A process that saves all the time is killed again and again, at random moments."""
    ours, theirs = context.Pipe()
    # All of them are forked from one that has torch imported and runs no threads.
    killer = context.Process(target=_kill_savers, args=(theirs, tmp_path), daemon=True)
    killer.start()
    theirs.close()
    unfinished = 0
    for _ in range(KILLS):
        assert ours.poll(TIMEOUT_S)
        end = ours.recv()
        assert end.fallbacks == []
        # It may have been killed between a save and its word of it.
        assert end.loaded in (end.said, end.said + 1)
        assert end.whole
        unfinished += end.unfinished
    assert unfinished >= KILLS // 10, "hardly any was killed in a save"
    killer.join(TIMEOUT_S)
    save(tmp_path, 10**6, PAYLOAD)
    assert not (tmp_path / UNFINISHED).exists()
    assert len(saved_in(tmp_path)) == 2


class End(NamedTuple):
    """What a killed process has left on disk."""

    said: int
    """The last step that it reported as saved."""
    loaded: int
    whole: bool
    """Whether the weights are those of that step."""
    fallbacks: list[tuple[str, str, str]]
    unfinished: bool


def _kill_savers(pipe: Connection, folder: Path) -> None:
    torch.set_num_threads(1)
    draw = random.Random(3)
    task = tiny_app.build(3, {})
    weights = torch.nn.Parameter(torch.zeros(WEIGHTS_BYTES // 8).double())
    task.model.register_parameter("weights", weights)
    state = TrainingState(tiny_spec(), tiny_app.SPEC, task)
    said = 0
    start_s = time.monotonic()
    save(folder, 0, state.to_bytes())
    save_s = time.monotonic() - start_s
    for _ in range(KILLS):
        reading, writing = os.pipe()
        pid = os.fork()
        while pid == 0:
            state.steps += 1
            weights.data.fill_(state.steps)
            save(folder, state.steps, state.to_bytes())
            os.write(writing, state.steps.to_bytes(8))
        os.close(writing)
        time.sleep(draw.uniform(0.0, 2.0) * save_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with open(reading, "rb") as file:
            said = max(said, int.from_bytes(file.read()[-8:]))
        unfinished = (folder / UNFINISHED).exists()
        loader = Loader()
        assert load_newest(folder, "", state.load_bytes, loader.say)
        whole = bool((weights == state.steps).all())
        pipe.send(End(said, state.steps, whole, loader.fallbacks, unfinished))
        said = state.steps


class Malicious:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("how", ["pickle", "torch", "in the state"])
def test_loading_runs_no_code(tmp_path: Path, how: str) -> None:
    """Even if its digest is correct."""
    state = TrainingState(tiny_spec(), tiny_app.SPEC, tiny_app.build(3, {}))
    good = save(tmp_path, 1, state.to_bytes()).path
    trace = tmp_path / "code has run"
    code = Malicious(trace)
    buffer = io.BytesIO()
    match how:
        case "pickle":
            pickle.dump(code, buffer, protocol=2)
        case "torch":
            torch.save(code, buffer)
        case "in the state":
            content = torch.load(io.BytesIO(state.to_bytes()), weights_only=True)
            torch.save(content | {"optimizer": code}, buffer)
    save(tmp_path, 2, buffer.getvalue())
    loader = Loader()
    found = load_newest(tmp_path, "", state.load_bytes, loader.say)
    assert found == good
    assert not trace.exists()
    [(_, _, reason)] = loader.fallbacks
    assert reason.startswith("does not fit this job: UnpicklingError")
    # The attack is one: without the guard it works.
    with contextlib.suppress(RuntimeError):
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert trace.exists()


@pytest.mark.parametrize("changes", [{"job": {"id": "other"}}, {"optimizer": None}, {"sampler": [1]}])
def test_a_state_of_another_job_is_skipped(tmp_path: Path, changes: dict[str, Any]) -> None:
    state = TrainingState(tiny_spec(), tiny_app.SPEC, tiny_app.build(3, {}))
    good = save(tmp_path, 1, state.to_bytes()).path
    buffer = io.BytesIO()
    torch.save(torch.load(io.BytesIO(state.to_bytes()), weights_only=True) | changes, buffer)
    save(tmp_path, 2, buffer.getvalue())
    loader = Loader()
    assert load_newest(tmp_path, "", state.load_bytes, loader.say) == good
    assert len(loader.fallbacks) == 1


def test_a_missing_folder_is_an_error_of_saving_and_nothing_to_resume_from(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(OSError, match="No such file"):
        save(gone, 1, PAYLOAD)
    checkpoint.note_progress(gone, 1.0)
    loader = Loader()
    assert loader.newest(gone) is None
    assert loader.newest(gone, named=str(gone / "checkpoint-0000000007")) is None
    assert [(fallback, reason) for _, fallback, reason in loader.fallbacks] == [
        ("", "cannot be read: No such file or directory")
    ]


def test_state_is_not_read_from_disk_while_a_replica_has_it_in_memory(tmp_path: Path) -> None:
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


def test_recorded_progress_is_known_to_those_who_resume_from_less(tmp_path: Path) -> None:
    assert checkpoint.noted_progress(tmp_path) == 0.0
    for progress in (12345.678901234567, 13.5, 1e-300, 2.0 / 3.0, 1e12):
        checkpoint.note_progress(tmp_path, progress)
        assert checkpoint.noted_progress(tmp_path) == progress
