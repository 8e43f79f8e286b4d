"""The entry point: help, completion, and how errors become one line and an exit code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common import __version__
from services.cli.main import COMMANDS

ROOT = Path(__file__).parents[3]
COADAPT = [sys.executable, "-m", "services.cli.main"]
USER_APPLICATION = """
import msgspec
import user_model
from workloads.applications import matfac

SPEC = msgspec.structs.replace(matfac.SPEC, name=user_model.NAME)
build = matfac.build
"""


def test_version_and_help_are_printed(coadapt):
    assert coadapt("--version") == (0, f"coadapt {__version__}\n", "")
    shown = coadapt("--help")
    assert coadapt() == shown
    assert shown.code == 0


@pytest.mark.parametrize("command", [*(command.__name__ for command in COMMANDS), "workload", "bench"])
def test_every_command_is_listed_and_has_help(coadapt, command):
    assert f"\n  {command} " in coadapt("--help").out
    assert coadapt(command, "--help").code == 0


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_every_command_documents_its_exit_codes(command):
    assert re.search(r"\bExit (codes: )?[0-9]", command.__doc__)


def test_help_loads_no_library_but_typer():
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
    ("words", "completions"),
    [
        ("coadapt sim", ["simulate"]),
        ("coadapt bench ", ["resize", "overhead", "pacing", "scaling", "decision"]),
        ("coadapt simulate --world ", ["osdi21", "calibrated", "synthetic"]),
        ("coadapt export run --to p", ["parquet"]),
    ],
)
def test_bash_completes_commands_and_allowed_values(words, completions):
    asked = {
        "_COADAPT_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    shown = subprocess.run(COADAPT, env=os.environ | asked, cwd=ROOT, capture_output=True, text=True)
    assert (shown.stdout.split(), shown.stderr) == (completions, "")


def test_completion_can_be_installed_for_the_shell_that_runs_the_command(tmp_path):
    command = f"{' '.join(COADAPT)} --install-completion; exit $?"
    done = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"HOME": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "bash completion installed" in done.stdout
    assert ".bash_completions/coadapt.sh" in (tmp_path / ".bashrc").read_text()
    script = (tmp_path / ".bash_completions" / "coadapt.sh").read_text()
    assert "_COADAPT_COMPLETE=complete_bash" in script


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["fly"], "command 'fly': allowed: init, run, submit"),
        (["bench", "fly"], "command 'fly': allowed: resize, overhead, pacing, scaling, decision"),
        (["jobs", "--yaml"], "--yaml"),
        (["cancel"], "ID"),
    ],
)
def test_a_command_line_that_cannot_be_parsed_is_one_line_and_exit_2(
    refused, arguments, error, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert error in refused(*arguments)


def test_a_bad_configuration_is_one_line_and_exit_2(refused, monkeypatch):
    monkeypatch.setenv("COADAPT_SCHEDULER_ROUND_S", "soon")
    assert "COADAPT_SCHEDULER_ROUND_S='soon'" in refused("jobs")


def test_a_reader_that_has_closed_the_pipe_causes_no_error_message():
    process = subprocess.run(
        f"{sys.executable} -m services.cli.main --help | true",
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr == ""


def test_a_full_disk_under_the_output_is_one_line_and_exit_1():
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [*COADAPT, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert (process.returncode, process.stderr) == (1, "coadapt: cannot write: No space left on device\n")


@pytest.mark.parametrize("python_path", [["-P"], []], ids=["installed command", "python -m"])
def test_application_modules_next_to_the_configuration_are_found(tmp_path, python_path):
    """`python -P` leaves the working directory out of the module path, as a console script does."""
    (tmp_path / "user_app.py").write_text(USER_APPLICATION)
    (tmp_path / "user_model.py").write_text("NAME = 'mine'\n")
    (tmp_path / "coadapt.toml").write_text("[applications]\nmodules = ['user_app']\n")
    (tmp_path / "set.toml").write_text("[[job]]\napplication = 'mine'\nreplicas = 0\n")
    checked = subprocess.run(
        [sys.executable, *python_path, "-m", "services.cli.main", "submit", "set.toml"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert checked.stderr.startswith("coadapt: set.toml: job 1: replicas 0: ")
