import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from analysis.fidelity.fidelity import compare, compare_folders, encoded
from analysis.fidelity.run_pairs import JobFigures, Pair
from analysis.log.find_logs import NoRuns
from analysis.report.fidelity_report import draw, markdown
from analysis.run.breakdown import Breakdown, breakdown
from analysis.run.step_times import StepTime, step_times
from common.protocol import GenerationStarted, RoundDecided
from common.types import JobConfig
from tests.fixtures.logs import Happening, add, changed, good_run, history_of, save, written
from tests.fixtures.runs import happenings
from workloads.applications import applications
from workloads.files.measured_profile import PROFILES, read_profiles

PARTS = ("allocations", "configs", "reasons")
STUDENTS_T_ONE = 12.706
"""97.5%, one degree of freedom."""


def job(jct_s: float, queue_s: float = 0.0, application: str = "matfac") -> JobFigures:
    parts = Breakdown(
        queue_s=queue_s,
        wait_s=0.0,
        start_s=1.0,
        training_s=jct_s - queue_s - 2.0,
        rescale_s=0.0,
        preempted_s=0.0,
        verification_s=1.0,
    )
    return JobFigures(application, jct_s, parts, progress=100.0, replicas=2.0, batch=64.0, rescales=1)


def pair(name: str, policy: str, seed: int, real: list[float], simulated: list[float]) -> Pair:
    return Pair(
        run=f"{name}-{policy}-{seed}",
        set=name,
        policy=policy,
        seed=seed,
        real={f"j{k}": job(jct_s) for k, jct_s in enumerate(real)},
        simulated={f"j{k}": job(jct_s, queue_s=2.0) for k, jct_s in enumerate(simulated)},
    )


def test_the_parts_of_a_completion_time_are_read_from_the_log():
    run = history_of(good_run())
    assert breakdown(run.jobs["a"]) == Breakdown(
        queue_s=2.0, wait_s=0.5, start_s=0.5, training_s=14.0 - 2.0 - 0.5 - 0.5 - 0.25 - 2.0, rescale_s=0.25,
        preempted_s=0.0, verification_s=2.0,
    )  # fmt: skip
    assert breakdown(run.jobs["b"]) is None
    (alone, together) = step_times(run)
    assert (alone.placement, alone.step_s, alone.weight_s) == ((1,), pytest.approx(0.1), 5.0)
    assert (sum(together.placement), together.weight_s) == (2, 4.0)


def test_seconds_without_slots_after_the_first_ones_are_preempted():
    told = add(good_run(), "scheduler", 114.0, changed("a", "running", "pending"))
    told = add(told, "scheduler", 116.0, changed("a", "pending", "starting"))
    parts = breakdown(history_of(told).jobs["a"])
    assert parts is not None
    assert parts.preempted_s == 2.0
    # Its slots are there again at 116; the next group's seconds lost end with its first step, at 117.
    assert parts.wait_s == 0.5 + (117.0 - 0.25 - 116.0)
    assert sum(getattr(parts, name) for name in parts.__struct_fields__) == 14.0


def test_waiting_for_somebody_to_leave_its_slots_is_no_training():
    told = [replace(h, event=structs.replace(h.event, first_step_s=0.1)) if h.t_s == 113.0 and
            isinstance(h.event, GenerationStarted) else h for h in good_run()]  # fmt: skip
    parts = breakdown(history_of(told).jobs["a"])
    assert parts is not None
    assert parts.wait_s == pytest.approx(113.0 - 0.1 - 0.5 - 112.0)
    assert parts.training_s == pytest.approx(14.0 - 2.0 - 0.4 - 0.5 - 0.25 - 2.0)


def test_a_first_step_at_the_very_decision_ends_the_waiting():
    run = history_of(happenings("s", "fixed", 1, [20.0]))
    parts = breakdown(run.jobs["job-0"])
    assert parts is not None
    assert (parts.wait_s, parts.training_s) == (0.0, pytest.approx(18.75))


def test_errors_are_of_means_over_runs_by_policy_and_set():
    found = compare(
        [
            pair("steady", "fixed", 1, [10.0, 30.0], [11.0, 33.0]),
            pair("burst", "fixed", 1, [40.0], [36.0]),
            pair("steady", "pollux", 1, [10.0, 10.0], [10.0, 12.0]),
        ]
    )
    assert found.mean_jct_error == {"fixed": pytest.approx(58 / 60 - 1), "pollux": pytest.approx(0.1)}
    assert found.mean_jct_error_by_set == {
        "burst": pytest.approx(-0.1),
        "steady": pytest.approx((22 + 11) / 30 - 1),
    }
    assert found.mean_jct_error_by_set_and_policy == {
        "burst": {"fixed": pytest.approx(-0.1)},
        "steady": {"fixed": pytest.approx(0.1), "pollux": pytest.approx(0.1)},
    }
    assert found.job_jct_error == {
        "overall": pytest.approx((0.1 + 0.1 + 0.1 + 0.0 + 0.2) / 5),
        "fixed": pytest.approx(0.1),
        "pollux": pytest.approx(0.1),
    }
    assert (found.runs, found.jobs) == (3, 5)
    assert found.parts["fixed"]["queue_s"].simulated == 2.0
    assert found.applications["matfac"]["jct_s"].real == 20.0


