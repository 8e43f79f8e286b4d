"""Measured profiles: reading a folder, interpolating between its points, and reporting its problems."""

import math
from pathlib import Path

import pytest

from common.goodput.model import gain
from common.lifecycle import UserError
from common.types import GradientStatistics
from tests.fixtures.profiles import COSTS, NOISE, PASS_S, add_passes, needed_at, write_profiles
from workloads.applications import applications
from workloads.files.measured_profile import MeasuredProfile, read_machine, read_profiles

APPLICATIONS = applications()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profiles(tmp_path_factory.mktemp("profiles"))


@pytest.fixture(scope="module")
def digits(folder: Path) -> MeasuredProfile:
    return read_profiles(folder, APPLICATIONS)["digits-cnn"]


def pass_s(atomic: float) -> float:
    return PASS_S["digits-cnn"] * (1 + atomic / 16)


def test_all_applications_of_a_folder_are_read_with_their_costs(folder: Path) -> None:
    profiles = read_profiles(folder, APPLICATIONS)
    assert profiles.keys() == APPLICATIONS.keys()
    for name, measured in profiles.items():
        assert measured.spec == APPLICATIONS[name]
        assert measured.costs.start_s == COSTS["start_s"]
        assert measured.batches[0] == measured.spec.initial_batch_size
        assert measured.batches[-1] == measured.spec.max_batch_size
    assert read_machine(folder).slot_speed == 0.2


def test_a_placement_is_found_in_any_rotation_and_between_local_batches(digits: MeasuredProfile) -> None:
    assert digits.times((1,), 16) == (pytest.approx(pass_s(16)), 0.0)
    assert digits.times((1,), 24) == (pytest.approx(pass_s(24)), 0.0)
    assert digits.times((2, 1), 8) == digits.times((1, 2), 8)
    assert digits.times((1, 0, 2), 8) == digits.times((1, 2), 8)
    assert digits.times((3, 1), 8) == (pytest.approx(pass_s(8) + 0.06), pytest.approx(0.06))


def test_other_groups_lie_between_those_that_were_measured_on_as_many_nodes(digits: MeasuredProfile) -> None:
    assert digits.times((4, 4), 8) == (pytest.approx(pass_s(8) + 0.08), pytest.approx(0.08))
    assert digits.times((3, 4), 8) == (pytest.approx(pass_s(8) + 0.075), pytest.approx(0.075))
    assert digits.times((1, 4), 8) == (pytest.approx(pass_s(8) + 0.065), pytest.approx(0.065))
    assert digits.times((1, 1, 1, 1), 8) == digits.times((2, 2), 8), "two nodes are the most measured"
    assert digits.most_replicas == 8
    with pytest.raises(UserError, match="digits-cnn: the tables say nothing of 9 replicas on 2 nodes"):
        digits.times((5, 4), 8)


def test_a_pass_is_a_step_without_synchronising_unless_it_was_measured(digits: MeasuredProfile) -> None:
    assert digits.pass_s((2, 2), 16) == pytest.approx(pass_s(16))
    assert digits.step_s((2, 2), 16, 2) == pytest.approx(3 * pass_s(16) + 0.06)


def test_measured_passes_are_those_of_the_placement(tmp_path: Path) -> None:
    folder = write_profiles(tmp_path)
    add_passes(folder / "digits-cnn" / "placements.csv", of_one=0.03, of_groups=0.01)
    add_passes(folder / "digits-cnn" / "scalability.csv", of_groups=0.02)
    digits = read_profiles(folder, APPLICATIONS)["digits-cnn"]
    assert (digits.pass_s((1,), 16), digits.pass_s((2, 2), 16)) == (0.03, 0.01)
    assert digits.pass_s((4, 3), 16) == pytest.approx(0.02)
    assert digits.step_s((2, 2), 16, 0) == pytest.approx(pass_s(16) + 0.06)
    assert digits.step_s((2, 2), 16, 2) == pytest.approx(pass_s(16) + 0.06 + 2 * 0.01)


def test_passes_may_be_in_one_of_the_two_tables_alone(tmp_path: Path) -> None:
    folder = write_profiles(tmp_path)
    add_passes(folder / "digits-cnn" / "placements.csv", of_one=0.03, of_groups=0.01)
    digits = read_profiles(folder, APPLICATIONS)["digits-cnn"]
    assert digits.pass_s((2, 2), 16) == 0.01
    assert digits.pass_s((4, 4), 16) == pytest.approx(pass_s(16))
    assert digits.times((4, 4), 16) == (pytest.approx(pass_s(16) + 0.08), pytest.approx(0.08))


