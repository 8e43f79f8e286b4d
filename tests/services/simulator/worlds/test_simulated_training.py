"""The steps of a simulated training, and the samples of its rank 0."""

from pathlib import Path

import pytest

from common.protocol import ReplicaOrder
from common.types import JobConfig, Placement
from services.simulator.perturbation import UNPERTURBED
from services.simulator.worlds.simulated_training import TRAINER, SimulatedTraining
from tests.fixtures.profiles import PASS_S, add_passes, write_profiles
from workloads.applications import applications
from workloads.files.measured_profile import read_profiles
from workloads.files.workload_file import JobFields, complete_spec


def test_samples_have_the_pass_time_measured_for_the_placement(tmp_path: Path) -> None:
    folder = write_profiles(tmp_path)
    add_passes(folder / "digits-cnn" / "placements.csv", of_one=0.03, of_groups=0.01)
    measured = read_profiles(folder, applications())["digits-cnn"]
    spec = complete_spec(JobFields(application="digits-cnn"), {"digits-cnn": measured.spec}, "a", 1)
    training = SimulatedTraining(spec, measured, UNPERTURBED)
    order = ReplicaOrder(
        generation=1,
        group=1,
        rank=0,
        world_size=2,
        nodes=1,
        config=JobConfig(atomic_batch=16, accumulation=1),
        store_host="",
        store_port=0,
        allocation=(Placement(node="node-1", replicas=2),),
    )
    step_s = PASS_S["digits-cnn"] * 2 + 0.02
    steps = [training.next_step(order) for _ in range(TRAINER.warmup_steps + 1)]
    assert steps[0].seconds == pytest.approx(step_s + 0.01)
    for step in steps:
        training.take(step, order)
    sample = training.sample(order, now_s=1.0)
    assert sample is not None
    assert (sample.accumulation_s, sample.step_s) == (pytest.approx(0.01), pytest.approx(step_s))
