"""The policy that the README shows, installed as a package of a user's own, runs in both worlds."""

from pathlib import Path

import pytest

from services.scheduler.policies import make_live_policy, policy_names
from services.simulator.run_case import simulate
from tests.fixtures.policy_views import job, view
from tests.fixtures.simulation_cases import synthetic_case
from tests.test_readme import block

EXAMPLE = block("python", "class SmallestFirst")


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install` leaves of a package with this one line in its pyproject.toml's table
    [project.entry-points."coadapt.policies"]."""
    (tmp_path / "smallest_first.py").write_text(EXAMPLE)
    info = tmp_path / "smallest_first-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: smallest-first\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[coadapt.policies]\nsmallest-first = smallest_first:SmallestFirst\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_installed")
def test_a_policy_of_a_users_own_runs_by_name_in_both_worlds() -> None:
    assert "smallest-first" in policy_names()
    live = make_live_policy("smallest-first")
    decision = live.decide(view(job("a", replicas=8), job("b", replicas=3)), None, seed=0)
    assert decision.reasons == {
        "a": "waits: 8 replicas asked for",
        "b": "3 replicas on node-1: the smallest go first",
    }
    result = simulate(synthetic_case("smallest-first", jobs=6))
    assert len(result.jcts_s) == 6
    assert result.policy == "smallest-first"


def test_the_example_is_twenty_lines_as_promised() -> None:
    assert len([line for line in EXAMPLE.splitlines() if line]) <= 20