def test_statistics_lie_between_the_rows_and_the_batches_and_are_constant_beyond(
    digits: MeasuredProfile,
) -> None:
    noise, need = NOISE["digits-cnn"], needed_at("digits-cnn", 16)
    first = GradientStatistics(sqr=1.0, var=noise * (1 + 25 / need))
    assert digits.statistics(16, 0.0) == first
    assert digits.statistics(16, 25.0) == first
    assert digits.statistics(16, 30.0).var == pytest.approx(noise * (1 + 30 / need))
    assert digits.statistics(16, 1e6) == digits.statistics(16, 575.0)
    low, high = (digits.statistics(batch, 100.0).var for batch in (32, 64))
    assert digits.statistics(40, 100.0).var == pytest.approx(0.75 * low + 0.25 * high)
    assert digits.statistics(8, 100.0) == digits.statistics(16, 100.0)


def test_steps_before_the_first_row_are_worth_at_most_what_they_were_on_average(tmp_path: Path) -> None:
    path = write_profiles(tmp_path) / "digits-cnn" / "validation-64.csv"
    header, first, *rows = path.read_text().splitlines()
    progress, _, *others = first.split(",")
    begun = [progress, f"{float(progress) / 1.5:g}", *others]
    path.write_text("\n".join([header, ",".join(begun), *rows]) + "\n")
    digits = read_profiles(tmp_path, APPLICATIONS)["digits-cnn"]
    of_statistics = float(gain(digits.statistics(64, 0.0), 4.0))
    assert of_statistics > 1.5
    assert digits.gain(64, 0.0, 4.0) == pytest.approx(1.5, rel=1e-5)
    assert digits.gain(64, float(progress), 4.0) == pytest.approx(of_statistics)
    assert digits.gain(64, 0.0, 1.0) == 1.0, "the short last step of an epoch"


def test_an_evaluation_is_shared_except_for_the_overhead_of_a_group(tmp_path: Path) -> None:
    costs = {"evaluation_slot_s": 0.4, "evaluation_group_s": 0.05}
    digits = read_profiles(write_profiles(tmp_path, costs), APPLICATIONS)["digits-cnn"]
    assert digits.evaluation_s(1) == pytest.approx(0.4)
    assert digits.evaluation_s(4) == pytest.approx(0.15)


def test_statistics_are_trusted_where_those_of_half_the_trainings_were(tmp_path: Path) -> None:
    path = write_profiles(tmp_path) / "digits-cnn" / "validation-16.csv"
    assert read_profiles(tmp_path, APPLICATIONS)["digits-cnn"].statistics(16, 0.0).trusted
    header, *rows = path.read_text().splitlines()
    shares = [0.0, 0.2, 0.8, *(1.0 for _ in rows[3:])]
    path.write_text(
        "\n".join([f"{header},trusted", *(f"{r},{s}" for r, s in zip(rows, shares, strict=True))])
    )
    digits = read_profiles(tmp_path, APPLICATIONS)["digits-cnn"]
    trusted = [digits.statistics(16, progress).trusted for progress in (0, 25, 50, 60, 65, 75, 1e6)]
    assert trusted == [False, False, False, False, True, True, True]


def test_the_needed_progress_is_that_of_the_first_evaluation_that_meets_the_target(
    digits: MeasuredProfile,
) -> None:
    assert digits.needed_progress(16, 0.965) == needed_at("digits-cnn", 16) == 375.0
    assert digits.needed_progress(32, 0.965) == needed_at("digits-cnn", 32) == 400.0
    assert digits.needed_progress(24, 0.965) == pytest.approx(387.5)
    assert digits.needed_progress(16, 0.5) < 375.0 < digits.needed_progress(16, 0.97)
    assert digits.needed_progress(16, 2.0) == math.inf
    assert digits.needed_progress(24, 2.0) == math.inf


def test_between_a_batch_that_meets_a_target_and_one_that_does_not_it_is_never_met(
    tmp_path: Path,
) -> None:
    folder = write_profiles(tmp_path)
    path = folder / "digits-cnn" / "validation-32.csv"
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([head, rows[0]]) + "\n")
    digits = read_profiles(folder, applications())["digits-cnn"]
    assert digits.needed_progress(32, 0.965) == math.inf
    assert digits.needed_progress(24, 0.965) == digits.needed_progress(48, 0.965) == math.inf
    assert digits.metric(16, 375.0) == 0.965


