"""`coadapt init` as users call it."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FILES = ["Procfile", "coadapt.toml", "workload.toml"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("arguments", "folder"), [([], "."), (["new/project"], "new/project")])
def test_init_writes_the_files_and_prints_the_next_commands(
    coadapt: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    folder: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, errors = coadapt("init", *arguments)
    assert (code, errors) == (0, "")
    assert names_in(tmp_path / folder) == FILES
    lines = output.splitlines()
    assert sorted(lines[:3]) == [str(Path(folder, name)) for name in FILES]
    commands = [line.split("#")[0].strip() for line in lines if "  #" in line]
    assert commands == ["honcho start", "coadapt submit workload.toml --wait", "coadapt summarize logs/"]


def test_a_second_init_is_refused_in_one_line_and_changes_nothing(
    coadapt: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "Procfile").write_text("mine")
    code, output, errors = coadapt("init", tmp_path)
    assert (code, output) == (2, "")
    assert errors.startswith(f"coadapt: {tmp_path}: already has Procfile; nothing was written: ")
    assert errors.count("\n") == 1
    assert names_in(tmp_path) == ["Procfile"]


def test_a_disk_that_becomes_full_leaves_no_part_of_a_project(tmp_path: Path) -> None:
    def allow_small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", "init", str(tmp_path)],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=allow_small_files_only,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == f"coadapt: {tmp_path}/coadapt.toml: cannot be written: File too large\n"
    assert names_in(tmp_path) == []
