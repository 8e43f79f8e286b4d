"""The command itself: arguments, errors, and a talk with a real scheduler that has no agents."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from common import __version__
from common.config import Config, EndpointsConfig, RunConfig, config_environment
from common.messaging.request_reply import RequestClient
from common.protocol import GetJobs, JobTable
from services.cli.main import main as cli
from services.launcher.stack import free_endpoints

COADAPT = [sys.executable, "-m", "services.cli.main"]
ROOT = Path(__file__).parents[3]
TWO_JOBS = """
[[job]]
application = "digits-cnn"
replicas = 2

[[job]]
application = "matfac"
at_s = 0.3
"""


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


@pytest.fixture
def coadapt(capsys, monkeypatch):
    """Runs the command in this process."""

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["coadapt", *arguments])
        with pytest.raises(SystemExit) as exited:
            cli()
        captured = capsys.readouterr()
        return Result(int(exited.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def endpoints():
    return free_endpoints(EndpointsConfig())


@pytest.fixture(scope="module")
def scheduler(endpoints, tmp_path_factory):
    """The environment of clients of a real scheduler."""
    folder = tmp_path_factory.mktemp("scheduler")
    run = RunConfig(logs_dir=str(folder / "logs"), run_id="test")
    config = Config(run=run, endpoints=endpoints)
    environment = {**os.environ, **config_environment(config)}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.scheduler"],
            env=environment,
            stdout=output,
            stderr=output,
            cwd=ROOT,
        )
    client = RequestClient(endpoints.scheduler_requests)
    try:
        while not isinstance(client.request(GetJobs(), timeout_s=2.0, attempts=2), JobTable):
            assert process.poll() is None
        yield config_environment(config)
    finally:
        client.close()
        process.terminate()
        process.wait(10)


@pytest.fixture
def environment(scheduler, monkeypatch):
    for name, value in scheduler.items():
        monkeypatch.setenv(name, value)


def complaint(result: Result) -> str:
    """The one line for people on standard error, after nothing on standard output."""
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("coadapt: ")
    assert line.isprintable()
    return line


# --------------------------------------------------------------------------- without a scheduler


def test_version_and_help_are_there(coadapt):
    version = coadapt("--version")
    assert (version.code, version.out) == (0, f"coadapt {__version__}\n")
    shown = coadapt("--help")
    assert coadapt().out == shown.out
    assert shown.code == 0
    for command in ("submit", "jobs", "cancel", "watch", "keys", "summarize", "run"):
        assert f"\n  {command} " in shown.out
        assert coadapt(command, "--help").code == 0


def test_help_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['coadapt', '--help']\n"
        "import atexit; atexit.register(lambda: print(*sorted(m.split('.')[0] for m in sys.modules)))\n"
        "from services.cli.main import main; main()"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = set(shown.stdout.splitlines()[-1].split())
    assert "typer" in loaded
    heavy = {"torch", "numpy", "scipy", "zmq", "rich", "msgspec", "polars", "honcho", "structlog", "psutil"}
    assert loaded & heavy == set()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fly"], "fly"),
        (["jobs", "--yaml"], "--yaml"),
        (["cancel"], "ID"),
        (["submit"], "either a FILE or --app is needed"),
        (["submit", "a.toml", "--app", "digits-cnn"], "not both"),
        (["submit", "a.toml", "--seed", "1"], "seed: only with --app"),
        (["submit", "missing.toml"], "missing.toml: cannot be read: No such file"),
        (
            ["submit", "--app", "digits"],
            "application 'digits': no such application; allowed: char-lm, digits-cnn",
        ),
        (["submit", "--app", "digits-cnn", "--id", "../x"], "id '../x': allowed: 1 to 64 of"),
        (["submit", "--app", "digits-cnn", "--id", "[b]\x1b[2J"], "id '[b]\\x1b[2J': allowed"),
        (["submit", "--app", "digits-cnn", "--id", "x" * 300], "allowed: 1 to 64"),
        (["submit", "--app", "digits-cnn", "--target", "nan"], "target nan: allowed: "),
        (["submit", "--app", "digits-cnn", "--target", "high"], "'high': allowed: numbers"),
        (["submit", "--app", "digits-cnn", "--replicas", "0"], "replicas 0: allowed: 1 to"),
        (["submit", "--app", "digits-cnn", "--set", "rate"], "--set 'rate': allowed: KEY=NUMBER"),
        (["submit", "--app", "digits-cnn", "--set", "rate=1"], "'rate': no such setting of digits-cnn"),
        (["submit", "--app", "digits-cnn", "--set", "learning_rate=inf"], "learning_rate inf: allowed"),
        (["run", "missing.toml"], "missing.toml: cannot be read"),
        (["submit", "--app", "digits-cnn", "--seed", "1.5"], "'1.5': allowed: whole numbers"),
        (["run", "missing.toml", "--timeout", "-1"], "'--timeout': '-1': allowed: seconds, 0 or more"),
        (["run", "missing.toml", "--timeout", "nan"], "'nan': allowed: seconds"),
        (["keys", "keys", "../x"], "NAME '../x': allowed: at most 64 letters"),
        (["keys", "keys", "server"], "NAME 'server': allowed"),
        (["keys", "/dev/null/keys"], "/dev/null/keys: cannot be written: Not a directory"),
    ],
)
def test_bad_arguments_are_refused_in_one_line_without_asking_anybody(
    coadapt, arguments, told, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = coadapt(*arguments)
    assert result.code == 2
    assert told in complaint(result)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[job]\n", "not valid TOML"),
        (
            "[[job]]\napplication = 'digits-cnn'\nslots = 3\n",
            "job 1: 'slots': no such key; allowed: application",
        ),
        ("", "no [[job]] in it"),
    ],
)
def test_bad_files_are_refused_by_submit_and_run_alike(coadapt, text, told, tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    for command in ("submit", "run"):
        result = coadapt(command, str(file))
        assert result.code == 2
        assert told in complaint(result)


def test_a_bad_configuration_is_refused_in_one_line(coadapt, monkeypatch):
    monkeypatch.setenv("COADAPT_SCHEDULER_ROUND_S", "soon")
    result = coadapt("jobs")
    assert result.code == 2
    assert "COADAPT_SCHEDULER_ROUND_S='soon'" in complaint(result)


def test_a_module_of_the_users_that_cannot_be_imported_is_refused(coadapt, monkeypatch):
    monkeypatch.setenv("COADAPT_APPLICATIONS_MODULES", "no.such.module")
    result = coadapt("submit", "--app", "matfac")
    assert result.code == 2
    assert "'no.such.module': cannot be imported" in complaint(result)


def test_an_unknown_policy_is_refused_before_a_stack_is_made(coadapt, tmp_path, monkeypatch):
    file = tmp_path / "two.toml"
    file.write_text(TWO_JOBS)
    monkeypatch.chdir(tmp_path)
    result = coadapt("run", str(file), "--policy", "best")
    assert result.code == 2
    assert "policy 'best': not one of fixed, dynamic" in complaint(result)
    result = coadapt("run", str(file), "--policy", "optimus")
    assert result.code == 2
    assert "only a simulator knows" in complaint(result)
    assert list(tmp_path.iterdir()) == [file]


def test_a_scheduler_with_a_policy_for_simulators_ends_with_one_line_and_code_2(tmp_path):
    environment = {**os.environ, "COADAPT_POLICY": "optimus", "COADAPT_LOGS_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "services.scheduler"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "policy 'optimus'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_keys_are_made_once_and_the_command_says_who_needs_which(coadapt, tmp_path):
    from common.messaging.curve_keys import load_keys

    folder = tmp_path / "keys"
    made = coadapt("keys", str(folder), "alice", "bob")
    assert made.code == 0
    files = [f"{name}.{kind}" for name in ("server", "alice", "bob") for kind in ("key", "key_secret")]
    assert made.out.splitlines()[:6] == [str(folder / file) for file in files]
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    assert "endpoints.keys_dir" in made.out
    assert "scheduler, metrics-collector, event-logger: server.key, server.key_secret" in made.out
    keys = load_keys(str(folder))
    assert keys is not None
    assert len(keys.allowed) == 2
    again = coadapt("keys", str(folder), "alice")
    assert "all of these keys are there already" in again.out
    assert load_keys(str(folder)) == keys
    assert coadapt("keys", str(tmp_path / "other")).code == 0
    assert (tmp_path / "other" / "client.key_secret").exists()


def test_a_summary_of_what_is_not_there_exits_2(coadapt, tmp_path):
    result = coadapt("summarize", str(tmp_path / "missing"))
    assert (result.code, result.out) == (2, "")
    assert "missing: no such file" in result.err


def test_a_reader_that_has_gone_is_no_error_of_ours():
    process = subprocess.run(
        f"{sys.executable} -m services.cli.main --help | true",
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr == ""


def test_a_full_disk_under_the_output_is_told_in_one_line():
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "services.cli.main", "--version"]
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (process.returncode, process.stderr) == (1, "coadapt: cannot write: No space left on device\n")


# --------------------------------------------------------------------------- with a real scheduler


@pytest.mark.usefixtures("environment")
def test_a_submitted_job_is_listed_and_can_be_cancelled_once(coadapt):
    submitted = coadapt(
        "submit", "--app", "digits-cnn", "--id", "one", "--replicas", "2", "--set", "learning_rate=0.5"
    )
    assert (submitted.code, submitted.out) == (0, "one: submitted\n")
    heading, *lines = coadapt("jobs").out.splitlines()
    assert heading.split()[:3] == ["JOB", "APPLICATION", "STATE"]
    assert [line.split()[:3] for line in lines if line.startswith("one ")] == [
        ["one", "digits-cnn", "pending"]
    ]
    table = json.loads(coadapt("jobs", "--json").out)
    assert table["run_id"] == "test"
    assert [row["state"] for row in table["jobs"] if row["id"] == "one"] == ["pending"]
    assert coadapt("cancel", "one").code == 0
    again = coadapt("cancel", "one")
    assert again.code == 2
    assert "one" in complaint(again)
    assert "never-there" in complaint(coadapt("cancel", "never-there"))


@pytest.mark.usefixtures("environment")
def test_the_same_job_again_is_accepted_and_another_of_its_id_refused(coadapt):
    assert coadapt("submit", "--app", "matfac", "--id", "twice").out == "twice: submitted\n"
    assert coadapt("submit", "--app", "matfac", "--id", "twice").out == "twice: already accepted\n"
    other = coadapt("submit", "--app", "matfac", "--id", "twice", "--seed", "1")
    assert other.code == 2
    assert "twice" in complaint(other)


@pytest.mark.usefixtures("environment")
def test_jobs_without_an_id_are_different_jobs(coadapt):
    ids = {coadapt("submit", "--app", "matfac").out for _ in range(3)}
    assert len(ids) == 3
    assert all(line.startswith("matfac-") for line in ids)


@pytest.mark.usefixtures("environment")
def test_the_jobs_of_a_file_arrive_in_their_time_and_none_when_a_row_is_bad(coadapt, tmp_path):
    file = tmp_path / "two.toml"
    file.write_text(TWO_JOBS + "target = 99.0")
    assert "job 2: target 99.0" in complaint(coadapt("submit", str(file)))
    assert "digits-cnn-1" not in coadapt("jobs").out
    file.write_text(TWO_JOBS)
    start_s = time.monotonic()
    assert coadapt("submit", str(file)).out == "digits-cnn-1: submitted\nmatfac-2: submitted\n"
    assert time.monotonic() - start_s >= 0.3


@pytest.mark.usefixtures("environment")
def test_waiting_for_a_job_that_is_cancelled_exits_1(coadapt, scheduler):
    command = [*COADAPT, "submit", "--app", "matfac", "--id", "waited", "--wait"]
    environment = {**os.environ, **scheduler}
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waited: submitted\n"
        assert coadapt("cancel", "waited").code == 0
        out, err = waiting.communicate(timeout=10)
    assert waiting.returncode == 1
    assert "waited  cancelled" in out
    assert err.startswith("coadapt: waited: cancelled")


@pytest.mark.usefixtures("environment")
def test_watch_once_prints_the_state_as_plain_lines(coadapt):
    coadapt("submit", "--app", "matfac", "--id", "watched")
    shown = coadapt("watch", "--once")
    assert shown.code == 0
    assert "slots in use: no nodes" in shown.out.splitlines()[0]
    assert any(line.startswith("watched ") for line in shown.out.splitlines())


@pytest.mark.parametrize("arguments", [["watch"], ["submit", "--app", "matfac", "--wait"]])
def test_ctrl_c_ends_a_client_with_130_and_without_a_word(scheduler, arguments):
    with subprocess.Popen(
        [*COADAPT, *arguments],
        env={**os.environ, **scheduler},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline()
        client.send_signal(signal.SIGINT)
        _, err = client.communicate(timeout=5)
    assert client.returncode == 130
    assert err == ""


@pytest.mark.usefixtures("environment")
def test_a_spec_that_no_client_of_ours_would_send_is_refused_by_the_scheduler_too(scheduler, endpoints):
    from common.protocol import Refused, SubmitJob
    from workloads.applications import applications
    from workloads.files.workload_file import single_job

    good = single_job({"application": "matfac"}, "direct", applications()).rows[0].spec
    client = RequestClient(endpoints.scheduler_requests)
    for changes in (
        {"id": "a/b"},
        {"id": "x" * 300},
        {"application": "[b]"},
        {"target": float("nan")},
        {"replicas": -1},
    ):
        reply = client.request(SubmitJob(spec=msgspec.structs.replace(good, **changes)))
        assert isinstance(reply, Refused)
        assert "allowed" in reply.reason
    client.close()
