"""Samples become profiles: medians, what is trusted, when a fit is due, and bounded memory."""

from typing import Any

import pytest

from common.goodput.model import last_pass_time
from common.protocol import (
    Event,
    GenerationStarted,
    JobCancelled,
    JobCompleted,
    JobFailed,
    RunEnded,
    TrainingSample,
)
from common.types import GradientStatistics, JobConfig, JobProfile, ProfilePoint
from services.metrics_collector import profiles
from services.metrics_collector.memory import Memory
from services.metrics_collector.profiles import ObservedJob, ObservedJobs
from tests.fixtures.policy_views import at


def sample(
    job_id: str = "a",
    *,
    nodes: int = 1,
    replicas: int = 1,
    atomic: int = 16,
    accumulation: int = 0,
    accumulation_s: float | None = None,
    step_s: float = 0.1,
    sync_s: float = 0.0,
    timed_steps: int = 5,
    progress: float = 10.0,
    statistics: GradientStatistics | None = None,
) -> TrainingSample:
    return TrainingSample(
        job_id=job_id,
        generation=1,
        nodes=nodes,
        replicas=replicas,
        config=JobConfig(atomic_batch=atomic, accumulation=accumulation),
        window_s=0.5,
        steps=5,
        timed_steps=timed_steps,
        accumulation_s=step_s - sync_s if accumulation_s is None else accumulation_s,
        step_s=step_s,
        sync_s=sync_s,
        total_steps=10,
        total_examples=160,
        progress=progress,
        epoch=0,
        loss=1.0,
        gain=1.0,
        statistics=statistics,
    )


def started(seconds_lost: float, state_from: str = "survivor") -> GenerationStarted:
    return GenerationStarted(
        job_id="a",
        generation=2,
        old_replicas=1,
        allocation=at((1, 2)),
        config=JobConfig(atomic_batch=16),
        state_from=state_from,
        seconds_lost=seconds_lost,
        progress=1.0,
    )


def history(*events: Event) -> ObservedJob:
    histories = ObservedJobs()
    for event in events:
        histories.add(event)
    (job,) = histories.active()
    return job


def test_a_point_is_the_median_of_its_samples() -> None:
    job = history(*(sample(step_s=s, sync_s=0.02, replicas=2) for s in (0.1, 0.5, 0.12)))
    assert job.points() == [
        ProfilePoint(
            nodes=1,
            replicas=2,
            atomic_batch=16,
            accumulation_s=pytest.approx(0.1),
            step_s=0.12,
            samples=3,
        )
    ]


def test_every_configuration_has_its_own_point() -> None:
    job = history(sample(), sample(atomic=32), sample(replicas=2), sample(replicas=2, nodes=2), sample())
    keys = {(p.nodes, p.replicas, p.atomic_batch): p.samples for p in job.points()}
    assert keys == {(1, 1, 16): 2, (1, 1, 32): 1, (1, 2, 16): 1, (2, 2, 16): 1}
    assert job.profile().max_profiled_replicas == 2


@pytest.mark.parametrize(
    "useless",
    [
        sample(replicas=4, timed_steps=0, step_s=0.0),
        sample(replicas=4, step_s=float("nan")),
        sample(replicas=4, accumulation_s=0.0),
        sample(replicas=4, accumulation_s=-1.0),
    ],
)
def test_a_sample_without_usable_times_still_tells_progress(useless: TrainingSample) -> None:
    job = history(sample(progress=3.0), useless)
    assert [p.replicas for p in job.points()] == [1]
    assert job.profile().progress == 10.0
    assert job.profile().max_profiled_replicas == 1


def test_the_newest_trusted_statistics_are_kept() -> None:
    trusted = GradientStatistics(sqr=1.0, var=2.0)
    newer = GradientStatistics(sqr=1.0, var=3.0)
    doubtful = GradientStatistics(sqr=1.0, var=9.0, trusted=False)
    assert history(sample(statistics=doubtful)).statistics == doubtful
    assert history(sample(statistics=doubtful), sample(statistics=trusted)).statistics == trusted
    assert history(sample(statistics=trusted), sample(statistics=doubtful), sample()).statistics == trusted
    assert history(sample(statistics=trusted), sample(statistics=newer)).statistics == newer


def test_a_restart_costs_the_median_of_the_resizes_and_a_first_start_is_none() -> None:
    assert history(started(4.0, "scratch")).profile().restart_s == 0.0
    job = history(started(4.0, "scratch"), started(0.1), started(9.0, "checkpoint"), started(0.3))
    assert job.profile().restart_s == 0.3


def test_a_fit_is_due_for_a_new_configuration_and_for_a_median_that_moved() -> None:
    job = history(sample())
    assert job.needs_fit
    job.fit()
    assert not job.needs_fit
    job.add_sample(sample(step_s=0.105))
    assert not job.needs_fit, "moved by less than a tenth"
    for _ in range(3):
        job.add_sample(sample(step_s=0.13))
    assert job.needs_fit
    job.fit()
    job.add_sample(sample(replicas=2))
    assert job.needs_fit


