"""What the README shows works."""

import re
from pathlib import Path
from typing import Any

import pytest

from common.config import load_config
from services.scheduler.decisions import check_decision
from services.scheduler.policies.registry import policy_names
from tests.fixtures.policy_views import random_view
from workloads.applications import applications
from workloads.files.workload_file import read_workload

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def block(language: str, starts_with: str) -> str:
    found = [code for code in re.findall(rf"```{language}\n(.*?)```", README, re.S) if starts_with in code]
    assert len(found) == 1
    return str(found[0])


@pytest.mark.parametrize("seed", range(20))
def test_the_policy_of_the_readme_gives_valid_decisions(seed: int) -> None:
    names: dict[str, Any] = {}
    exec(block("python", "class SmallestFirst"), names)
    view = random_view(seed)
    assert check_decision(view, names["SmallestFirst"]().decide(view, None, 0)) == ""


def test_the_workload_file_of_the_readme_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "set.toml").write_text(block("toml", 'name = "two-jobs"'), encoding="utf-8")
    workload = read_workload(tmp_path / "set.toml", applications())
    assert [row.spec.application for row in workload.rows] == ["digits-cnn", "matfac"]


def test_every_policy_and_application_is_in_the_readme() -> None:
    for name in (*policy_names(), *applications()):
        assert f"`{name}`" in README


def test_the_default_configuration_is_valid_and_names_its_own_defaults() -> None:
    assert load_config({}, Path(__file__).parent.parent / "coadapt.toml") == load_config(
        {}, Path("/dev/null")
    )
