import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from analysis.summarize import main
from common.eventlog import encode_line
from common.protocol import JobCancelled, JobFailed, JobSubmitted, RunEnded, TrainingSample
from tests.fixtures.logs import (
    RUN_ID,
    Happening,
    add,
    changed,
    good_run,
    only,
    save,
    spec,
    swap,
    without,
    written,
)

ROOT = Path(__file__).resolve().parents[2]
GOOD_BYTES = b"".join(encode_line(record) for record in written(good_run()))


def as_json(capfdbinary, *places: object) -> tuple[int, list[dict]]:
    code = main(["--json", *map(str, places)])
    return code, json.loads(capfdbinary.readouterr().out)


def test_a_clean_run_is_shown_with_a_line_a_job(tmp_path, capsys):
    save(written(good_run()), tmp_path / RUN_ID)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"run {RUN_ID}" in out
    assert "policy pollux, workload demo.toml, seed 7" in out
    assert "audit: clean (38 events, 0 missing)" in out
    (line,) = [line for line in out.splitlines() if line.split()[:1] == ["a"]]
    assert line.split()[:9] == ["a", "digits-cnn", "14.0", "2.0", "1.60", "27", "1", "0.9600", "0.9500"]
    assert line.split()[-1] == "verified"


def test_json_lists_all_runs(tmp_path, capfdbinary):
    save(written(good_run()), tmp_path / "first")
    save(written(good_run(), run_id="other"), tmp_path / "second")
    code, runs = as_json(capfdbinary, tmp_path)
    assert code == 0
    assert [run["run_id"] for run in runs] == [RUN_ID, "other"]
    assert runs[0]["jct_s"] == {"mean": 14.0, "p50": 14.0, "p90": 14.0, "p99": 14.0}


@pytest.mark.parametrize("place", ["", "run", "run/events.jsonl"])
def test_logs_a_run_and_a_file_are_all_taken(tmp_path, capfdbinary, place):
    save(written(good_run()), tmp_path / "run")
    code, runs = as_json(capfdbinary, tmp_path / place)
    assert (code, len(runs)) == (0, 1)


def test_a_run_that_is_named_twice_is_shown_once(tmp_path, capfdbinary):
    path = save(written(good_run()), tmp_path / "run")
    assert len(as_json(capfdbinary, path, tmp_path / "run")[1]) == 1


def test_a_finding_makes_exit_1(tmp_path, capsys):
    second = only(good_run(), TrainingSample, "a", 2)
    happenings = swap(good_run(), second, replace(second, progress=49.0))
    save(written(happenings), tmp_path / "run")
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "audit: NOT CLEAN" in out
    assert "job a: progress goes back from 50 to 49" in out


@pytest.mark.parametrize("place", ["missing", "empty", "with\0nul"])
def test_bad_input_makes_exit_2_and_one_line(tmp_path, capsys, place):
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / place)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1


BAD_LOGS = {
    "empty": (b"", ":1:"),
    "truncated": (GOOD_BYTES[:-10], ":38:"),
    "foreign": (b'{"level": "info"}\n', ":1:"),
    "not JSON": (GOOD_BYTES + b"\x00\xff\n", ":39:"),
    "without lines": (b"\x80" * 5000, ":1:"),
    "of another schema": (GOOD_BYTES.replace(b'"schema":2', b'"schema":99', 1), ":1:"),
    "of unknown events": (GOOD_BYTES.replace(b'"RunStarted"', b'"RunBegan"', 1), ":1:"),
}


@pytest.mark.parametrize("kind", BAD_LOGS)
def test_a_bad_log_is_reported_with_its_line_and_the_others_are_shown(tmp_path, capfdbinary, kind):
    content, place = BAD_LOGS[kind]
    save(written(good_run()), tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "events.jsonl").write_bytes(content)
    code, (bad, good) = as_json(capfdbinary, tmp_path)
    assert code == 1
    assert good["audit"]["ok"]
    assert not bad["audit"]["ok"]
    assert f"events.jsonl{place}" in bad["audit"]["findings"][0]
    assert main([str(tmp_path)]) == 1
    assert f"events.jsonl{place}".encode() in capfdbinary.readouterr().out


