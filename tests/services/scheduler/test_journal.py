"""The journal on disk: half-written and damaged entries, a full disk."""

import resource
import signal
from pathlib import Path

import msgspec
import pytest

from common.protocol import AgentSilent, CancelJob, RoundDue
from services.scheduler.journal import JOURNAL_FILE, JournalError, JournalWriter, read_journal

INPUTS = (RoundDue(trigger="interval"), CancelJob(job_id="a"), AgentSilent(node="n", incarnation="i"))


def write(run_dir: Path, *inputs, events: int = 0) -> None:
    writer = JournalWriter(run_dir)
    for now_s, given in enumerate(inputs):
        writer.append(float(now_s), given, events + now_s)
    writer.close()


def inputs(run_dir: Path) -> list[object]:
    return [entry.input for entry in read_journal(run_dir)]


def test_entries_come_back_as_they_were_written(tmp_path):
    write(tmp_path, *INPUTS, events=5)
    entries = list(read_journal(tmp_path))
    assert [entry.input for entry in entries] == list(INPUTS)
    assert [entry.now_s for entry in entries] == [0.0, 1.0, 2.0]
    assert [entry.events for entry in entries] == [5, 6, 7]


def test_a_half_written_last_entry_is_cut_off(tmp_path):
    path = tmp_path / JOURNAL_FILE
    write(tmp_path, *INPUTS)
    whole = path.read_bytes()
    write(tmp_path, RoundDue(trigger="arrival"))
    last = len(path.read_bytes()) - len(whole)
    entry = path.read_bytes()[len(whole) :]
    for kept in range(last):
        path.write_bytes(whole + entry[:kept])
        assert inputs(tmp_path) == list(INPUTS)
        write(tmp_path, RoundDue(trigger="finish"))
        assert inputs(tmp_path) == [*INPUTS, RoundDue(trigger="finish")]


@pytest.mark.parametrize(
    "foreign",
    [
        b"\xc1",
        b"\0" * 64,
        b"hello",
        b"\xa4\xff\xff\xff\xff",
        msgspec.msgpack.encode({"now_s": 1.0}),
        b"\x91" * 5000,
    ],
)
def test_the_error_names_the_damaged_entry(tmp_path, foreign):
    write(tmp_path, *INPUTS)
    path = tmp_path / JOURNAL_FILE
    with path.open("ab") as file:
        file.write(foreign)
    with pytest.raises(JournalError, match=r"journal\.msgpack: entry 4 is damaged: "):
        inputs(tmp_path)


def test_a_full_disk_raises_and_leaves_the_journal_unchanged(tmp_path):
    writer = JournalWriter(tmp_path)
    writer.append(0.0, INPUTS[0], 0)
    size_bytes = (tmp_path / JOURNAL_FILE).stat().st_size
    # A limit on file sizes behaves like a full disk: it stops a write half-way, and then all others.
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for spare_bytes in (5, 0):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes + spare_bytes, former[1]))
            with pytest.raises(JournalError, match=r"journal\.msgpack: cannot be written: "):
                writer.append(1.0, INPUTS[1], 0)
            assert (tmp_path / JOURNAL_FILE).stat().st_size == size_bytes
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, handler)
    writer.append(2.0, INPUTS[2], 0)
    writer.close()
    assert inputs(tmp_path) == [INPUTS[0], INPUTS[2]]


def test_two_schedulers_cannot_write_the_same_journal(tmp_path):
    first = JournalWriter(tmp_path)
    with pytest.raises(JournalError, match="another scheduler"):
        JournalWriter(tmp_path)
    first.close()
    JournalWriter(tmp_path).close()


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(JournalError, match="cannot be written: No such file"):
        JournalWriter(tmp_path / "gone")
