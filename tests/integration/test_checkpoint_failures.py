"""What happens to a job, in real replicas, when its state cannot be saved or read."""

import resource
import shutil
from collections.abc import Callable

import pytest

from common.config import TrainerConfig
from common.protocol import (
    CheckpointFellBack,
    CheckpointSaved,
    GenerationStarted,
    JobRaised,
    JobSaved,
    ReplicaLost,
    TargetReached,
    TrainingSample,
)
from tests.fixtures.replica_fleet import EVERY_STEP, Fleet
from workloads.trainer.checkpoint import saved_in

pytestmark = pytest.mark.timeout(120)
MakeFleet = Callable[..., Fleet]
M0 = 24
OFTEN = TrainerConfig(sample_every_s=1e-9, checkpoint_every_s=0.02, warmup_steps=0)
FULL = "File too large"
"""The kernel's error for a file beyond the limit that stands in for a full disk."""


def fill_disk(fleet: Fleet, room_bytes: int = 100) -> None:
    """Let the replicas write no file larger than this: the kernel refuses it like a full disk."""
    for name in fleet.members:
        pid = fleet.processes[name].pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (room_bytes, resource.RLIM_INFINITY))


def last_step(fleet: Fleet) -> int:
    return fleet.of(TrainingSample)[-1].total_steps


def test_on_a_full_disk_training_goes_on_and_a_preempted_job_resumes_from_its_last_checkpoint(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(OFTEN)
    fleet.order(1, M0)
    fleet.wait_for(CheckpointSaved)
    fill_disk(fleet)
    fell_back = fleet.wait_for(CheckpointFellBack)
    newest = saved_in(fleet.folder)[0]
    assert fell_back.reason == f"the periodic checkpoint could not be saved: {FULL}"
    assert fell_back.fallback == str(newest)
    fleet.wait_for_step(last_step(fleet) + 50)

    (member,) = fleet.members
    generation = fleet.preempt()
    lost = fleet.wait_for(ReplicaLost)
    assert (lost.generation, lost.reason) == (
        generation,
        f"the preempted checkpoint could not be saved: {FULL}",
    )
    assert fleet.wait_for_exit(member) == 0
    assert not fleet.of(JobSaved)

    fleet.order(1, M0)
    started = fleet.wait_for(GenerationStarted, lambda event: event.generation == fleet.generation)
    saved = next(event for event in fleet.of(CheckpointSaved) if event.path == str(newest))
    assert started.state_from == "checkpoint"
    assert started.progress == pytest.approx(saved.progress + 1)
    assert started.progress_lost >= 50
    again = len(fleet.of(CheckpointSaved))
    fleet.wait_for(CheckpointSaved, lambda _: len(fleet.of(CheckpointSaved)) > again)


def test_training_goes_on_when_the_folder_of_the_job_is_deleted(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(OFTEN)
    fleet.order(2, M0 // 2)
    fleet.wait_for(CheckpointSaved)
    shutil.rmtree(fleet.folder)
    fell_back = fleet.wait_for(CheckpointFellBack)
    assert fell_back.reason == "the periodic checkpoint could not be saved: No such file or directory"
    assert fell_back.fallback == ""
    fleet.wait_for_step(last_step(fleet) + 50)


def test_a_final_checkpoint_that_cannot_be_saved_fails_the_job_with_the_reason(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(EVERY_STEP, target=1e9, settings={"sleep_ms": 20.0})
    fleet.order(1, M0)
    fill_disk(fleet)
    raised = fleet.wait_for(JobRaised)
    assert raised.reason == f"the target was met, but the final checkpoint could not be saved: {FULL}"
    assert raised.output_tail == ""
    assert fleet.wait_for_exit(fleet.members[0]) == 1
    assert not fleet.of(TargetReached)


def test_a_job_without_a_usable_checkpoint_starts_over_and_reports_it(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(OFTEN)
    fleet.order(1, M0)
    fleet.wait_for(CheckpointSaved, lambda _: len(fleet.of(CheckpointSaved)) >= 2)
    (member,) = fleet.members
    fleet.preempt()
    fleet.checkpoint = fleet.wait_for(JobSaved).checkpoint
    fleet.wait_for_exit(member)
    newest, previous = saved_in(fleet.folder)
    newest.write_bytes(newest.read_bytes()[:-1])
    previous.write_bytes(b"")

    fleet.order(1, M0)
    started = fleet.wait_for(GenerationStarted, lambda event: event.generation == fleet.generation)
    said = [(event.path, event.fallback) for event in fleet.of(CheckpointFellBack)]
    assert said == [(str(newest), str(previous)), (str(previous), "")]
    assert (started.state_from, started.progress) == ("scratch", 1.0)
    assert started.progress_lost > 1.0
