"""The files that `coadapt init` writes, and those of this repository."""

import re
from pathlib import Path

import msgspec
import pytest

from common.config import Config, load_config
from common.lifecycle import UserError
from services.launcher.project_files import PROCFILE_TEXT, config_text, create_project, field_docstrings
from workloads.applications import applications
from workloads.files.workload_file import read_workload

ROOT = Path(__file__).parents[3]
OUTDATED = "run `coadapt init` in an empty folder and copy this file from it"


@pytest.mark.parametrize(
    ("name", "text"),
    [("coadapt.toml", config_text()), ("Procfile", PROCFILE_TEXT)],
    ids=lambda value: value[:12],
)
def test_the_repository_has_the_files_that_init_writes(name: str, text: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == text, OUTDATED


def test_every_key_of_the_configuration_has_a_comment() -> None:
    for section in msgspec.structs.fields(Config):
        assert field_docstrings(section.type).keys() == set(section.type.__struct_fields__)


def test_the_configuration_has_all_defaults_and_no_long_lines(tmp_path: Path) -> None:
    (tmp_path / "coadapt.toml").write_text(config_text())
    assert load_config({}, tmp_path / "coadapt.toml") == Config()
    assert len(re.findall(r"^\w+ = ", config_text(), re.M)) == sum(
        map(len, msgspec.to_builtins(Config()).values())
    )
    assert max(map(len, config_text().splitlines())) <= 100


def test_a_project_has_a_workload_that_the_default_cluster_can_run(tmp_path: Path) -> None:
    files = create_project(tmp_path / "new" / "project")
    assert [file.name for file in files] == ["coadapt.toml", "Procfile", "workload.toml"]
    agents = PROCFILE_TEXT.count("services.job_agent")
    workload = read_workload(files[-1], applications(), agents * Config().agent.slots)
    assert 1 < len(workload.rows) < 4


@pytest.mark.parametrize("existing", [["Procfile"], ["coadapt.toml", "workload.toml"]])
def test_existing_files_are_named_and_nothing_is_written(tmp_path: Path, existing: list[str]) -> None:
    for name in existing:
        (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"already has {', '.join(existing)}; nothing was written"):
        create_project(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(existing)
    assert {file.read_text() for file in tmp_path.iterdir()} == {"mine"}


def test_a_dangling_link_counts_as_an_existing_file(tmp_path: Path) -> None:
    (tmp_path / "Procfile").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="already has Procfile"):
        create_project(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file: is a file; name a folder"):
        create_project(tmp_path / "file")
    with pytest.raises(UserError, match=r"file/folder: cannot be written: Not a directory"):
        create_project(tmp_path / "file" / "folder")
