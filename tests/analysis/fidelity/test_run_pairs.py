import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from analysis.fidelity.agreement import compare_folders, encoded
from analysis.log.find_logs import NoRuns
from analysis.report.fidelity_report import draw, markdown
from common.protocol import RoundDecided
from tests.fixtures.logs import Happening, good_run, save, written
from tests.fixtures.runs import put
from workloads.applications import applications
from workloads.files.measured_profile import PROFILES, MeasuredProfile, read_profiles

DECISION_PARTS = ("allocations", "configs", "reasons")


@pytest.fixture(scope="module")
def profiles() -> dict[str, MeasuredProfile]:
    return dict(read_profiles(PROFILES, applications()))


def delayed(happenings: list[Happening], seconds: float) -> list[Happening]:
    """Everything after the first training happens later."""
    return [replace(h, t_s=h.t_s + seconds) if h.t_s > 119.5 else h for h in happenings]


def without_the_cancelled_job(happenings: list[Happening]) -> list[Happening]:
    """A run with a cancelled job does not count."""
    kept = []
    for happening in happenings:
        event = happening.event
        job_id = getattr(event, "job_id", None) or getattr(getattr(event, "spec", None), "id", None)
        if isinstance(event, RoundDecided):
            own = {
                part: {"a": getattr(event, part)["a"]}
                for part in DECISION_PARTS
                if "a" in getattr(event, part)
            }
            event = structs.replace(event, **{part: own.get(part, {}) for part in DECISION_PARTS})
        if job_id in (None, "a"):
            kept.append(replace(happening, event=event))
    return kept


def test_folders_are_compared_run_by_run_and_reported(tmp_path: Path, profiles: dict[str, MeasuredProfile]):
    real, simulated = tmp_path / "real", tmp_path / "simulated"
    run = without_the_cancelled_job(good_run())
    for policy in ("fixed", "pollux"):
        save(written(run, f"s-{policy}-7"), real / f"s-{policy}-7")
        facts = {"set": "s", "requests": "tuned", "policy": policy, "seed": 7}
        (real / f"s-{policy}-7" / "run.json").write_text(json.dumps(facts))
    save(written(delayed(run, 1.4), "s-fixed-7"), simulated / "s-fixed-7")
    (real / "experiment.json").write_text('{"date": "2026-12-01", "machine": {"cores": 2}}')
    found, pairs = compare_folders(real, simulated, profiles)
    assert found.batch_efficiency["fixed"].error == 0.0, "both sides trained with the same batches"
    assert found.mean_jct_error == {"fixed": pytest.approx(0.1)}
    assert [(entry.run, entry.why) for entry in found.left_out] == [("s-pollux-7", "was not simulated")]
    assert (found.date, found.machine) == ("2026-12-01", {"cores": 2})
    assert found.per_run[0].set == "s-tuned"
    assert markdown(found).startswith("# Simulator against reality")
    assert json.loads(encoded(found))["runs"] == 1
    draw(pairs, tmp_path / "fidelity.svg")
    assert (tmp_path / "fidelity.svg").read_text().count("<svg") == 1


def test_jobs_that_completed_only_on_one_side_are_named(tmp_path: Path, profiles: dict[str, MeasuredProfile]):
    put(tmp_path / "real", "s", "fixed", 1, [10.0, 12.0])
    put(tmp_path / "simulated", "s", "fixed", 1, [11.0])
    found, pairs = compare_folders(tmp_path / "real", tmp_path / "simulated", profiles)
    assert list(pairs[0].real) == ["job-0"]
    assert [entry.why for entry in found.left_out] == ["jobs that completed only on one side: job-1"]


def test_a_run_that_was_not_simulated_says_why(tmp_path: Path, profiles: dict[str, MeasuredProfile]):
    for policy in ("fixed", "pollux"):
        put(tmp_path / "real", "s", policy, 1, [10.0])
    put(tmp_path / "simulated", "s", "fixed", 1, [11.0])
    found, _ = compare_folders(
        tmp_path / "real", tmp_path / "simulated", profiles, {"s-pollux-1": "no profile"}
    )
    assert [entry.why for entry in found.left_out] == ["was not simulated: no profile"]


def test_folders_without_a_common_run_are_refused(tmp_path: Path, profiles: dict[str, MeasuredProfile]):
    put(tmp_path / "real", "s", "pollux", 7, [10.0])
    with pytest.raises(NoRuns, match="no run to compare; s-pollux-7: was not simulated"):
        compare_folders(tmp_path / "real", tmp_path / "nowhere", profiles)
    with pytest.raises(NoRuns, match="no such file or folder"):
        compare_folders(tmp_path / "nowhere", tmp_path / "real", profiles)
