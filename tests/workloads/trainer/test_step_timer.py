"""The step times of a paced replica in the training loop, exact by the clocks of a machine in memory."""

from collections.abc import Iterator
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import msgspec
import pytest
import torch

from common.config import TrainerConfig
from common.protocol import (
    BatchChanged,
    Evaluated,
    ReplicaMessage,
    ReplicaOrder,
    ReplicaStart,
    TrainingSample,
)
from common.types import JobConfig
from tests.fixtures import tiny_app
from tests.fixtures.replica_fleet import tiny_spec
from tests.fixtures.replica_orders import replica_order
from tests.workloads.trainer.test_pacer import Machine
from workloads.applications.interface import Task
from workloads.trainer import loop
from workloads.trainer.mailbox import Mailbox
from workloads.trainer.process_group import single_member_group
from workloads.trainer.step_timer import StepTimer
from workloads.trainer.switch_agreement import SwitchAgreement
from workloads.trainer.training_job import TrainingJob

SPEED = 0.25
PASS_S, SYNC_S, WAIT_S, UPDATE_S, EVALUATION_S, FIRST_S = 0.004, 0.001, 0.003, 0.002, 0.5, 0.1
"""CPU seconds, except for WAIT_S: what a collective waits without using the core. FIRST_S is added in the
first steps of a generation."""
WARMUP_STEPS = 3
M0 = tiny_app.SPEC.initial_batch_size
ORDER = replica_order(atomic_batch=M0)


class PacedJob:
    """A job of one replica whose work takes exactly the times above; `slow_step` takes ten times as long."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, sample_every_s: float = 1e-9, slow_step: int = -1
    ) -> None:
        self.machine = Machine()
        self.messages: list[ReplicaMessage] = []
        self.ours, theirs = Pipe()
        self._agreement = SwitchAgreement(Mailbox(theirs, 1.0), "job", 1.0, 1.0)
        start = ReplicaStart(
            spec=tiny_spec(target=-1.0),
            replica="r",
            job_dir=str(folder),
            checkpoint="",
            slot_speed=SPEED,
            trainer=TrainerConfig(
                sample_every_s=sample_every_s, warmup_steps=WARMUP_STEPS, checkpoint_every_s=10_000.0
            ),
            application_modules=(tiny_app.MODULE,),
        )
        self.job = TrainingJob(start, self.machine.pacer(SPEED), self.messages.append)
        self.job.state.task = self._costly(self.job.state.task)
        self.wait_s = WAIT_S
        self.group = single_member_group()
        monkeypatch.setattr(self.group, "all_reduce", self._all_reduce)
        monkeypatch.setattr(
            loop,
            "StepTimer",
            partial(StepTimer, clock=lambda: self.machine.now_s, cpu_clock=lambda: self.machine.used_s),
        )
        self._slow_step = slow_step

    def train(self, order: ReplicaOrder, steps: int) -> list[TrainingSample]:
        """The samples of so many steps."""
        self.messages.clear()
        self._begun_at = self.job.state.steps
        self._last = self._begun_at + steps
        self._next = msgspec.structs.replace(order, generation=order.generation + 1)
        self.job.reporter.switch(order, self.job.state.steps)
        assert loop.train(self.job, self.group, order, self._agreement) == self._next
        self.job.reporter.flush(self.job.state)
        assert self.job.state.steps == self._last
        return [message for message in self.messages if isinstance(message, TrainingSample)]

    def _costly(self, task: Task) -> Task:
        def loss(model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
            done = self.job.state.steps
            first = done < self._begun_at + WARMUP_STEPS
            self.machine.work((PASS_S + FIRST_S * first) * (10 if done == self._slow_step else 1))
            # It is seen at the beginning of the next step, the last one, and agreed on at its end.
            if done == self._last - 2:
                self.ours.send_bytes(msgspec.msgpack.encode(self._next))
            return task.loss(model, indices)

        def metric_sum(model: torch.nn.Module, indices: torch.Tensor) -> float:
            self.machine.work(EVALUATION_S)
            return task.metric_sum(model, indices)

        task.optimizer.register_step_post_hook(lambda *_: self.machine.work(UPDATE_S))
        return Task(**(vars(task) | {"loss": loss, "metric_sum": metric_sum}))

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        self.machine.wait(self.wait_s)
        self.machine.work(SYNC_S)


@pytest.fixture
def paced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PacedJob]:
    job = PacedJob(tmp_path, monkeypatch)
    yield job
    job.ours.close()


def sync_s() -> float:
    """The wait earns a part of what the all-reduce uses."""
    return max(WAIT_S + SYNC_S, SYNC_S / SPEED)


@pytest.mark.parametrize("accumulation", [0, 1])
def test_each_part_of_a_step_is_timed_as_on_a_core_of_the_slots_speed(
    paced: PacedJob, accumulation: int
) -> None:
    config = JobConfig(atomic_batch=M0, accumulation=accumulation)
    samples = paced.train(msgspec.structs.replace(ORDER, config=config), 24)
    timed = [sample for sample in samples if sample.timed_steps]
    for sample in timed:
        assert sample.sync_s == pytest.approx(sync_s())
        assert sample.step_s == pytest.approx(PASS_S / SPEED + sync_s() + UPDATE_S / SPEED)
        assert sample.accumulation_s == pytest.approx(PASS_S / SPEED)
    assert any(isinstance(message, Evaluated) for message in paced.messages)


@pytest.mark.parametrize("accumulation", [0, 1])
def test_what_a_replica_saves_while_it_waits_for_others_shortens_its_steps_and_not_its_passes(
    paced: PacedJob, accumulation: int
) -> None:
    paced.wait_s = 0.09
    config = JobConfig(atomic_batch=M0, accumulation=accumulation)
    samples = paced.train(msgspec.structs.replace(ORDER, config=config), 24)
    pass_s, cpu_s = PASS_S / SPEED, (accumulation + 1) * PASS_S + SYNC_S + UPDATE_S
    timed = [sample for sample in samples if sample.timed_steps]
    assert [sample.accumulation_s for sample in timed] == pytest.approx([pass_s] * len(timed))
    settled = timed[-1].step_s + accumulation * timed[-1].accumulation_s
    assert settled == pytest.approx(paced.wait_s + cpu_s)


def test_the_first_steps_after_a_change_are_not_timed(paced: PacedJob) -> None:
    first = paced.train(ORDER, 10)
    larger = msgspec.structs.replace(ORDER, generation=2, config=JobConfig(atomic_batch=2 * M0))
    second = paced.train(larger, 10)
    assert any(isinstance(message, BatchChanged) for message in paced.messages)
    for samples in (first, second):
        assert [sample.timed_steps for sample in samples] == [0] * WARMUP_STEPS + [1] * (10 - WARMUP_STEPS)
        assert all(sample.step_s == 0.0 for sample in samples[:WARMUP_STEPS])
        assert max(sample.step_s for sample in samples) < FIRST_S


def test_a_sample_has_medians_which_one_slow_step_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced = PacedJob(tmp_path, monkeypatch, sample_every_s=10_000.0, slow_step=7)
    (sample,) = paced.train(ORDER, 20)
    assert (sample.steps, sample.timed_steps) == (20, 20 - WARMUP_STEPS)
    assert sample.step_s == pytest.approx(PASS_S / SPEED + sync_s() + UPDATE_S / SPEED)
    assert sample.sync_s == pytest.approx(sync_s())
    paced.ours.close()