def test_a_bad_line_hides_no_later_event(tmp_path, capfdbinary):
    lines = GOOD_BYTES.splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_bytes(b"".join([*lines[:12], b"oops\n", *lines[12:]]))
    code, (run,) = as_json(capfdbinary, tmp_path)
    assert code == 1
    assert [finding.split(": ")[0] for finding in run["audit"]["findings"]] == [f"{tmp_path}/events.jsonl:13"]
    assert (run["audit"]["events"], run["jobs"]["verified"]) == (38, 1)


def test_an_unknown_option_makes_exit_2_and_one_line(capsys):
    assert main(["--yaml"]) == 2
    assert capsys.readouterr().err == "summarize: No such option: --yaml\n"


def test_a_log_that_is_a_folder_or_is_missing_is_reported(tmp_path, capfdbinary):
    (tmp_path / "folder" / "events.jsonl").mkdir(parents=True)
    (tmp_path / "lost" / "outbox").mkdir(parents=True)
    code, (folder, lost) = as_json(capfdbinary, tmp_path)
    assert code == 1
    assert "Is a directory" in folder["audit"]["findings"][0]
    assert (lost["run_id"], lost["audit"]["ok"]) == ("lost", False)


def test_a_folder_whose_name_is_no_text_is_reported(tmp_path):
    folder = os.fsencode(tmp_path) + b"/r\xffn"
    os.mkdir(folder)
    with open(folder + b"/events.jsonl", "wb"):
        pass
    for options in ([], ["--json"]):
        shown = subprocess.run(
            [sys.executable, str(ROOT / "analysis" / "summarize.py"), str(tmp_path), *options],
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (shown.returncode, shown.stderr) == (1, b"")
        assert b"dcff" in shown.stdout


def test_a_truncated_run_is_summary_of_as_far_as_it_goes(tmp_path, capfdbinary):
    path = save(written(good_run()), tmp_path / "run")
    path.write_bytes(GOOD_BYTES[:-10])
    _, (run,) = as_json(capfdbinary, tmp_path)
    assert run["jobs"]["completed"] == 1
    assert run["audit"]["events"] == 37


def test_names_and_reasons_are_not_read_as_markup_or_control(tmp_path, capsys):
    job_id = "[red]x[/red]\x1b[31m\n:smile:"
    happenings = [
        Happening("scheduler", 1.0, JobSubmitted(spec=spec(job_id))),
        Happening("scheduler", 2.0, changed(job_id, "pending", "failed")),
        Happening("scheduler", 2.0, JobFailed(job_id=job_id, reason="[bold]no[/bold] [/] \x07\r\n end")),
    ]
    save(written(happenings), tmp_path / "run")
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert r"[red]x[/red]\x1b[31m\x0a:smile:" in out
    assert r"failed: [bold]no[/bold] [/] \x07\x0d\x0a end" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("forced", [{}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}])
def test_the_script_runs_from_anywhere_and_is_plain_in_a_pipe(tmp_path, forced):
    save(written(good_run()), tmp_path / "logs" / "run")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | forced
    script = [sys.executable, str(ROOT / "analysis" / "summarize.py"), "logs/"]
    shown = subprocess.run(
        script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stderr == ""
    assert "\x1b" not in shown.stdout
    assert "verified" in shown.stdout
    asked = subprocess.run(
        [*script, "--json"], cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=True
    )
    assert json.loads(asked.stdout)[0]["run_id"] == RUN_ID


def test_a_terminal_gets_styles(tmp_path):
    save(written(good_run()), tmp_path / "logs" / "run")
    reader, writer = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "analysis" / "summarize.py"), "logs"],
        cwd=tmp_path,
        env=environment | {"TERM": "xterm-256color"},
        stdout=writer,
    )
    os.close(writer)
    out = b""
    try:
        while piece := os.read(reader, 65536):
            out += piece
    except OSError:  # Linux says so when the last writer has gone
        pass
    os.close(reader)
    assert process.wait(timeout=60) == 0
    assert b"\x1b[" in out


