"""Figures of hand-made runs, computed by hand; `tests/fixtures/logs.py` shows the run as a table."""

import msgspec
import pytest
from msgspec.structs import replace

from analysis.log.audit import audit
from analysis.log.history import JobHistory, integral
from analysis.run.fairness import PIECES, fairness, finish_time_fairness, isolated_jct_s
from analysis.run.measures import modelled_over_realised, summary
from common.protocol import (
    AgentLeft,
    BatchChanged,
    JobCancelled,
    JobCompleted,
    JobSubmitted,
    ModelFitted,
    RunEnded,
    TrainingSample,
)
from common.types import GradientStatistics, JobState
from tests.fixtures.logs import (
    BATCH_16,
    N0,
    PARAMETERS,
    RUN_ID,
    STATISTICS,
    add,
    changed,
    generation,
    good_run,
    only,
    sample,
    scheduler_tells,
    spec,
    swap,
    without,
)

FIELDS = {
    "run_id": None,
    "policy": None,
    "workload": None,
    "seed": None,
    "jobs": {"submitted", "completed", "verified", "failed", "cancelled"},
    "jct_s": {"mean", "p50", "p90", "p99"},
    "makespan_s": None,
    "queue_s": {"mean"},
    "goodput": {"cluster_mean", "modelled_over_realised"},
    "throughput": {"cluster_mean"},
    "efficiency_mean": None,
    "slot_utilisation": None,
    "rescales": {"count", "seconds"},
    "fairness": {"worst_rho", "mean_rho", "unfair_fraction", "jain"},
    "audit": {"ok", "events", "gaps", "findings"},
    "per_job": None,
}
JOB_FIELDS = [
    "id",
    "application",
    "jct_s",
    "queue_s",
    "replicas_mean",
    "batch_mean",
    "rescales",
    "metric",
    "target",
    "verified",
    "rho",
]
FITTED = ModelFitted(
    job_id="a", parameters=PARAMETERS, statistics=STATISTICS, error=0.01, points=2, fit_s=0.005
)
B_ENDS = (only(good_run(), JobCancelled, "b"), changed("b", "running", "cancelled"))


def summed_up(happenings):
    log = history_of(happenings)
    return summary(RUN_ID, log.run, audit(log))


def test_the_fields_are_those_of_the_specification():
    tree = msgspec.to_builtins(summed_up(good_run()))
    assert list(tree) == list(FIELDS)
    for name, parts in FIELDS.items():
        assert parts is None or set(tree[name]) == parts
    assert [list(job) for job in tree["per_job"]] == [JOB_FIELDS, JOB_FIELDS]


def test_who_ran_what_and_how_it_ended():
    result = summed_up(good_run())
    assert (result.run_id, result.policy, result.workload, result.seed) == (RUN_ID, "pollux", "demo.toml", 7)
    assert msgspec.structs.astuple(result.jobs) == (2, 1, 1, 0, 1)
    assert result.audit.ok


def test_completion_times_count_only_completed_jobs():
    result = summed_up(good_run())
    assert msgspec.structs.astuple(result.jct_s) == (14.0, 14.0, 14.0, 14.0)
    assert [job.jct_s for job in result.per_job] == [14.0, None]


def test_percentiles_lie_between_the_jobs():
    told = []
    for n in range(11):
        told = add(told, "scheduler", 0.0, JobSubmitted(spec=spec(f"j{n}")))
        completed = JobCompleted(job_id=f"j{n}", verified=True, metric=1.0, progress=1.0)
        told = add(told, "scheduler", 10.0 * n, completed)
    jct = summed_up(told).jct_s
    assert (jct.mean, jct.p50, jct.p90) == (50.0, 50.0, 90.0)
    assert jct.p99 == pytest.approx(99.0)


def test_queueing_is_from_submission_to_the_first_slots():
    result = summed_up(good_run())
    assert [job.queue_s for job in result.per_job] == [2.0, 4.0]
    assert result.queue_s.mean == 3.0


def test_makespan_is_from_the_first_submission_to_the_last_end():
    assert summed_up(good_run()).makespan_s == 16.0


def test_throughput_and_goodput_of_the_cluster():
    result = summed_up(good_run())
    assert result.throughput.cluster_mean == (1600 + 480) / 16
    assert result.goodput.cluster_mean == 16 * (80 + 30) / 16


def test_examples_of_lost_work_were_processed_all_the_same():
    """a shows 320, 960, then 500 after a loss: 960 processed, and what it did anew is not known before."""
    last = only(good_run(), TrainingSample, "a", 2)
    told = swap(good_run(), last, replace(last, total_examples=500))
    assert summed_up(told).throughput.cluster_mean == (960 + 480) / 16


