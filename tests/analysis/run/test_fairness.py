"""Fairness of hand-made runs, computed by hand; `tests/fixtures/logs.py` shows the run as a table."""

import pytest
from msgspec.structs import replace

from analysis.log.history import JobHistory
from analysis.run.fairness import PIECES, fairness, finish_time_fairness, isolated_jct_s
from common.protocol import Event, JobCompleted, JobSubmitted, ModelFitted, TrainingSample
from common.types import GradientStatistics, JobSpec
from tests.fixtures.logs import (
    FITTED,
    N0,
    PARAMETERS,
    STATISTICS,
    Happening,
    changed,
    generation,
    good_run,
    history_of,
    sample,
    spec,
)


def showing(progress: float, statistics: GradientStatistics) -> TrainingSample:
    return sample("a", 1, 1.0, total_steps=9, total_examples=9, progress=progress, statistics=statistics)


SAMPLE = showing(50.0, STATISTICS)


def completed_job(
    job: JobSpec | None = None,
    model: ModelFitted | None = FITTED,
    reports: tuple[tuple[float, Event], ...] = ((9.0, SAMPLE),),
    completed: bool = True,
) -> JobHistory:
    """A job of 100 steps at M0 = 16 in 40 s. By default M0 is its largest batch, so there is one batch only.

    One replica takes 0.16 s a step, two of one node 0.08 + 0.02, four of two nodes 0.04 + 0.04.
    """
    end = JobCompleted(job_id="a", verified=True, metric=0.96, progress=100.0)
    events: list[tuple[float, Event]] = [
        (0.0, JobSubmitted(spec=job or spec("a", max_batch_size=16))),
        *([(5.0, model)] if model else []),
        *reports,
        *([(40.0, end)] if completed else []),
    ]
    return history_of(Happening("scheduler", t_s, event) for t_s, event in events).jobs["a"]


@pytest.mark.parametrize(
    ("share", "seconds"),
    [
        (1.0, 16.0),
        (0.5, 32.0),  # one slot's time / share
        (2.0, 10.0),
        (1.5, 13.0),  # between 16 and 10
        (4.0, 8.0),  # two nodes
        (9.0, 8.0),  # more than it can use
    ],
)
def test_isolated_time_of_a_share(share, seconds):
    assert isolated_jct_s(completed_job(), share, node_slots=2) == pytest.approx(seconds)


def test_a_node_that_holds_all_replicas_needs_no_network():
    assert isolated_jct_s(completed_job(), 4.0, node_slots=4) == pytest.approx(100 * 0.06)


def test_start_and_verification_are_spent_alone_as_well():
    job = completed_job(
        reports=(
            (8.0, generation("a", 1, (N0,), seconds_lost=1.5)),
            (9.0, SAMPLE),
            (37.0, changed("a", "running", "verifying")),
        )
    )
    assert isolated_jct_s(job, 0.5, node_slots=2) == pytest.approx(32 + 1.5 + 3.0)


def test_isolated_time_follows_the_statistics_along_the_progress():
    """Without noise at first, a larger batch gains nothing; with nothing but noise later, it gains all.

    Half of the progress at 0.16 s a step of M0; then a batch of 8 x M0, 128 examples in 2 x 64 (a single
    replica above M0 accumulates), takes 1.28 s and is worth 8 steps: also 0.16 s. With alpha_c = 0.04 the
    second half is worth taking apart: 0.20 s a step at first, then 2 x (0.04 + 0.64) / 8 = 0.17.
    """
    clean, noisy = GradientStatistics(sqr=1.0, var=0.0), GradientStatistics(sqr=0.0, var=1.0)
    job = completed_job(
        spec("a", max_batch_size=128),
        model=replace(FITTED, parameters=replace(PARAMETERS, alpha_c=0.04)),
        reports=((1.0, showing(1.0, clean)), (2.0, showing(50.0, noisy))),
    )
    assert PIECES % 2 == 0
    assert isolated_jct_s(job, 1.0, node_slots=2) == pytest.approx(50 * 0.20 + 50 * 0.17)


def test_the_statistics_of_the_fit_replace_untrusted_ones():
    wild = GradientStatistics(sqr=0.0, var=1e9, trusted=False)
    job = completed_job(reports=((9.0, showing(50.0, wild)),))
    assert isolated_jct_s(job, 1.0, node_slots=2) == pytest.approx(16.0)


@pytest.mark.parametrize(
    "lacking",
    [
        {"model": None},
        {"completed": False},
        {"reports": (), "model": replace(FITTED, statistics=None)},
    ],
)
def test_without_model_or_completion_there_is_no_isolated_time(lacking):
    assert isolated_jct_s(completed_job(**lacking), 1.0, node_slots=2) is None


def test_rho_compares_with_the_share_that_was_a_jobs_due():
    """a lives 14 s, b 12 s of them: 26 / 14 active jobs, so a share of 4 x 14 / 26 slots."""
    run = history_of(good_run())
    isolated = isolated_jct_s(run.jobs["a"], 4 * 14 / 26, node_slots=2)
    assert finish_time_fairness(run) == [pytest.approx(14 / isolated), None]


def test_fairness_figures():
    figures = fairness([0.5, None, 2.0])
    assert (figures.worst_rho, figures.mean_rho, figures.unfair_fraction) == (2.0, 1.25, 0.5)
    assert figures.jain == pytest.approx((2 + 0.5) ** 2 / (2 * (4 + 0.25)))
    assert fairness([0.8, 0.8]).jain == pytest.approx(1.0)
