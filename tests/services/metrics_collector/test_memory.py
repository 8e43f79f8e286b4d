"""The memory across jobs: earlier jobs give a new job its first model, and its own data corrects it."""

import msgspec
import pytest

from common.goodput.fit import Fit, fit_throughput
from common.goodput.model import step_time
from common.types import (
    GradientStatistics,
    JobProfile,
    ProfilePoint,
    ThroughputParameters,
)
from services.metrics_collector import memory as memory_module
from services.metrics_collector.memory import Memory, MemoryRecord, scaled

TRUTH = ThroughputParameters(
    alpha_c=0.02, beta_c=0.001, alpha_n=0.05, beta_n=0.002, alpha_r=0.01, beta_r=0.001, gamma=1.4
)
NEW = JobProfile(job_id="new")
FIRST = GradientStatistics(sqr=1.0, var=8.0)
ALL = tuple(
    (nodes, replicas, atomic)
    for nodes, replicas in ((1, 1), (1, 2), (1, 4), (2, 4), (2, 8))
    for atomic in (16, 64, 128)
)


def points(*configurations: tuple[int, int, int], slower: float = 1.0) -> tuple[ProfilePoint, ...]:
    return tuple(
        ProfilePoint(
            nodes=nodes,
            replicas=replicas,
            atomic_batch=atomic,
            accumulation_s=slower * (TRUTH.alpha_c + TRUTH.beta_c * atomic),
            step_s=slower * float(step_time(TRUTH, nodes, replicas, atomic, 0)),
            samples=5,
        )
        for nodes, replicas, atomic in configurations
    )


def modelled(profile: JobProfile, nodes: int, replicas: int, atomic: int) -> float:
    assert profile.parameters is not None
    return float(step_time(profile.parameters, nodes, replicas, atomic, 1))


def memory_of(**jobs: tuple[ProfilePoint, ...]) -> Memory:
    memory = Memory()
    for name, measured in jobs.items():
        memory.learn_points("app", name, measured)
    return memory


def test_a_new_job_starts_from_a_model_of_all_points_of_its_application() -> None:
    memory = memory_of(a=points(*ALL[:6]), b=points(*ALL[6:10]), c=points(*ALL[10:]))
    recalled = memory.recall("app", "new", NEW)
    for configuration in ((1, 1, 32), (1, 3, 64), (2, 6, 100), (4, 12, 64)):
        truth = float(step_time(TRUTH, *configuration, 1))
        assert modelled(recalled, *configuration) == pytest.approx(truth, rel=0.03)
    assert recalled.application_replicas == 8
    assert recalled.explored_replicas == 32
    assert recalled.max_profiled_replicas == 0


def test_an_unknown_application_leaves_the_profile_unchanged() -> None:
    memory = memory_of(a=points(*ALL))
    assert memory.recall("other", "new", NEW) == NEW
    own = JobProfile(job_id="new", parameters=TRUTH, max_profiled_replicas=3)
    memory.learn_need("another", "a", 0.9, 100.0)
    assert memory.recall("another", "new", own, 0.9) == msgspec.structs.replace(own, needed_progress=100.0)


def test_the_times_of_a_job_correct_the_common_model_by_one_factor() -> None:
    memory = memory_of(a=points(*ALL), b=points(*ALL))
    usual = memory.recall("app", "new", NEW)
    own = msgspec.structs.replace(NEW, points=points((1, 1, 16), (1, 2, 16), slower=3.0))
    memory.learn_points("app", "new", own.points)
    corrected = memory.recall("app", "new", own)
    for configuration in ((1, 1, 64), (2, 8, 128)):
        assert modelled(corrected, *configuration) == pytest.approx(
            3 * modelled(usual, *configuration), rel=0.01
        )
    again = memory.recall("app", "newer", NEW)
    for configuration in ((1, 1, 64), (2, 8, 128)):
        expected = modelled(usual, *configuration)
        assert modelled(again, *configuration) == pytest.approx(expected, rel=0.01), (
            "the slow job does not change the model of other jobs"
        )


def test_a_job_that_shares_no_configuration_gets_the_common_model() -> None:
    memory = memory_of(a=points((1, 1, 16), (1, 1, 64)))
    own = msgspec.structs.replace(NEW, points=points((1, 2, 16), slower=2.0))
    recalled = memory.recall("app", "new", own)
    assert modelled(recalled, 1, 1, 16) == pytest.approx(modelled(memory.recall("app", "x", NEW), 1, 1, 16))


