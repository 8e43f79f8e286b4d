"""Job commands: what they refuse without a request, and a real scheduler that has no agents."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from common.config import Config, EndpointsConfig, RunConfig, config_environment
from common.messaging.request_reply import RequestClient
from common.protocol import GetJobs, JobTable
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


# --------------------------------------------------------------------------- without a scheduler


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["submit"], "give either a FILE or --app"),
        (["submit", "a.toml", "--app", "digits-cnn"], "not both"),
        (["submit", "a.toml", "--seed", "1"], "seed: allowed only with --app"),
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
        (["submit", "--app", "digits-cnn", "--seed", "1.5"], "'1.5': allowed: whole numbers"),
    ],
)
def test_bad_arguments_of_submit_are_one_line_and_exit_2(refused, arguments, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error in refused(*arguments)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[[job]\n", "not valid TOML"),
        (
            "[[job]]\napplication = 'digits-cnn'\nslots = 3\n",
            "job 1: 'slots': no such key; allowed: application",
        ),
        ("", "no [[job]] in it"),
    ],
)
@pytest.mark.parametrize("command", ["submit", "run"])
def test_submit_and_run_refuse_a_bad_workload_file_alike(refused, command, text, error, tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    assert error in refused(command, file)


def test_an_application_module_that_cannot_be_imported_is_refused(refused, monkeypatch):
    monkeypatch.setenv("COADAPT_APPLICATIONS_MODULES", "no.such.module")
    assert "'no.such.module': cannot be imported" in refused("submit", "--app", "matfac")


# --------------------------------------------------------------------------- with a real scheduler


@pytest.mark.usefixtures("environment")
def test_a_submitted_job_is_listed_and_can_be_cancelled_once(coadapt, the_error):
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
    assert "one" in the_error(again)
    assert "never-there" in the_error(coadapt("cancel", "never-there"))


@pytest.mark.usefixtures("environment")
def test_the_same_job_again_is_accepted_and_another_with_its_id_refused(coadapt, the_error):
    assert coadapt("submit", "--app", "matfac", "--id", "twice").out == "twice: submitted\n"
    assert coadapt("submit", "--app", "matfac", "--id", "twice").out == "twice: already accepted\n"
    other = coadapt("submit", "--app", "matfac", "--id", "twice", "--seed", "1")
    assert other.code == 2
    assert "twice" in the_error(other)


@pytest.mark.usefixtures("environment")
def test_jobs_without_an_id_are_different_jobs(coadapt):
    ids = {coadapt("submit", "--app", "matfac").out for _ in range(3)}
    assert len(ids) == 3
    assert all(line.startswith("matfac-") for line in ids)


@pytest.mark.usefixtures("environment")
def test_the_jobs_of_a_file_arrive_at_their_times_and_none_when_a_row_is_bad(coadapt, the_error, tmp_path):
    file = tmp_path / "two.toml"
    file.write_text(TWO_JOBS + "target = 99.0")
    assert "job 2: target 99.0" in the_error(coadapt("submit", str(file)))
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
def test_ctrl_c_ends_a_client_with_130_and_no_message(scheduler, arguments):
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
def test_the_scheduler_refuses_a_spec_that_no_client_would_send(scheduler, endpoints):
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