def test_ranks_are_correlated_within_runs_and_over_all():
    found = compare(
        [
            pair("steady", "fixed", 1, [10.0, 20.0, 30.0], [1.0, 2.0, 3.0]),
            pair("steady", "fixed", 2, [10.0, 20.0, 30.0], [2.0, 1.0, 3.0]),
            pair("steady", "fixed", 3, [10.0, 10.0], [2.0, 1.0]),
        ]
    )
    assert [run.rank_correlation for run in found.per_run] == [1.0, 0.5, None]
    assert found.rank_correlation.within_mean == 0.75
    assert found.rank_correlation.within_least == 0.5
    assert found.rank_correlation.overall is not None


def test_who_wins_each_set_and_where_the_sides_differ_by_how_much():
    found = compare(
        [
            *(pair("steady", "fixed", seed, [20.0 + seed], [21.0]) for seed in (1, 2)),
            *(pair("steady", "pollux", seed, [10.0], [11.0]) for seed in (1, 2)),
            *(pair("burst", "fixed", seed, [10.0], [12.0]) for seed in (1, 2)),
            *(pair("burst", "pollux", seed, [seed * 8.0], [11.0]) for seed in (1, 2)),
        ]
    )
    steady, burst = found.winners["steady"], found.winners["burst"]
    assert (steady.real, steady.simulated, steady.agree, steady.apart) == ("pollux", "pollux", True, 0.0)
    assert steady.could_be_noise is None
    assert (burst.real, burst.simulated, burst.agree) == ("fixed", "pollux", False)
    assert burst.apart == pytest.approx(math.sqrt(0.8 * 1.6) - 1)
    assert (burst.seeds, burst.seeds_for_real, burst.could_be_noise) == (2, 1, True)
    assert (burst.runner_up, burst.margin_noise) == ("pollux", True)
    assert burst.margin == pytest.approx(math.sqrt(0.8 * 1.6))
    assert steady.margin == pytest.approx(math.sqrt(2.1 * 2.2))
    assert steady.margin_low == pytest.approx(
        steady.margin * math.exp(-STUDENTS_T_ONE * math.log(2.2 / 2.1) / 2), rel=1e-3
    )
    assert steady.margin_noise is False
    assert (found.sets_agreeing, found.sets_differing_within_noise) == (1, 1)
    assert "the same policy on 1 of 2 sets, and on 1 more within the noise" in markdown(found)
    assert found.policy_order == {"overall": 1.0, "burst": -1.0, "steady": 1.0}


def test_a_difference_that_holds_with_every_seed_is_no_noise():
    found = compare(
        [
            *(pair("burst", "fixed", seed, [10.0 + seed], [12.0]) for seed in (1, 2, 3)),
            *(pair("burst", "pollux", seed, [14.0 + 1.1 * seed], [11.0]) for seed in (1, 2, 3)),
        ]
    )
    assert found.winners["burst"].could_be_noise is False
    assert "pollux was 35.1% behind, in 3 of 3 seeds |" in markdown(found)


def test_only_seeds_that_every_policy_has_tell_who_wins():
    """Over all runs `pollux` had the least mean, since it lacks the hard seed 2."""
    runs = [
        pair("steady", "fixed", 1, [9.0], [9.0]),
        pair("steady", "fixed", 2, [90.0], [90.0]),
        pair("steady", "pollux", 1, [10.0], [10.0]),
    ]
    found = compare(runs)
    winner = found.winners["steady"]
    assert (winner.real, winner.simulated, winner.seeds) == ("fixed", "fixed", 1)
    assert (winner.runner_up, winner.margin, winner.margin_noise) == ("pollux", pytest.approx(10 / 9), None)
    assert "pollux 1.111; one seed, no interval" in markdown(found)
    assert "over the seeds that all compared policies have" in found.winner_rule
    assert found.policy_order == {"overall": 1.0, "steady": 1.0}

    alone = compare(runs[1:])
    assert alone.winners == {}
    assert [(left.run, left.why) for left in alone.left_out] == [
        ("steady", "no winner is told: there is no seed that all its policies have")
    ]