def test_learning_the_same_twice_changes_nothing() -> None:
    memory = memory_of(a=points(*ALL[:6]), b=points(*ALL[3:], slower=1.7))
    memory.learn_statistics("app", "a", FIRST)
    memory.learn_need("app", "a", 0.9, 120.0)
    before = memory.record()
    memory.learn_points("app", "a", points(*ALL[:6]))
    memory.learn_statistics("app", "a", GradientStatistics(sqr=9.0, var=9.0))
    memory.learn_need("app", "a", 0.9, 120.0)
    after = memory.record()
    assert after.applications["app"].first_statistics == {"a": FIRST}
    assert after.applications["app"].needed == before.applications["app"].needed
    times = [
        {(p.nodes, p.replicas, p.atomic_batch): p.times for p in kept.applications["app"].points}
        for kept in (before, after)
    ]
    assert times[0].keys() == times[1].keys()
    for configuration, by_job in times[0].items():
        for job, seconds in by_job.items():
            assert times[1][configuration][job] == pytest.approx(seconds, rel=0.01)


def test_the_trusted_statistics_of_a_job_take_precedence_over_remembered_ones() -> None:
    memory = memory_of(a=points(*ALL[:1]))
    doubtful = GradientStatistics(sqr=5.0, var=5.0, trusted=False)
    unsure = JobProfile(job_id="new", statistics=doubtful)
    assert memory.recall("app", "new", unsure).statistics == doubtful
    for name, var in (("a", 2.0), ("b", 8.0), ("c", 20.0)):
        memory.learn_statistics("app", name, GradientStatistics(sqr=1.0, var=var))
    assert memory.recall("app", "new", unsure).statistics == FIRST, "the median of the first statistics"
    assert memory.recall("app", "new", NEW).statistics == FIRST
    own = GradientStatistics(sqr=2.0, var=1.0)
    assert memory.recall("app", "new", JobProfile(job_id="new", statistics=own)).statistics == own


def test_needed_progress_is_known_for_targets_between_those_that_were_reached() -> None:
    memory = Memory()
    for job, target, progress in (("a", 0.8, 100.0), ("b", 0.9, 200.0), ("c", 0.9, 300.0), ("d", 0.9, 900.0)):
        memory.learn_need("app", job, target, progress)
    needed = {t: memory.recall("app", "n", NEW, t).needed_progress for t in (0.7, 0.8, 0.85, 0.9, 0.95)}
    assert needed == pytest.approx({0.7: 0.0, 0.8: 100.0, 0.85: 200.0, 0.9: 300.0, 0.95: 0.0})
    assert memory.recall("app", "n", NEW).needed_progress == 0.0, "without a target"


def test_a_written_record_restores_the_memory() -> None:
    memory = memory_of(a=points(*ALL), b=points(*ALL[:4], slower=0.5))
    memory.learn_statistics("app", "a", FIRST)
    memory.learn_need("app", "b", 0.9, 120.0)
    written = msgspec.json.encode(memory.record())
    again = Memory(msgspec.json.decode(written, type=MemoryRecord))
    assert again.record() == memory.record()
    assert again.recall("app", "c", NEW, 0.9) == memory.recall("app", "c", NEW, 0.9)


def test_the_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "MAX_JOBS", 2)
    monkeypatch.setattr(memory_module, "MAX_CONFIGURATIONS", 3)
    memory = Memory()
    for number in range(5):
        name = f"job-{number}"
        memory.learn_points("app", name, points(*ALL[: 4 + number]))
        memory.learn_statistics("app", name, FIRST)
        memory.learn_need("app", name, 0.9, 1.0)
    kept = memory.record().applications["app"]
    assert len(kept.points) == 3
    assert all(len(point.times) <= 2 for point in kept.points)
    assert list(kept.first_statistics) == list(kept.needed) == ["job-3", "job-4"]


def test_the_model_is_fitted_again_only_for_new_or_changed_times(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []

    def counted(measured: list[ProfilePoint]) -> Fit:
        fits.append(len(measured))
        return fit_throughput(measured)

    monkeypatch.setattr(memory_module, "fit_throughput", counted)
    memory = memory_of(a=points(*ALL[:3]))
    first = memory.recall("app", "new", NEW).parameters
    memory.learn_points("app", "a", points(*ALL[:3], slower=1.05))
    assert memory.recall("app", "new", NEW).parameters == first
    memory.learn_points("app", "a", points(*ALL[:3], slower=1.3))
    memory.recall("app", "new", NEW)
    memory.learn_points("app", "b", points(*ALL[3:4]))
    memory.recall("app", "new", NEW)
    assert fits == [3, 3, 4]


def test_a_scaled_model_gives_scaled_times() -> None:
    slow = scaled(TRUTH, 2.5)
    for configuration in ((1, 1, 16, 0), (1, 4, 64, 2), (3, 9, 32, 1)):
        expected = 2.5 * float(step_time(TRUTH, *configuration))
        assert float(step_time(slow, *configuration)) == pytest.approx(expected, rel=1e-6)