def test_a_reader_that_goes_away_causes_no_traceback(tmp_path):
    for n in range(40):
        save(written(good_run()), tmp_path / "logs" / f"run{n}")
    for options in ([], ["--json"]):
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "analysis" / "summarize.py"), "logs", *options],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate(timeout=60)
        assert err == b""


def test_an_unfinished_run_is_clean_and_says_where_its_jobs_are(tmp_path, capsys):
    happenings = [happening for happening in good_run() if happening.t_s < 121.9]
    save(written(happenings), tmp_path / "run")
    assert main([str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "running"] in [[words[0], words[-1]] for words in lines if words]


def test_a_job_under_way_when_the_stack_was_stopped_is_shown_as_stopped(tmp_path, capsys):
    """A run that is resumed shows the state of the job."""
    happenings = without(good_run(), only(good_run(), JobCancelled, "b"))
    happenings = swap(happenings, changed("b", "running", "cancelled"), changed("b", "running", "pending"))
    happenings = swap(happenings, RunEnded(reason="stopped"), RunEnded(reason="stopped", active=("b",)))
    resumed = add(happenings, "scheduler", 128.0, happenings[0].event)
    for each, end in ((happenings, "stopped"), (resumed, "pending")):
        save(written(each), tmp_path / "run")
        main([str(tmp_path)])
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["b", end] in [[words[0], words[-1]] for words in lines if words]


def test_numbers_that_no_arithmetic_holds_are_reported(tmp_path, capfdbinary):
    first = only(good_run(), TrainingSample, "a", 0)
    happenings = swap(good_run(), first, replace(first, replicas=10**400))
    save(written(happenings), tmp_path / "run")
    code, (run,) = as_json(capfdbinary, tmp_path)
    assert code == 1
    assert not run["audit"]["ok"]


def test_not_a_number_in_a_log_is_null_in_the_summary(tmp_path, capfdbinary):
    happenings = good_run()
    for n in range(3):
        event = only(happenings, TrainingSample, "a", n)
        happenings = swap(happenings, event, replace(event, gain=float("nan"), loss=float("inf")))
    happenings = without(happenings, only(happenings, TrainingSample, "b"))
    save(written(happenings), tmp_path / "run")
    _, (run,) = as_json(capfdbinary, tmp_path)
    assert run["efficiency_mean"] is None


damage = st.lists(
    st.tuples(st.integers(0, len(GOOD_BYTES) - 1), st.binary(min_size=0, max_size=3)), max_size=4
)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(end=st.one_of(st.just(len(GOOD_BYTES)), st.integers(0, len(GOOD_BYTES))), changes=damage)
def test_no_damage_causes_a_traceback(tmp_path, capfdbinary, end, changes):
    content = bytearray(GOOD_BYTES)
    for at, piece in changes:
        content[at : at + len(piece)] = piece
    content = content[:end]
    (tmp_path / "events.jsonl").write_bytes(content)
    code, (run,) = as_json(capfdbinary, tmp_path)
    assert code == (0 if run["audit"]["ok"] else 1)
    assert run["audit"]["ok"] == (run["audit"]["findings"] == [])
    assert main([str(tmp_path)]) == code
    capfdbinary.readouterr()


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(numbers=st.data())
def test_no_wild_number_causes_a_traceback(tmp_path, capfdbinary, numbers):
    """Well-formed lines, but any number in them replaced by another one."""
    lines = GOOD_BYTES.splitlines()
    for _ in range(3):
        at = numbers.draw(st.integers(0, len(lines) - 1))
        tree = json.loads(lines[at])
        parts = [tree, tree["event"], *(v for v in tree["event"].values() if isinstance(v, dict))]
        places = [
            (part, key)
            for part in parts
            for key, value in part.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "schema"
        ]
        part, key = numbers.draw(st.sampled_from(places))
        part[key] = numbers.draw(
            st.one_of(
                st.sampled_from([0, -1, 10**30, 10**400, 1e308, -1e308, 1e-308]),
                st.integers(),
                st.floats(allow_nan=False, allow_infinity=False),
            )
        )
        lines[at] = json.dumps(tree).encode()
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    code, _ = as_json(capfdbinary, tmp_path)
    assert code in (0, 1)
    assert main([str(tmp_path)]) == code
    capfdbinary.readouterr()
