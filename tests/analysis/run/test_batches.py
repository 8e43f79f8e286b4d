"""How near batches come to the best ones, by profiles of a formula (`tests.fixtures.profiles`)."""

from dataclasses import replace

import pytest
from msgspec import structs

from analysis.log.history import RunHistory
from analysis.run.batches import batch_efficiency, best_rate
from common.protocol import TrainingSample
from common.types import JobConfig
from tests.fixtures.logs import Happening, good_run, history_of, spec
from tests.fixtures.profiles import write_profiles
from workloads.applications import applications
from workloads.files.measured_profile import MeasuredProfile, read_profiles
from workloads.files.tuned_requests import configs


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MeasuredProfile]:
    return read_profiles(write_profiles(tmp_path_factory.mktemp("profiles")), applications())


def run_with(config: JobConfig) -> RunHistory:
    """Of `good_run`, in which every sample has this batch."""

    def changed(happening: Happening) -> Happening:
        if not isinstance(happening.event, TrainingSample):
            return happening
        return replace(happening, event=structs.replace(happening.event, config=config))

    return history_of([changed(happening) for happening in good_run()])


def test_the_best_batch_makes_the_most_progress_a_second_of_all_that_are_tried(
    profiles: dict[str, MeasuredProfile],
) -> None:
    measured, job = profiles["digits-cnn"], spec("a")
    best = best_rate(measured, job, (1, 1), 100.0)
    rates = {}
    for config in configs(job, 2):
        batch = config.total_batch(2)
        gain = measured.gain(batch, 100.0, batch / 16)
        rates[batch] = gain / measured.step_s((1, 1), config.atomic_batch, config.accumulation)
    assert best == max(rates.values())
    assert best > min(rates.values())


def test_a_run_is_as_far_from_the_best_batches_as_its_samples(profiles: dict[str, MeasuredProfile]) -> None:
    """Both jobs train on one slot at a time or on two nodes: groups of each are weighted by their seconds."""
    found = batch_efficiency(run_with(JobConfig(atomic_batch=16)), profiles)
    other = batch_efficiency(run_with(JobConfig(atomic_batch=4)), profiles)
    assert found is not None
    assert other is not None
    assert 0.0 < other < found <= 1.0


def test_without_a_profile_of_its_applications_a_run_has_no_figure(
    profiles: dict[str, MeasuredProfile],
) -> None:
    others = {name: measured for name, measured in profiles.items() if name != "digits-cnn"}
    assert batch_efficiency(run_with(JobConfig(atomic_batch=16)), others) is None
