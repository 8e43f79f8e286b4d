"""The wheel in an empty folder, without the checkout and without the network: what a new user does first."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest

from common.config import Config, EndpointsConfig, config_environment
from common.messaging.request_reply import RequestClient, ServerUnavailable
from common.protocol import GetJobs
from services.launcher.stack import free_endpoints
from tests.fixtures.command import clean_environment
from tests.test_architecture import PACKAGES, TREES, imports

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0
FILES = [
    *(f"{name}/**/*.py" for name in PACKAGES),
    *("workloads/sets/*.toml", "workloads/experiments/*.toml", "workloads/profiles/**/*.*"),
]

pytestmark = pytest.mark.timeout(180)


def dependencies() -> set[str]:
    """Names of the distributions that `pip install coadapt` installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {re.split(r"[^\w.-]", text)[0] for text in project["dependencies"]}


class Installation:
    """A fresh environment with the wheel, which finds its dependencies where this Python has them."""

    def __init__(self, folder: Path) -> None:
        source, wheels, self.environment_dir = folder / "source", folder / "wheels", folder / "environment"
        source.mkdir()
        for name in PACKAGES:
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        offline = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
        pip = [sys.executable, "-m", "pip"]
        build = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", wheels, source]
        subprocess.run(build, check=True, timeout=WAIT_S)
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", self.environment_dir], check=True, timeout=WAIT_S
        )
        (wheel,) = wheels.iterdir()
        install = [*pip, "--python", self.bin / "python", "install", *offline, wheel]
        subprocess.run(install, check=True, timeout=WAIT_S)
        (self.site_packages,) = self.environment_dir.glob("lib/python*/site-packages")
        shared = {str(Path(distribution(name).locate_file("")).resolve()) for name in dependencies()}
        (self.site_packages / "dependencies.pth").write_text("\n".join(sorted(shared)) + "\n")

    @property
    def bin(self) -> Path:
        return self.environment_dir / "bin"


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(tmp_path_factory.mktemp("wheel"))


class Shell:
    """A terminal in an empty folder, with the fresh environment activated."""

    def __init__(self, installation: Installation, folder: Path) -> None:
        self.folder = folder / "empty"
        self.folder.mkdir()
        self._output = folder / "honcho.log"
        self._bin = installation.bin
        others = clean_environment()
        del others["PYTHONPATH"]
        self.config = Config(endpoints=free_endpoints(EndpointsConfig()))
        endpoints = config_environment(self.config)
        self.environment = {
            **others,
            **{name: value for name, value in endpoints.items() if name.startswith("COADAPT_ENDPOINTS_")},
            "COADAPT_AGENT_SLOT_SPEED": "0.25",
            "PATH": f"{self._bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }

    def run(self, *arguments: str) -> str:
        """The output of `coadapt ARGUMENTS`, which has to succeed."""
        done = subprocess.run(
            [self._bin / "coadapt", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    @contextmanager
    def honcho(self) -> Iterator[None]:
        """`honcho start`, with a scheduler that replies; at the end of the block Ctrl-C stops it."""
        with (
            self._output.open("wb") as output,
            subprocess.Popen(
                [self._bin / "python", "-m", "honcho", "start"],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            ) as honcho,
        ):
            try:
                self._wait_for_scheduler()
                yield
                os.killpg(honcho.pid, signal.SIGINT)
                assert honcho.wait(10) == 130
            finally:
                if honcho.poll() is None:
                    os.killpg(honcho.pid, signal.SIGKILL)

    def _wait_for_scheduler(self) -> None:
        client = RequestClient(self.config.endpoints.scheduler_requests)
        try:
            client.request(GetJobs(), timeout_s=0.5, attempts=60)
        except ServerUnavailable as error:
            raise AssertionError(self._output.read_text()) from error
        finally:
            client.close()


@pytest.fixture
def shell(installation: Installation, tmp_path: Path) -> Shell:
    return Shell(installation, tmp_path)


def test_the_packages_come_from_the_wheel_with_all_their_modules_and_data(
    installation: Installation, shell: Shell
) -> None:
    code = f"import {', '.join(PACKAGES)}; print(*(m.__path__[0] for m in ({', '.join(PACKAGES)})))"
    found = subprocess.run(
        [installation.bin / "python", "-c", code],
        cwd=shell.folder,
        env=shell.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {Path(path).parent for path in found.stdout.split()} == {installation.site_packages}
    for pattern in FILES:
        names = {path.relative_to(ROOT) for path in ROOT.glob(pattern)}
        assert names
        assert {name for name in names if not (installation.site_packages / name).is_file()} == set()
    assert not (installation.site_packages / "tests").exists()


def test_a_new_user_trains_the_first_jobs_in_an_empty_folder(shell: Shell) -> None:
    assert "honcho start" in shell.run("init")
    with shell.honcho():
        shell.run("submit", "workload.toml", "--wait")
        assert shell.run("jobs").count("completed") == 2
    summary = shell.run("summarize", "logs/")
    assert "2 submitted, 2 completed, 2 verified" in summary
    assert "audit: clean" in summary
    run = shell.run("run", "workload.toml", "--policy", "dynamic")
    assert "2 submitted, 2 completed, 2 verified" in run
    assert "audit: clean" in run


def test_what_comes_with_the_package_is_found_from_any_folder(shell: Shell) -> None:
    """Workload sets and experiments by their names, and the profiles that the simulator uses."""
    shown = shell.run(
        "simulate", "--world", "calibrated", "--policy", "dynamic", "--workload", "tail-tuned", "--markdown"
    )
    assert "dynamic" in shown
    assert "steady-pollux-1" in shell.run("experiment", "cpu", "--dry-run")


def test_every_imported_library_is_a_declared_dependency() -> None:
    names = {name.split(".")[0] for tree in TREES.values() for name in imports(tree, typing_too=True)}
    external = names - set(PACKAGES) - set(sys.stdlib_module_names)
    homes = packages_distributions()
    assert {name for name in external if not {home.lower() for home in homes[name]} & dependencies()} == set()
