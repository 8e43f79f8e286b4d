"""What of a step is undone, and who has the state when a step or an evaluation was undone for some alone."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from common.protocol import ReplicaOrder, ReplicaStart
from common.types import JobConfig
from tests.fixtures import tiny_app
from tests.fixtures.replica_fleet import EVERY_STEP, tiny_spec
from tests.workloads.trainer.test_training_state import ADAM, tiny_state
from workloads.applications.interface import Task
from workloads.trainer.elastic import Group, Mailbox
from workloads.trainer.job import TrainingJob
from workloads.trainer.loop import rehearse, step_alone
from workloads.trainer.pacer import Pacer
from workloads.trainer.replica import Replica
from workloads.trainer.training_state import TrainingState

TIMEOUT_S = 20.0


def with_normalisation() -> TrainingState:
    task = tiny_app.build(3, {"single": 1.0, "dropout": 0.5})
    model = nn.Sequential(nn.BatchNorm1d(tiny_app.FEATURES), task.model)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    return TrainingState(tiny_spec(), ADAM, Task(**(vars(task) | {"model": model, "optimizer": adam})))


def restored(state: TrainingState) -> TrainingState:
    """After a rehearsal."""
    rehearse(state)
    return state


@pytest.mark.parametrize("make", [lambda: tiny_state(dropout=0.5), with_normalisation])
def test_a_rehearsal_leaves_no_trace_and_training_goes_on_as_without_it(make: type[TrainingState]) -> None:
    fresh, rehearsed = make(), restored(make())
    assert rehearsed.to_bytes() == fresh.to_bytes()
    for state in (fresh, rehearsed):
        for _ in range(15):
            step_alone(state, 48, passes=2)
    assert rehearsed.to_bytes() == fresh.to_bytes()
    assert fresh.sampler.epoch == 2


def test_an_application_that_takes_gradients_away_is_refused_in_its_rehearsal() -> None:
    state = tiny_state()
    loss = state.task.loss

    def forgetful(model: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        return loss(model, indices)

    state.task = Task(**(vars(state.task) | {"loss": forgetful}))
    with pytest.raises(ValueError, match="zero_grad and the like are left to the trainer"):
        rehearse(state)


def replica(folder: Path, rank: int) -> tuple[Replica, multiprocessing.connection.Connection]:
    """One that has trained up to its first evaluation, and the other end of its pipe."""
    ours, theirs = multiprocessing.Pipe()
    start = ReplicaStart(
        spec=tiny_spec(),
        replica=f"replica-{rank}",
        job_dir=str(folder),
        checkpoint="",
        slot_speed=1.0,
        trainer=EVERY_STEP,
        application_modules=(tiny_app.MODULE,),
    )
    made = Replica(start, Mailbox(ours, TIMEOUT_S))
    made._job = TrainingJob(start, Pacer(1.0), made._mailbox.send)
    made.job.state_from = "survivor"
    while made.job.state.progress < made.job.state.next_evaluation:
        step_alone(made.job.state, 24)
    return made, theirs


def share(member: Replica, rank: int, store: HashStore) -> None:
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    order = ReplicaOrder(
        generation=2,
        group=2,
        rank=rank,
        world_size=2,
        nodes=1,
        config=JobConfig(atomic_batch=12),
        store_host="",
        store_port=0,
    )
    member._share_state(Group(rank, 2, ProcessGroupGloo(store, rank, 2, options)), order)


@pytest.mark.parametrize("further_on", [0, 1])
def test_ranks_of_which_one_alone_has_ended_an_evaluation_or_a_step_go_on_from_its_state(
    tmp_path: Path, further_on: int
) -> None:
    """They would otherwise start different collectives, at which gloo aborts the process."""
    (first, one_end), (second, other_end) = replica(tmp_path, 0), replica(tmp_path, 1)
    ahead = [first, second][further_on].job
    assert first.job.state.position == second.job.state.position
    for go_on in (lambda: ahead.evaluate(Group(0, 1, None)), lambda: step_alone(ahead.state, 24)):
        go_on()
        assert ahead.state.position == max(first.job.state.position, second.job.state.position)
        assert first.job.state.position != second.job.state.position
        store = HashStore()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(share, (first, second), (0, 1), (store, store)))
        assert first.job.state.to_bytes() == second.job.state.to_bytes()
    assert first.job.state.next_evaluation == 40.0
    for end in (one_end, other_end):
        end.close()
