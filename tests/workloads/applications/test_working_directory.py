"""Modules of the working directory, in a process whose module path does not have it."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from workloads.applications.working_directory import working_directory_modules


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])


def test_a_module_and_a_package_of_the_working_directory_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "wd_module.py").write_text("import wd_sibling\nVALUE = wd_sibling.VALUE\n")
    (tmp_path / "wd_sibling.py").write_text("VALUE = 1\n")
    (tmp_path / "wd_package").mkdir()
    (tmp_path / "wd_package" / "__init__.py").write_text("")
    (tmp_path / "wd_package" / "inner.py").write_text("VALUE = 2\n")
    with working_directory_modules():
        assert import_module("wd_module").VALUE == 1
        assert import_module("wd_package.inner").VALUE == 2


def test_installed_modules_come_first(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("raise AssertionError\n")
    with working_directory_modules():
        assert Path(str(import_module("colorsys").__file__)).parent != tmp_path


def test_nothing_is_found_in_the_working_directory_after_the_block(tmp_path: Path) -> None:
    (tmp_path / "wd_late.py").write_text("")
    before = list(sys.meta_path)
    with working_directory_modules():
        pass
    assert sys.meta_path == before
    with pytest.raises(ModuleNotFoundError):
        import_module("wd_late")
