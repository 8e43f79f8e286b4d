"""`coadapt fidelity` on runs that were themselves simulated: the simulation must reproduce them exactly."""

import json
import shutil
from functools import partial
from pathlib import Path

import msgspec
import pytest

from common.config import Config, RunConfig, SchedulerConfig
from services.scheduler.policies.registry import make_policy
from services.simulator.case_from_run import case_from_run
from services.simulator.run_case import make_world, simulate
from tests.fixtures.profiles import COSTS, write_profiles
from tests.fixtures.simulation_cases import TWO_JOBS, case_of


@pytest.fixture
def experiment(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with two runs as a stack leaves them, and the profiles with which they were simulated."""
    profiles, place, jobs = write_profiles(tmp_path / "profiles"), tmp_path / "made", tmp_path / "two.toml"
    jobs.write_text(TWO_JOBS)
    for policy in ("fixed", "pollux"):
        case = case_of(
            "calibrated", workload=jobs, policy=policy, profiles=profiles, round_s=1.5, seed=3, out=place
        )
        simulate(case)
        run = place / case.run_id
        config = Config(run=RunConfig(seed=3), scheduler=SchedulerConfig(policy=policy))
        config = msgspec.structs.replace(
            config, collector=msgspec.structs.replace(config.collector, memory=False)
        )
        (run / "config.json").write_bytes(msgspec.json.encode(config))
        (run / "workload.toml").write_text(TWO_JOBS)
    return place, profiles


@pytest.fixture
def fidelity(coadapt):
    return partial(coadapt, "fidelity")


def test_a_case_takes_everything_from_the_run(experiment: tuple[Path, Path]) -> None:
    place, profiles = experiment
    found = case_from_run(place / "two-pollux-3", profiles, place)
    assert (found.run_id, found.policy, found.seed) == ("two-pollux-3", "pollux", 3)
    assert (found.round_s, found.nodes, found.slots, found.memory) == (1.5, 2, 4, False)


def configure(run: Path, section: str, **changes: float) -> None:
    path = run / "config.json"
    config = json.loads(path.read_bytes())
    config[section] |= changes
    path.write_text(json.dumps(config))


def test_the_assumed_restart_time_is_that_of_the_run(experiment: tuple[Path, Path]) -> None:
    place, profiles = experiment
    configure(place / "two-pollux-3", "scheduler", restart_penalty_s=7.0)
    found = case_from_run(place / "two-pollux-3", profiles, place)
    world = make_world(found, make_policy("pollux"))
    assert world.restart_s == 7.0
    assert world._resize_s is None, "what a resize takes is still as measured"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("key", "value", "default"),
    [("sample_every_s", 0.25, "0.5"), ("warmup_steps", 5, "3"), ("newcomers_timeout_s", 9.0, "3")],
)
def test_a_run_with_other_trainer_settings_than_the_world_is_refused(
    fidelity, experiment, key: str, value: float, default: str
) -> None:
    place, profiles = experiment
    for run in ("two-fixed-3", "two-pollux-3"):
        configure(place / run, "trainer", **{key: value})
    code, _, err = fidelity(place, "--profiles", profiles)
    assert code == 2
    assert f"trainer.{key} {value:g}; the world `calibrated` has {default}" in err


def test_settings_that_matter_only_after_failures_may_differ(experiment: tuple[Path, Path]) -> None:
    place, profiles = experiment
    configure(place / "two-pollux-3", "trainer", verify_timeout_s=20.0)
    assert case_from_run(place / "two-pollux-3", profiles, place).policy == "pollux"


def test_simulated_runs_agree_with_themselves_and_are_replaced_each_time(fidelity, experiment) -> None:
    place, profiles = experiment
    for _ in range(2):
        code, out, err = fidelity(place, "--profiles", profiles, "--json", "-j", 1)
        assert code == 0, err
        found = json.loads(out)
        assert found["mean_jct_error"] == {"fixed": 0.0, "pollux": 0.0}
        assert (found["sets_agreeing"], found["left_out"]) == (1, [])
        assert found["rank_correlation"]["overall"] == 1.0
        assert (place / "fidelity.json").read_text() == out
    simulated = place.with_name("made-simulated")
    assert {path.name for path in simulated.iterdir()} == {"two-fixed-3", "two-pollux-3"}
    assert {path.name for path in place.parent.iterdir()} == {
        "profiles",
        "made",
        "made-simulated",
        "two.toml",
    }


def test_a_run_can_be_simulated_at_its_own_step_times(fidelity, experiment) -> None:
    place, profiles = experiment
    for table in (*profiles.glob("*/placements.csv"), *profiles.glob("*/scalability.csv")):
        header, *rows = (line.split(",") for line in table.read_text().splitlines())
        slower = [[*row[:-2], *(str(1.25 * float(seconds)) for seconds in row[-2:])] for row in rows]
        table.write_text("".join(",".join(row) + "\n" for row in (header, *slower)))
    machine = profiles / "machine.toml"
    slow = f"evaluation_slot_s = {1.25 * COSTS['evaluation_slot_s']}"
    machine.write_text(machine.read_text().replace(f"evaluation_slot_s = {COSTS['evaluation_slot_s']}", slow))

    def errors(*options: str) -> dict[str, float]:
        code, out, err = fidelity(place, "--profiles", profiles, "--json", "-j", 1, *options)
        assert code == 0, err
        return json.loads(out)["mean_jct_error"]

    assert min(errors().values()) > 0.05
    assert errors("--own-steps") == {
        "fixed": pytest.approx(0.0, abs=0.01),
        "pollux": pytest.approx(0.0, abs=0.01),
    }
    assert "Step times are scaled" in (place / "fidelity-own-steps.md").read_text()
    assert "Step times are scaled" not in (place / "fidelity.md").read_text()


def test_a_copy_of_a_run_is_left_out(fidelity, experiment) -> None:
    place, profiles = experiment
    shutil.copytree(place / "two-pollux-3", place / "two-pollux-3-copy")
    code, out, _ = fidelity(place, "--profiles", profiles, "--json", "-j", 1)
    found = json.loads(out)
    assert (code, found["runs"]) == (1, 2)
    why = "same set, policy and seed as two-pollux-3"
    assert found["left_out"] == [{"run": "two-pollux-3-copy", "why": why}]


def test_an_incomplete_run_is_named_and_the_others_are_simulated(fidelity, experiment) -> None:
    place, profiles = experiment
    assert fidelity(place, "--profiles", profiles, "-j", 1)[0] == 0
    (place / "two-pollux-3" / "workload.toml").unlink()
    code, out, err = fidelity(place, "--profiles", profiles, "--json", "-j", 1)
    assert (code, list(json.loads(out)["mean_jct_error"])) == (1, ["fixed"])
    assert [entry["run"] for entry in json.loads(out)["left_out"]] == ["two-pollux-3"]
    assert "two-pollux-3/workload.toml: no such file" in err
    (place / "two-fixed-3" / "workload.toml").unlink()
    code, _, err = fidelity(place, "--profiles", profiles)
    assert code == 2
    assert "two-fixed-3/workload.toml: no such file" in err
    code, _, err = fidelity(place.parent / "profiles", "--profiles", profiles)
    assert code == 2
    assert "no run in it" in err


def test_a_run_of_an_unknown_policy_does_not_stop_the_others(fidelity, experiment) -> None:
    place, profiles = experiment
    config = place / "two-pollux-3" / "config.json"
    config.write_text(config.read_text().replace('"pollux"', '"theirs"'))
    code, out, err = fidelity(place, "--profiles", profiles, "--json", "-j", 1)
    assert code == 1
    assert err.startswith("two-pollux-3: policy 'theirs': not one of ")
    (left_out,) = json.loads(out)["left_out"]
    assert left_out["run"] == "two-pollux-3"
    assert left_out["why"].startswith("was not simulated: policy 'theirs': not one of ")
    assert list(json.loads(out)["mean_jct_error"]) == ["fixed"]


def test_profiles_of_another_slot_speed_are_refused(fidelity, experiment) -> None:
    place, profiles = experiment
    machine = profiles / "machine.toml"
    machine.write_text(machine.read_text().replace("slot_speed = 0.2", "slot_speed = 0.5"))
    code, _, err = fidelity(place, "--profiles", profiles)
    assert code == 2
    assert "were measured at 0.5" in err
