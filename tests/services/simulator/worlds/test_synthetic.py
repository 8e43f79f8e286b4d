"""The synthetic world: its jobs, their simulation, and impossible jobs."""

from pathlib import Path

import pytest

from analysis.log.audit import audit
from analysis.log.find_logs import find_logs
from analysis.log.frames import read
from analysis.log.history import history
from common.eventlog import EVENTS_FILE
from common.types import Node
from services.scheduler.policies.registry import make_policy
from services.simulator.engine import Simulation, SimulationPlan
from services.simulator.run_case import simulate
from services.simulator.worlds.synthetic import APPLICATIONS, RESTART_S, SyntheticWorld, draw_model, generate
from tests.fixtures.simulation_cases import synthetic_case, write_table
from workloads.files.workload_file import Arrival, JobFields, check_spec, complete_spec


def test_a_job_depends_only_on_the_seed_and_its_name() -> None:
    assert draw_model("small", "a", 1) == draw_model("small", "a", 1)
    assert draw_model("small", "a", 1) != draw_model("small", "a", 2)
    assert draw_model("small", "a", 1) != draw_model("small", "b", 1)
    noise = [s.var for s in draw_model("large", "a", 1).statistics]
    assert noise == sorted(noise)
    assert draw_model("small", "a", 1).progress <= draw_model("small", "a", 1).declared_progress


@pytest.mark.parametrize("slots", [1, 6, 4096])
def test_generated_jobs_are_valid_on_any_cluster_and_arrive_in_order(slots: int) -> None:
    workload = generate(200, 3, slots)
    assert workload == generate(200, 3, slots)
    times_s = [row.at_s for row in workload.rows]
    assert times_s == sorted(times_s)
    assert all(check_spec(row.spec, APPLICATIONS, slots) == [] for row in workload.rows)
    assert {row.spec.application for row in workload.rows} == set(APPLICATIONS)


def test_the_oracle_predicts_the_end_of_a_job() -> None:
    world = SyntheticWorld(seed=5)
    fields = JobFields(application="medium", id="a", replicas=6, batch_size=192)
    spec = world.add_job(complete_spec(fields, APPLICATIONS, "a", 0))
    expected_s = RESTART_S + world.remaining_steps("a") * world.step_time_s("a", 6)
    nodes = [Node(name=f"n{n}", slots=4, slot_speed=1.0) for n in range(2)]
    plan = SimulationPlan(
        run_id="one",
        workload="one",
        arrivals=[Arrival(at_s=0.0, spec=spec)],
        nodes=nodes,
        round_s=60.0,
        seed=0,
    )
    run = Simulation(plan, world, make_policy("fixed"), clock=lambda: 0.0).run()
    (ended,) = run.state.ended.values()
    assert ended.ended_s == pytest.approx(60.0 + expected_s)


@pytest.mark.parametrize("policy", ["pollux", "srtf"])
def test_the_same_seed_gives_the_same_log_which_passes_the_audit(tmp_path: Path, policy: str) -> None:
    logs = []
    for name in ("one", "two"):
        result = simulate(synthetic_case(policy, out=tmp_path / name))
        assert len(result.jcts_s) == 12
        assert result.failed == {}
        assert result.refused == {}
        assert result.stalled == ""
        (path,) = find_logs(tmp_path / name)
        logs.append(path)
    assert logs[0].name == EVENTS_FILE
    assert logs[0].read_bytes() == logs[1].read_bytes()
    assert audit(history(read(logs[0]))).findings == ()


def test_an_impossible_job_is_refused_with_the_reason_and_the_others_run(tmp_path: Path) -> None:
    workload = write_table(
        tmp_path,
        "late,90000,small,1,128",
        "huge,0,large,17,512",
        "batch,0,small,1,5000",
        "thin,0,small,16,128",
        "fine,0,small,2,256",
        "also,0,small,2,256",
    )
    result = simulate(synthetic_case("tiresias", workload=workload, jobs=0))
    assert sorted(result.jcts_s) == ["also", "fine", "late"]
    assert result.refused["huge"] == "replicas 17: allowed: at most 16, the slots of the cluster"
    assert result.refused["batch"] == "batch_size 5000: allowed: 128 to 4096"
    assert result.refused["thin"].startswith("batch_size 128: 16 replicas cannot share it")
    assert result.jcts_s["late"] < 90_000


def test_every_policy_completes_every_job() -> None:
    for name in ("fixed", "dynamic", "throughput", "coadapt", "tiresias:threshold_slot_s=7200", "optimus"):
        result = simulate(synthetic_case(name, jobs=6))
        assert len(result.jcts_s) == 6, name
        assert not result.stalled
