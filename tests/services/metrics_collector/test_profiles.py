"""From samples to profiles: medians, trusted statistics, when to fit again, and bounded size."""

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
from tests.fixtures.training_samples import sample


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


def observed(*events: Event) -> ObservedJob:
    jobs = ObservedJobs()
    for event in events:
        jobs.add(event)
    (job,) = jobs.active()
    return job


def test_a_point_is_the_median_of_its_samples() -> None:
    job = observed(*(sample(step_s=s, sync_s=0.02, replicas=2) for s in (0.1, 0.5, 0.12)))
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
    job = observed(sample(), sample(atomic=32), sample(replicas=2), sample(replicas=2, nodes=2), sample())
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
def test_a_sample_without_usable_times_still_updates_the_progress(useless: TrainingSample) -> None:
    job = observed(sample(progress=3.0), useless)
    assert [p.replicas for p in job.points()] == [1]
    assert job.profile().progress == 10.0
    assert job.profile().max_profiled_replicas == 1


def test_the_newest_trusted_statistics_are_kept() -> None:
    trusted = GradientStatistics(sqr=1.0, var=2.0)
    newer = GradientStatistics(sqr=1.0, var=3.0)
    doubtful = GradientStatistics(sqr=1.0, var=9.0, trusted=False)
    assert observed(sample(statistics=doubtful)).statistics == doubtful
    assert observed(sample(statistics=doubtful), sample(statistics=trusted)).statistics == trusted
    assert observed(sample(statistics=trusted), sample(statistics=doubtful), sample()).statistics == trusted
    assert observed(sample(statistics=trusted), sample(statistics=newer)).statistics == newer


def test_the_cost_of_a_restart_is_the_median_without_first_starts() -> None:
    assert observed(started(4.0, "scratch")).profile().restart_s == 0.0
    job = observed(started(4.0, "scratch"), started(0.1), started(9.0, "checkpoint"), started(0.3))
    assert job.profile().restart_s == 0.3


def test_a_new_configuration_or_a_changed_median_needs_a_fit() -> None:
    job = observed(sample())
    assert job.needs_fit
    job.fit()
    assert not job.needs_fit
    job.add_sample(sample(step_s=0.105))
    assert not job.needs_fit, "it changed by less than a tenth"
    for _ in range(3):
        job.add_sample(sample(step_s=0.13))
    assert job.needs_fit
    job.fit()
    job.add_sample(sample(replicas=2))
    assert job.needs_fit


def test_the_fit_matches_the_measurements() -> None:
    job = observed(
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


def test_the_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "MAX_CONFIGURATIONS", 4)
    monkeypatch.setattr(profiles, "MAX_ENDED", 2)
    job = observed(*(sample(atomic=m) for m in range(1, 7)), *(sample(atomic=3) for _ in range(1000)))
    assert sorted(p.atomic_batch for p in job.points()) == [3, 4, 5, 6]
    assert len(job.times[1, 1, 3].step_s) == profiles.WINDOW

    jobs = ObservedJobs()
    ends = (
        JobCompleted(job_id="a", verified=True, metric=1.0, progress=1.0),
        JobFailed(job_id="b", reason="it raised"),
        JobCancelled(job_id="c"),
    )
    for end in ends:
        jobs.add(sample(end.job_id))
        jobs.add(end)
    assert jobs.profile("a") == JobProfile(job_id="a"), "the job that ended first is forgotten"
    assert jobs.profile("b").points
    assert jobs.active() == []


def test_a_late_sample_does_not_revive_an_ended_job() -> None:
    jobs = ObservedJobs()
    jobs.add(sample())
    jobs.add(JobCompleted(job_id="a", verified=True, metric=1.0, progress=1.0))
    jobs.add(sample())
    assert jobs.active() == []


def test_a_job_without_measurements_has_an_empty_profile() -> None:
    assert ObservedJobs().profile("new") == JobProfile(job_id="new")


def test_other_events_are_ignored() -> None:
    assert ObservedJobs().add(RunEnded(reason="stopped")) is None


# ------------------------------------------------------------------------------ memory across jobs


def samples_of(job_id: str, step_s: float = 0.1, **changes: Any) -> list[TrainingSample]:
    measured = {"statistics": GradientStatistics(sqr=1.0, var=4.0), **changes}
    return [
        sample(job_id, replicas=r, atomic=m, step_s=step_s * (r + m / 16), sync_s=step_s / 10, **measured)
        for r in (1, 2)
        for m in (16, 32)
    ]


def remembering(*events: Event) -> ObservedJobs:
    """Jobs with a memory. The profiles of `a` and `b`, of one application, are requested before and after the
    events."""
    jobs = ObservedJobs("run", Memory())
    for job_id in "ab":
        jobs.profile(job_id, "app", 0.9)
    for event in events:
        job = jobs.add(event)
        if job and job.needs_fit:
            jobs.fit(job)
    for job_id in "ab":
        jobs.profile(job_id, "app", 0.9)
    return jobs


def test_a_new_job_starts_from_the_measurements_of_its_application() -> None:
    done = JobCompleted(job_id="a", verified=True, metric=0.91, progress=77.0)
    jobs = remembering(*samples_of("a"), done)
    earlier = jobs.profile("a").parameters
    for name in ("b", "new"):
        new = jobs.profile(name, "app", 0.9)
        assert new.parameters == earlier
        assert new.statistics == GradientStatistics(sqr=1.0, var=4.0)
        assert (new.max_profiled_replicas, new.application_replicas) == (0, 2)
        assert new.needed_progress == 77.0
        assert new.progress == 0.0
    assert jobs.profile("other", "another", 0.9) == JobProfile(job_id="other")


def test_with_a_memory_the_model_of_a_job_is_that_of_its_application_corrected_by_its_own_times() -> None:
    slow = samples_of("b", step_s=0.2)[0]
    jobs = remembering(*samples_of("a"), slow)
    usual, own = jobs.profile("a", "app", 0.9), jobs.profile("b", "app", 0.9)
    assert usual.parameters
    assert own.parameters
    for configuration in ((1, 1, 16), (1, 2, 32), (1, 2, 64)):
        twice = 2 * last_pass_time(usual.parameters, *configuration)
        assert last_pass_time(own.parameters, *configuration) == pytest.approx(twice, rel=0.01)
    (job,) = (job for job in jobs.active() if job.job_id == "b")
    assert not job.needs_fit
    assert jobs.fit(job).parameters == own.parameters
    assert jobs.fit(job).error < 0.05


def test_without_a_memory_jobs_do_not_affect_each_other() -> None:
    plain, named = ObservedJobs("run"), ObservedJobs("run")
    for event in (*samples_of("a"), *samples_of("b", step_s=0.3)[:1]):
        for jobs in (plain, named):
            job = jobs.add(event)
            assert job is not None
            jobs.fit(job)
            named.profile(job.job_id, "app", 0.9)
    for name in ("a", "b", "new"):
        assert named.profile(name, "app", 0.9) == plain.profile(name)
    assert plain.profile("new") == JobProfile(job_id="new")
    assert plain.profile("b").application_replicas == 0


def test_a_job_of_an_unknown_application_uses_only_its_own_data() -> None:
    jobs = ObservedJobs("run", Memory())
    for event in samples_of("a"):
        job = jobs.add(event)
    assert job is not None
    own = jobs.fit(job)
    assert jobs.profile("a").parameters == own.parameters
    assert jobs.profile("a", "app", 0.9).application_replicas == 2, "now the application is known"