def test_a_metric_that_falls_meets_its_target_from_above(folder: Path) -> None:
    language = read_profiles(folder, APPLICATIONS)["char-lm"]
    assert language.needed_progress(16, 2.8) == needed_at("char-lm", 16)
    assert language.needed_progress(16, 3.5) < language.needed_progress(16, 2.8)


def test_applications_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    write_profiles(tmp_path)
    text = (tmp_path / "machine.toml").read_text()
    (tmp_path / "machine.toml").write_text(text[: text.index("[applications.char-lm]")])
    assert set(read_profiles(tmp_path, APPLICATIONS)) == {"digits-cnn", "mnist1d-conv"}
    (tmp_path / "machine.toml").write_text(text[: text.index("[applications.")] + "[applications]\n")
    with pytest.raises(UserError, match=r"\[applications\] has none; needed: at least one of digits-cnn"):
        read_profiles(tmp_path, APPLICATIONS)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("machine.toml", None, "machine.toml: cannot be read: .*; `coadapt calibrate` writes the profiles"),
        ("machine.toml", "slot_speed = ", "machine.toml: "),
        ("machine.toml", "nodes = 2\nslots = 4\n[applications]", "missing required field `slot_speed`"),
        ("machine.toml", "slot_speed = 2.0\nnodes = 2\nslots = 4\n[applications]", "slot_speed 2.0: allowed"),
        ("machine.toml", "slot_speed = 0.2\nnodes = 0\nslots = 4\n[applications]", "nodes 0, slots 4"),
        (
            "machine.toml",
            "slot_speed = 0.2\nnodes = 2\nslots = 4\n[applications.digits-cnn]\nstart_s = -1.0\n"
            "resize_s = 0.1\nverify_s = 1.0\nevaluation_slot_s = 0.1",
            "applications.digits-cnn: start_s -1.0: allowed: finite, at least 0",
        ),
        ("matfac/placements.csv", None, "matfac/placements.csv: cannot be read"),
        ("matfac/placements.csv", "placement,local_bsz,step_time\n1,2,3\n", "line 2: needs numbers under"),
        ("matfac/scalability.csv", "", "needs rows of finite numbers"),
        (
            "matfac/scalability.csv",
            "num_nodes,num_replicas,local_bsz,step_time,sync_time,pass_time\n",
            "scalability.csv: needs rows of finite numbers",
        ),
        (
            "matfac/validation-256.csv",
            "progress,metric,grad_sqr,grad_var\n",
            "validation-256.csv: needs rows",
        ),
        ("matfac/validation-256.csv", "progress,metric,grad_sqr,grad_var\n1,x,1,1\n", "line 2: needs num"),
        (
            "matfac/validation-256.csv",
            "progress,iteration,metric,grad_sqr,grad_var\n50,50,1,1,1\n25,25,1,1,1\n",
            "needs rows in order of progress",
        ),
        (
            "matfac/validation-256.csv",
            "progress,iteration,metric,grad_sqr,grad_var\n25,25,1,1,1\n50,50,1,0,0\n",
            "needs rows with a grad_sqr or a grad_var above 0",
        ),
        (
            "matfac/validation-256.csv",
            "progress,iteration,metric,grad_sqr,grad_var\n25,0,1,1,1\n",
            "iteration 0: needs steps up to the first row",
        ),
        (
            "machine.toml",
            "slot_speed = 0.2\nnodes = 2\nslots = 4\n[applications.digits-cnn]\nstart_s = 1.0\n"
            "resize_s = 0.1\nverify_s = 1.0\nevaluation_slot_s = 0.1\nstep_overhead = 0.0",
            "applications.digits-cnn: step_overhead 0: allowed: above 0",
        ),
    ],
)
def test_a_problem_is_named_with_its_file(tmp_path: Path, name: str, text, complaint: str) -> None:
    write_profiles(tmp_path)
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=complaint):
        read_profiles(tmp_path, APPLICATIONS)


def test_a_folder_without_a_training_is_refused(tmp_path: Path) -> None:
    write_profiles(tmp_path)
    for path in (tmp_path / "matfac").glob("validation-*.csv"):
        path.unlink()
    with pytest.raises(UserError, match=r"matfac: no validation-<batch>.csv in it"):
        read_profiles(tmp_path, APPLICATIONS)