def test_efficiency_is_the_mean_over_the_time_of_the_samples():
    # 2 s and 3 s at M0 with efficiency 1, 4 s at twice M0 with gain 1.5.
    assert summed_up(good_run()).efficiency_mean == pytest.approx((5 * 1.0 + 4 * 0.75) / 9)


def test_utilisation_counts_training_and_verifying_slots():
    # a: 4 s x 1 + 6 s x 2, its verifier 2 s, b: 10 s; of 4 slots for 16 s.
    assert summed_up(good_run()).slot_utilisation == (4 + 12 + 2 + 10) / 64


def test_utilisation_is_of_the_slots_that_were_there():
    left = AgentLeft(node="n1", incarnation="i1", reason="it stopped")
    assert summed_up(add(good_run(), "scheduler", 124.0, left)).slot_utilisation == 28 / (14 * 4 + 2 * 2)


def test_replicas_and_batch_are_means_over_time():
    a, b = summed_up(good_run()).per_job
    assert (a.replicas_mean, b.replicas_mean) == (1.6, 1.0)
    assert a.batch_mean == pytest.approx((2 * 16 + 4 * 32) / 6)
    assert b.batch_mean == 16.0


def test_rescales_are_the_groups_after_the_first_and_changes_of_batch_are_none():
    told = add(
        good_run(),
        "agent-n0",
        119.5,
        BatchChanged(job_id="b", generation=2, config=BATCH_16, total_batch=16, step=9),
    )
    told = add(told, "agent-n0", 124.5, generation("b", 3, (N0,), progress=30.0, seconds_lost=1.5))
    result = summed_up(told)
    assert (result.rescales.count, result.rescales.seconds) == (2, 1.75)
    assert [job.rescales for job in result.per_job] == [1, 1]


def test_metric_target_and_verdict_of_each_job():
    a, b = summed_up(good_run()).per_job
    assert (a.metric, a.target, a.verified) == (0.96, 0.95, True)
    assert (b.metric, b.target, b.verified) == (None, 0.95, False)


def test_an_unfinished_run_has_no_makespan_but_means_up_to_its_last_event():
    result = summed_up(without(good_run(), *B_ENDS, RunEnded(reason="stopped")))
    assert result.makespan_s is None
    assert result.goodput.cluster_mean == pytest.approx(16 * (80 + 30) / 16.5)
    assert result.audit.ok


def test_what_a_log_does_not_tell_is_null_and_not_zero():
    # Of the scheduler alone: decisions and ends, no sample, no model.
    result = summed_up(scheduler_tells())
    assert result.throughput.cluster_mean is None
    assert result.efficiency_mean is None
    assert result.goodput.modelled_over_realised is None
    assert msgspec.structs.astuple(result.fairness) == (None, None, None, None)
    assert [(job.batch_mean, job.rho) for job in result.per_job] == [(None, None), (None, None)]
    assert result.slot_utilisation == 28 / 64


def test_an_empty_run_is_all_null():
    result = summed_up([])
    assert (result.policy, result.makespan_s, result.slot_utilisation) == (None, None, None)
    assert (result.goodput.cluster_mean, result.jct_s.mean, result.per_job) == (None, None, ())
    assert result.rescales.count == 0


# --------------------------------------------------------------------------- modelled and realised


def test_modelled_over_realised_compares_the_same_seconds():
    # From 119 to 121 at 2 x 16 across nodes: a step is 0.16 + 0.04 s, 160 examples/s at efficiency 0.75,
    # so 240 useful examples were foretold, and 16 x (80 - 50) came.
    assert summed_up(good_run()).goodput.modelled_over_realised == pytest.approx(240 / 480)


def test_a_fit_foretells_nothing_that_was_before_it():
    told = add(without(good_run(), FITTED), "collector", 119.5, FITTED)
    assert summed_up(told).goodput.modelled_over_realised is None


def test_the_newest_fit_is_the_one_in_force():
    slower = replace(FITTED, parameters=replace(PARAMETERS, alpha_n=0.24))
    told = add(good_run(), "collector", 118.5, slower)
    assert summed_up(told).goodput.modelled_over_realised == pytest.approx(120 / 480)


def test_no_window_over_a_rescale_is_compared():
    jobs = list(history_of(good_run()).jobs.values())
    jobs[0].fits = [(0.0, FITTED)]
    first = modelled_over_realised(jobs)
    assert first == pytest.approx(240 / 480)  # 115 to 119 is left out


# --------------------------------------------------------------------------- fairness


