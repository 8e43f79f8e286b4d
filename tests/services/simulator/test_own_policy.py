"""The policy on the page `docs/write-a-policy.md`, installed as a package, runs live and simulated."""

from pathlib import Path

import pytest

from services.scheduler.policies.registry import make_live_policy, policy_names
from services.simulator.run_case import simulate
from tests.fixtures.doc_pages import block_with
from tests.fixtures.policy_views import job, view
from tests.fixtures.simulation_cases import synthetic_case

EXAMPLE = block_with("docs/write-a-policy.md", "class SmallestFirst")


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that `pip install` writes for a package with this line in the pyproject.toml table
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
def test_a_users_own_policy_runs_by_name_live_and_in_simulation() -> None:
    assert "smallest-first" in policy_names()
    live = make_live_policy("smallest-first")
    decision = live.decide(view(job("a", replicas=8), job("b", replicas=3)), None, seed=0)
    assert decision.reasons == {
        "a": "waits: asks for 8 replicas, 5 slots are free",
        "b": "3 replicas on node-1: the smallest go first",
    }
    result = simulate(synthetic_case("smallest-first", jobs=6))
    assert len(result.jcts_s) == 6
    assert result.policy == "smallest-first"


def test_the_example_has_at_most_twenty_lines() -> None:
    assert len([line for line in EXAMPLE.splitlines() if line]) <= 20
