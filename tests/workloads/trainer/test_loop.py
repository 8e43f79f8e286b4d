"""What a rehearsal undoes, and whose state a group takes when only some ranks completed a step."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from common.protocol import ReplicaStart
from tests.fixtures import tiny_app
from tests.fixtures.replica_fleet import EVERY_STEP, tiny_spec
from tests.fixtures.replica_orders import replica_order
from tests.workloads.trainer.test_training_state import ADAM, tiny_state
from workloads.applications.interface import Task
from workloads.trainer.loop import rehearse, step_alone
from workloads.trainer.mailbox import Mailbox
from workloads.trainer.pacer import Pacer
from workloads.trainer.process_group import connect_group, single_member_group
from workloads.trainer.replica import Replica
from workloads.trainer.training_job import TrainingJob
from workloads.trainer.training_state import TrainingState

TIMEOUT_S = 20.0


def with_normalisation() -> TrainingState:
    task = tiny_app.build(3, {"single": 1.0, "dropout": 0.5})
    model = nn.Sequential(nn.BatchNorm1d(tiny_app.FEATURES), task.model)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    return TrainingState(tiny_spec(), ADAM, Task(**(vars(task) | {"model": model, "optimizer": adam})))


@pytest.mark.parametrize("make", [lambda: tiny_state(dropout=0.5), with_normalisation])
def test_a_rehearsal_changes_nothing_in_the_training_that_follows(make: type[TrainingState]) -> None:
    fresh, rehearsed = make(), make()
    rehearse(rehearsed)
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
    with pytest.raises(ValueError, match="remove zero_grad and the like"):
        rehearse(state)


def trained_replica(folder: Path, rank: int) -> tuple[Replica, multiprocessing.connection.Connection]:
    """A replica that has trained up to its first evaluation, and the other end of its pipe."""
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
    replica = Replica(start, Mailbox(ours, TIMEOUT_S))
    replica._job = TrainingJob(start, Pacer(1.0), replica._mailbox.send)
    replica.job.state_from = "survivor"
    while replica.job.state.progress < replica.job.state.next_evaluation:
        step_alone(replica.job.state, 24)
    return replica, theirs


def share(member: Replica, rank: int, store: HashStore) -> None:
    order = replica_order(2, group=2, rank=rank, world_size=2, atomic_batch=12)
    group = connect_group(store, rank, 2, order.store_host, order.store_port, TIMEOUT_S)
    member._share_state(group, order)


@pytest.mark.parametrize("further_on", [0, 1])
def test_a_group_takes_the_state_of_the_rank_that_alone_completed_a_step_or_evaluation(
    tmp_path: Path, further_on: int
) -> None:
    """They would otherwise start different collectives, at which gloo aborts the process."""
    (first, one_end), (second, other_end) = trained_replica(tmp_path, 0), trained_replica(tmp_path, 1)
    ahead = [first, second][further_on].job
    assert first.job.state.position == second.job.state.position
    for go_on in (lambda: ahead.evaluate(single_member_group()), lambda: step_alone(ahead.state, 24)):
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