def history(**fields: object) -> JobHistory:
    """A completed job of 100 steps at M0 = 16, its largest batch as well: one choice of batch only.

    One replica takes 0.16 s a step, two of one node 0.08 + 0.02, four of two nodes 0.04 + 0.04.
    """
    job = JobHistory(
        spec("a", max_batch_size=16),
        submitted_s=0.0,
        ended_s=40.0,
        end=JobState.COMPLETED,
        completed=JobCompleted(job_id="a", verified=True, metric=0.96, progress=100.0),
        fits=[(5.0, FITTED)],
        samples=[(9.0, sample("a", 1, 1.0, total_steps=9, total_examples=9, progress=50.0))],
    )
    for name, value in fields.items():
        setattr(job, name, value)
    return job


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
    assert isolated_jct_s(history(), share, node_slots=2) == pytest.approx(seconds)


def test_a_node_that_holds_all_replicas_needs_no_network():
    assert isolated_jct_s(history(), 4.0, node_slots=4) == pytest.approx(100 * 0.06)


def test_start_and_verification_are_spent_alone_as_well():
    job = history(generations=[(112.0, generation("a", 1, (N0,), seconds_lost=1.5))], verifying_s=37.0)
    assert isolated_jct_s(job, 0.5, node_slots=2) == pytest.approx(32 + 1.5 + 3.0)


def test_isolated_time_follows_the_statistics_along_the_progress():
    """Without noise at first, a larger batch gains nothing; with nothing but noise later, it gains all.

    Half of the progress at 0.16 s a step of M0; then a batch of 8 x M0, 128 examples in 2 x 64 (a single
    replica above M0 accumulates), takes 1.28 s and is worth 8 steps: also 0.16 s. With alpha_c = 0.04 the
    second half is worth taking apart: 0.20 s a step at first, then 2 x (0.04 + 0.64) / 8 = 0.17.
    """
    clean, noisy = GradientStatistics(sqr=1.0, var=0.0), GradientStatistics(sqr=0.0, var=1.0)
    job = history(
        spec=spec("a", max_batch_size=128),
        fits=[(5.0, replace(FITTED, parameters=replace(PARAMETERS, alpha_c=0.04)))],
        samples=[
            (1.0, sample("a", 1, 1.0, total_steps=1, total_examples=16, progress=1.0, statistics=clean)),
            (2.0, sample("a", 1, 1.0, total_steps=50, total_examples=800, progress=50.0, statistics=noisy)),
        ],
    )
    assert PIECES % 2 == 0
    assert isolated_jct_s(job, 1.0, node_slots=2) == pytest.approx(50 * 0.20 + 50 * 0.17)


def test_untrusted_statistics_are_passed_over_for_those_of_the_fit():
    wild = GradientStatistics(sqr=0.0, var=1e9, trusted=False)
    samples = [(9.0, sample("a", 1, 1.0, total_steps=9, total_examples=9, progress=50.0, statistics=wild))]
    assert isolated_jct_s(history(samples=samples), 1.0, node_slots=2) == pytest.approx(16.0)


@pytest.mark.parametrize(
    "lacking",
    [
        {"fits": []},
        {"completed": None},
        {"samples": [], "fits": [(5.0, replace(FITTED, statistics=None))]},
    ],
)
def test_without_model_or_completion_there_is_no_isolated_time(lacking):
    assert isolated_jct_s(history(**lacking), 1.0, node_slots=2) is None


def test_rho_compares_with_the_share_that_was_a_jobs_due():
    """a lives 14 s, b 12 s of them: 26 / 14 active jobs, so a share of 4 x 14 / 26 slots."""
    run = history_of(good_run())
    isolated = isolated_jct_s(run.jobs["a"], 4 * 14 / 26, node_slots=2)
    assert finish_time_fairness(run) == [pytest.approx(14 / isolated), None]
    assert summed_up(good_run()).per_job[0].rho == pytest.approx(14 / isolated)


def test_fairness_figures():
    figures = fairness([0.5, None, 2.0])
    assert (figures.worst_rho, figures.mean_rho, figures.unfair_fraction) == (2.0, 1.25, 0.5)
    assert figures.jain == pytest.approx((2 + 0.5) ** 2 / (2 * (4 + 0.25)))
    assert fairness([0.8, 0.8]).jain == pytest.approx(1.0)


# --------------------------------------------------------------------------- arithmetic


def test_an_integral_of_steps_is_what_a_sum_of_rectangles_gives():
    steps = [(2.0, 3), (4.0, 0), (5.0, 1)]
    assert integral(steps, 0.0, 10.0) == 2 * 3 + 5 * 1
    assert integral(steps, 3.0, 5.5) == 1 * 3 + 0.5 * 1
    assert integral(steps, 0.0, 2.0) == 0.0
    assert integral([], 0.0, 2.0) == 0.0
