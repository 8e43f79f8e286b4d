"""Figures of hand-made runs, computed by hand; `tests/fixtures/logs.py` shows the run as a table."""

import msgspec
import pytest
from msgspec.structs import replace

from analysis.log.audit import audit
from analysis.run.measures import modelled_over_realised, summary
from common.protocol import (
    AgentLeft,
    BatchChanged,
    JobCancelled,
    JobCompleted,
    JobSubmitted,
    RunEnded,
    TrainingSample,
)
from tests.fixtures.logs import (
    BATCH_16,
    FITTED,
    N0,
    PARAMETERS,
    RUN_ID,
    add,
    changed,
    generation,
    good_run,
    history_of,
    only,
    scheduler_happenings,
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
B_ENDS = (only(good_run(), JobCancelled, "b"), changed("b", "running", "cancelled"))


def summary_of(happenings):
    run = history_of(happenings)
    return summary(run, audit(run))


def test_the_fields_are_those_of_the_specification():
    tree = msgspec.to_builtins(summary_of(good_run()))
    assert list(tree) == list(FIELDS)
    for name, parts in FIELDS.items():
        assert parts is None or set(tree[name]) == parts
    assert [list(job) for job in tree["per_job"]] == [JOB_FIELDS, JOB_FIELDS]


def test_a_summary_names_the_run_and_counts_the_ends_of_its_jobs():
    result = summary_of(good_run())
    assert (result.run_id, result.policy, result.workload, result.seed) == (RUN_ID, "pollux", "demo.toml", 7)
    assert msgspec.structs.astuple(result.jobs) == (2, 1, 1, 0, 1)
    assert result.audit.ok


def test_completion_times_count_only_completed_jobs():
    result = summary_of(good_run())
    assert msgspec.structs.astuple(result.jct_s) == (14.0, 14.0, 14.0, 14.0)
    assert [job.jct_s for job in result.per_job] == [14.0, None]


def test_percentiles_lie_between_the_jobs():
    happenings = []
    for n in range(11):
        happenings = add(happenings, "scheduler", 0.0, JobSubmitted(spec=spec(f"j{n}")))
        completed = JobCompleted(job_id=f"j{n}", verified=True, metric=1.0, progress=1.0)
        happenings = add(happenings, "scheduler", 10.0 * n, completed)
    jct = summary_of(happenings).jct_s
    assert (jct.mean, jct.p50, jct.p90) == (50.0, 50.0, 90.0)
    assert jct.p99 == pytest.approx(99.0)


def test_queueing_is_from_submission_to_the_first_slots():
    result = summary_of(good_run())
    assert [job.queue_s for job in result.per_job] == [2.0, 4.0]
    assert result.queue_s.mean == 3.0


def test_makespan_is_from_the_first_submission_to_the_last_end():
    assert summary_of(good_run()).makespan_s == 16.0


def test_throughput_and_goodput_of_the_cluster():
    result = summary_of(good_run())
    assert result.throughput.cluster_mean == (1600 + 480) / 16
    assert result.goodput.cluster_mean == 16 * (80 + 30) / 16


def test_examples_of_lost_work_count_as_processed():
    """a shows 320, 960, then 500 after a loss: 960 were processed."""
    last = only(good_run(), TrainingSample, "a", 2)
    happenings = swap(good_run(), last, replace(last, total_examples=500))
    assert summary_of(happenings).throughput.cluster_mean == (960 + 480) / 16


def test_efficiency_is_the_mean_over_the_time_of_the_samples():
    # 2 s and 3 s at M0 with efficiency 1, 4 s at twice M0 with gain 1.5.
    assert summary_of(good_run()).efficiency_mean == pytest.approx((5 * 1.0 + 4 * 0.75) / 9)


def test_utilisation_counts_training_and_verifying_slots():
    # a: 4 s x 1 + 6 s x 2, its verifier 2 s, b: 10 s; of 4 slots for 16 s.
    assert summary_of(good_run()).slot_utilisation == (4 + 12 + 2 + 10) / 64


def test_utilisation_is_of_the_slots_that_were_there():
    left = AgentLeft(node="n1", incarnation="i1", reason="it stopped")
    assert summary_of(add(good_run(), "scheduler", 124.0, left)).slot_utilisation == 28 / (14 * 4 + 2 * 2)


def test_replicas_and_batch_are_means_over_time():
    a, b = summary_of(good_run()).per_job
    assert (a.replicas_mean, b.replicas_mean) == (1.6, 1.0)
    assert a.batch_mean == pytest.approx((2 * 16 + 4 * 32) / 6)
    assert b.batch_mean == 16.0


def test_rescales_are_the_groups_after_the_first_and_changes_of_batch_are_none():
    happenings = add(
        good_run(),
        "agent-n0",
        119.5,
        BatchChanged(job_id="b", generation=2, config=BATCH_16, total_batch=16, step=9),
    )
    happenings = add(
        happenings, "agent-n0", 124.5, generation("b", 3, (N0,), progress=30.0, seconds_lost=1.5)
    )
    result = summary_of(happenings)
    assert (result.rescales.count, result.rescales.seconds) == (2, 1.75)
    assert [job.rescales for job in result.per_job] == [1, 1]


def test_metric_target_and_verdict_of_each_job():
    a, b = summary_of(good_run()).per_job
    assert (a.metric, a.target, a.verified) == (0.96, 0.95, True)
    assert (b.metric, b.target, b.verified) == (None, 0.95, False)


def test_an_unfinished_run_has_no_makespan_but_means_up_to_its_last_event():
    result = summary_of(without(good_run(), *B_ENDS, RunEnded(reason="stopped")))
    assert result.makespan_s is None
    assert result.goodput.cluster_mean == pytest.approx(16 * (80 + 30) / 16.5)
    assert result.audit.ok


def test_a_measure_that_a_log_cannot_give_is_null_and_not_zero():
    # Of the scheduler alone: decisions and ends, no sample, no model.
    result = summary_of(scheduler_happenings())
    assert result.throughput.cluster_mean is None
    assert result.efficiency_mean is None
    assert result.goodput.modelled_over_realised is None
    assert msgspec.structs.astuple(result.fairness) == (None, None, None, None)
    assert [(job.batch_mean, job.rho) for job in result.per_job] == [(None, None), (None, None)]
    assert result.slot_utilisation == 28 / 64


def test_an_empty_run_is_all_null():
    result = summary_of([])
    assert (result.policy, result.makespan_s, result.slot_utilisation) == (None, None, None)
    assert (result.goodput.cluster_mean, result.jct_s.mean, result.per_job) == (None, None, ())
    assert result.rescales.count == 0


# --------------------------------------------------------------------------- modelled and realised


def test_modelled_over_realised_compares_the_same_seconds():
    # From 119 to 121 at 2 x 16 across nodes: a step is 0.16 + 0.04 s, 160 examples/s at efficiency 0.75,
    # so 240 useful examples were predicted, and 16 x (80 - 50) realised.
    assert summary_of(good_run()).goodput.modelled_over_realised == pytest.approx(240 / 480)


def test_a_fit_predicts_nothing_before_it():
    happenings = add(without(good_run(), FITTED), "collector", 119.5, FITTED)
    assert summary_of(happenings).goodput.modelled_over_realised is None


def test_the_newest_fit_is_the_one_in_force():
    slower = replace(FITTED, parameters=replace(PARAMETERS, alpha_n=0.24))
    happenings = add(good_run(), "collector", 118.5, slower)
    assert summary_of(happenings).goodput.modelled_over_realised == pytest.approx(120 / 480)


def test_no_window_over_a_rescale_is_compared():
    run = history_of(add(without(good_run(), FITTED), "collector", 0.0, FITTED))
    assert modelled_over_realised(run) == pytest.approx(240 / 480)  # 115 to 119 is left out