def test_every_seed_counts_alike_however_long_it_lasts():
    found = compare(
        [
            *(
                pair("s", "fixed", seed, [jct_s], [jct_s])
                for seed, jct_s in ((1, 10.0), (2, 10.0), (3, 100.0))
            ),
            *(
                pair("s", "pollux", seed, [jct_s], [jct_s])
                for seed, jct_s in ((1, 5.0), (2, 5.0), (3, 120.0))
            ),
        ]
    )
    assert found.winners["s"].real == "pollux", "its arithmetic mean is the larger one"


def test_ratios_of_policies_are_taken_pair_by_pair():
    found = compare(
        [
            pair("steady", "fixed", 1, [10.0], [10.0]),
            pair("steady", "fixed", 2, [90.0], [10.0]),
            pair("steady", "pollux", 1, [5.0], [8.0]),
            pair("burst", "pollux", 1, [5.0], [8.0]),
        ]
    )
    assert list(found.ratios) == ["pollux/fixed"]
    assert (found.ratios["pollux/fixed"].real, found.ratios["pollux/fixed"].simulated) == pytest.approx(
        (0.5, 0.8)
    )


def test_step_times_are_compared_in_the_configurations_that_both_sides_had():
    def steps(*rows: tuple[int, float, float]) -> tuple[StepTime, ...]:
        return tuple(
            StepTime("matfac", (n,), JobConfig(64), step_s, weight_s) for n, step_s, weight_s in rows
        )

    one = pair("steady", "fixed", 1, [10.0], [10.0])
    one = structs.replace(
        one,
        real_steps=steps((1, 0.1, 30.0), (2, 0.2, 10.0)),
        simulated_steps=steps((1, 0.2, 5.0), (4, 9.0, 1.0)),
    )
    other = structs.replace(one, run="other", real_steps=steps((1, 0.3, 10.0)), simulated_steps=())
    found = compare([one, other]).applications["matfac"]["step_s"]
    assert (found.real, found.simulated, found.error) == pytest.approx((0.12, 0.2, 2 / 3))


def late(happenings: list[Happening], seconds: float) -> list[Happening]:
    """All that comes after the first training, so much later."""
    return [replace(h, t_s=h.t_s + seconds) if h.t_s > 119.5 else h for h in happenings]


def only_a(happenings: list[Happening]) -> list[Happening]:
    """Without the job that is cancelled: a run with it does not count."""
    kept = []
    for happening in happenings:
        event = happening.event
        named = getattr(event, "job_id", None) or getattr(getattr(event, "spec", None), "id", None)
        if isinstance(event, RoundDecided):
            parts = {name: {"a": getattr(event, name)["a"]} for name in PARTS if "a" in getattr(event, name)}
            event = structs.replace(event, **{name: parts.get(name, {}) for name in PARTS})
        if named in (None, "a"):
            kept.append(replace(happening, event=event))
    return kept


def test_folders_are_compared_run_by_run_and_the_files_say_so(tmp_path: Path, capsys):
    real, simulated = tmp_path / "real", tmp_path / "simulated"
    for policy in ("fixed", "pollux"):
        save(written(only_a(good_run()), f"s-{policy}-7"), real / f"s-{policy}-7")
    save(written(late(only_a(good_run()), 1.4), "s-fixed-7"), simulated / "s-fixed-7")
    for policy in ("fixed", "pollux"):
        facts = {"set": "s", "requests": "tuned", "policy": policy, "seed": 7}
        (real / f"s-{policy}-7" / "run.json").write_text(json.dumps(facts))
    (real / "experiment.json").write_text('{"date": "2026-12-01", "machine": {"cores": 2}}')
    found, pairs = compare_folders(real, simulated, read_profiles(PROFILES, applications()))
    assert found.batch_efficiency["fixed"].error == 0.0, "both trained with the same batches"
    assert found.mean_jct_error == {"fixed": pytest.approx(0.1)}
    assert [(left.run, left.why) for left in found.left_out] == [("s-pollux-7", "was not simulated")]
    assert (found.date, found.machine) == ("2026-12-01", {"cores": 2})
    assert found.per_run[0].set == "s-tuned"

    assert markdown(found).startswith("# Simulator against reality")
    assert json.loads(encoded(found))["runs"] == 1

    draw(pairs, tmp_path / "fidelity.svg")
    assert (tmp_path / "fidelity.svg").read_text().count("<svg") == 1


def test_nothing_to_compare_is_said(tmp_path: Path):
    save(written(only_a(good_run())), tmp_path / "real" / "s-pollux-7")
    profiles = read_profiles(PROFILES, applications())
    with pytest.raises(NoRuns, match="no run to compare"):
        compare_folders(tmp_path / "real", tmp_path / "nowhere", profiles)
    with pytest.raises(NoRuns, match="no such file or folder"):
        compare_folders(tmp_path / "nowhere", tmp_path / "real", profiles)