def test_the_fit_explains_what_was_measured() -> None:
    job = history(
        *(
            sample(replicas=r, atomic=m, step_s=0.01 + 0.002 * m + 0.01 * (r > 1), sync_s=0.01 * (r > 1))
            for r in (1, 2)
            for m in (16, 64)
        )
    )
    fit = job.fit()
    assert fit.error < 0.01
    assert last_pass_time(fit.parameters, 1, 2, 32) == pytest.approx(0.084, rel=0.03)
    assert job.profile().parameters == fit.parameters


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "MAX_CONFIGURATIONS", 4)
    monkeypatch.setattr(profiles, "MAX_ENDED", 2)
    job = history(*(sample(atomic=m) for m in range(1, 7)), *(sample(atomic=3) for _ in range(1000)))
    assert sorted(p.atomic_batch for p in job.points()) == [3, 4, 5, 6]
    assert len(job.times[1, 1, 3].step_s) == profiles.WINDOW

    histories = ObservedJobs()
    ends = (
        JobCompleted(job_id="a", verified=True, metric=1.0, progress=1.0),
        JobFailed(job_id="b", reason="it raised"),
        JobCancelled(job_id="c"),
    )
    for end in ends:
        histories.add(sample(end.job_id))
        histories.add(end)
    assert histories.profile("a") == JobProfile(job_id="a"), "the one that ended first is forgotten"
    assert histories.profile("b").points
    assert histories.active() == []


def test_a_late_sample_does_not_make_an_ended_job_new() -> None:
    histories = ObservedJobs()
    histories.add(sample())
    histories.add(JobCompleted(job_id="a", verified=True, metric=1.0, progress=1.0))
    histories.add(sample())
    assert histories.active() == []


def test_a_job_that_has_shown_nothing_has_an_empty_profile() -> None:
    assert ObservedJobs().profile("new") == JobProfile(job_id="new")


def test_events_of_no_interest_are_passed_over() -> None:
    assert ObservedJobs().add(RunEnded(reason="asked to")) is None


# ------------------------------------------------------------------------------ memory across jobs


def sibling(job_id: str, step_s: float = 0.1, **changes: Any) -> list[TrainingSample]:
    shown = {"statistics": GradientStatistics(sqr=1.0, var=4.0), **changes}
    return [
        sample(job_id, replicas=r, atomic=m, step_s=step_s * (r + m / 16), sync_s=step_s / 10, **shown)
        for r in (1, 2)
        for m in (16, 32)
    ]


def remembering(*events: Event) -> ObservedJobs:
    """Histories that have been asked, before and after, for the jobs `a` and `b` of one application."""
    histories = ObservedJobs("run", Memory())
    for job_id in "ab":
        histories.profile(job_id, "app", 0.9)
    for event in events:
        job = histories.add(event)
        if job and job.needs_fit:
            histories.fit(job)
    for job_id in "ab":
        histories.profile(job_id, "app", 0.9)
    return histories


def test_a_new_job_starts_from_what_a_job_of_its_application_has_shown() -> None:
    done = JobCompleted(job_id="a", verified=True, metric=0.91, progress=77.0)
    histories = remembering(*sibling("a"), done)
    shown = histories.profile("a").parameters
    for name in ("b", "new"):
        new = histories.profile(name, "app", 0.9)
        assert new.parameters == shown
        assert new.statistics == GradientStatistics(sqr=1.0, var=4.0)
        assert (new.max_profiled_replicas, new.application_replicas) == (0, 2)
        assert new.needed_progress == 77.0
        assert new.progress == 0.0
    assert histories.profile("other", "another", 0.9) == JobProfile(job_id="other")


def test_with_the_memory_a_jobs_model_is_its_applications_corrected_by_its_own_times() -> None:
    slow = sibling("b", step_s=0.2)[0]
    histories = remembering(*sibling("a"), slow)
    usual, own = histories.profile("a", "app", 0.9), histories.profile("b", "app", 0.9)
    assert usual.parameters
    assert own.parameters
    for configuration in ((1, 1, 16), (1, 2, 32), (1, 2, 64)):
        twice = 2 * last_pass_time(usual.parameters, *configuration)
        assert last_pass_time(own.parameters, *configuration) == pytest.approx(twice, rel=0.01)
    (job,) = (job for job in histories.active() if job.job_id == "b")
    assert not job.needs_fit
    assert histories.fit(job).parameters == own.parameters
    assert histories.fit(job).error < 0.05


def test_without_the_memory_nothing_passes_from_job_to_job() -> None:
    plain, told = ObservedJobs("run"), ObservedJobs("run")
    for event in (*sibling("a"), *sibling("b", step_s=0.3)[:1]):
        for histories in (plain, told):
            job = histories.add(event)
            assert job is not None
            histories.fit(job)
            told.profile(job.job_id, "app", 0.9)
    for name in ("a", "b", "new"):
        assert told.profile(name, "app", 0.9) == plain.profile(name)
    assert plain.profile("new") == JobProfile(job_id="new")
    assert plain.profile("b").application_replicas == 0


def test_a_job_whose_application_nobody_has_told_goes_by_its_own_data() -> None:
    histories = ObservedJobs("run", Memory())
    for event in sibling("a"):
        job = histories.add(event)
    assert job is not None
    own = histories.fit(job)
    assert histories.profile("a").parameters == own.parameters
    assert histories.profile("a", "app", 0.9).application_replicas == 2, "once told, it is remembered"
