"""Elastic training with real processes: each test names what must not change."""

import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest
from torch.distributed import TCPStore

from common.config import TrainerConfig
from common.protocol import (
    BatchChanged,
    CheckpointFellBack,
    CheckpointSaved,
    GenerationRunning,
    GenerationStarted,
    JobRaised,
    JobSaved,
    ReplicaLost,
    TargetReached,
    TrainingSample,
    VerificationDone,
    Verified,
    VerifyOrder,
    VerifyStart,
)
from tests.fixtures.replica_fleet import EVERY_STEP, TIMEOUT_S, Fleet, context, running_store
from tests.fixtures.tiny_app import MODULE
from workloads.trainer.checkpoint import saved_in

pytestmark = pytest.mark.timeout(120)
MakeFleet = Callable[..., Fleet]
M0 = 24


def undisturbed(make_fleet: MakeFleet, steps: int, **changes: Any) -> dict[int, float]:
    """Loss by step of the same job on one undisturbed replica."""
    fleet = make_fleet(**changes)
    fleet.order(1, M0)
    fleet.wait_for_step(steps)
    return fleet.losses()


def assert_same_curve(
    curve: dict[int, float], reference: dict[int, float], steps: int, within: float = 1e-9
) -> None:
    assert [curve[step] for step in range(1, steps + 1)] == pytest.approx(
        [reference[step] for step in range(1, steps + 1)], abs=within, rel=0.0
    )


def test_nothing_runs_in_threads_before_a_replica_is_forked() -> None:
    ours, theirs = context.Pipe()
    process = context.Process(target=_count_threads, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.poll(TIMEOUT_S)
    assert ours.recv() == (1, 1)
    process.join(TIMEOUT_S)
    ours.close()


def _count_threads(connection: Any) -> None:
    connection.send(tuple(len(os.listdir(f"/proc/{pid}/task")) for pid in (os.getpid(), os.getppid())))


def test_resizing_in_place_gives_the_losses_of_a_job_that_was_never_resized(make_fleet: MakeFleet) -> None:
    """Across two nodes, as the replicas see it: each group meets in the store of its first node."""
    fleet = make_fleet()
    fleet.order(1, M0)
    with running_store() as other_node:
        ports = fleet.store_port, other_node.port
        for number, (replicas, until_step) in enumerate([(2, 40), (4, 80), (3, 120), (1, 160)], start=1):
            fleet.wait_for_step(until_step)
            fleet.store_port = ports[number % 2]
            fleet.order(replicas, M0 // replicas)
            fleet.wait_for(GenerationRunning, lambda fact: fact.generation == fleet.generation)
    last = fleet.wait_for_step(240)
    assert (last.replicas, last.epoch) == (1, last.total_steps // -(-250 // M0))
    started = fleet.of(GenerationStarted)
    assert [(event.old_replicas, event.state_from) for event in started] == [
        (0, "scratch"),
        (1, "survivor"),
        (2, "survivor"),
        (4, "survivor"),
        (3, "survivor"),
    ]
    assert not saved_in(fleet.folder)
    assert_same_curve(fleet.losses(), undisturbed(make_fleet, 240), 240)


def test_four_replicas_train_as_one_in_single_precision(make_fleet: MakeFleet) -> None:
    single = {"single": 1.0}
    fleet = make_fleet(settings=single)
    fleet.order(4, M0 // 4)
    fleet.wait_for_step(200)
    assert_same_curve(fleet.losses(), undisturbed(make_fleet, 200, settings=single), 200, within=1e-4)


def test_thirty_resizes_at_random_steps_leave_nothing_behind(make_fleet: MakeFleet) -> None:
    draw = random.Random(5)
    fleet = make_fleet()
    fleet.order(1, M0)
    before: Held | None = None
    step = 0
    for _ in range(30):
        step += draw.randint(1, 12)
        step = max(step, fleet.wait_for_step(step).total_steps)
        replicas = draw.choice([n for n in (1, 2, 3, 4) if n != len(fleet.members)])
        fleet.order(replicas, M0 // replicas)
        fleet.wait_for(GenerationRunning, lambda fact: fact.generation == fleet.generation)
        if before is None and replicas == 1:
            before = min(held_in_each_of_the_next_steps(fleet, 20))
    assert before
    fleet.order(1, M0)
    after = next(held for held in held_in_each_of_the_next_steps(fleet, 2000) if held[:2] <= before[:2])
    assert after.memory_bytes - before.memory_bytes < 1_000_000
    assert len(fleet.of(GenerationStarted)) == 32
    assert not fleet.of(ReplicaLost)
    assert_same_curve(fleet.losses(), undisturbed(make_fleet, step), step)


class Held(NamedTuple):
    """What rank 0 holds. It is the same process as long as it survives."""

    files: int
    threads: int
    memory_bytes: int


def held_in_each_of_the_next_steps(fleet: Fleet, steps: int) -> Iterator[Held]:
    """Some steps hold more for a moment: the old group is closed in the background, and progress is
    recorded."""
    process = psutil.Process(fleet.processes[fleet.members[0]].pid)
    fleet.wait_for(GenerationRunning, lambda fact: fact.generation == fleet.generation)
    first = fleet.of(TrainingSample)[-1].total_steps
    for step in range(first, first + steps):
        fleet.wait_for_step(step)
        yield Held(process.num_fds(), process.num_threads(), process.memory_info().rss)


def test_a_change_of_batch_alone_keeps_the_group(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.order(2, 12)
    fleet.wait_for_step(10)
    fleet.change_batch(24, 1)
    changed = fleet.wait_for(BatchChanged)
    assert (changed.generation, changed.total_batch) == (2, 96)
    sample = fleet.wait_for(TrainingSample, lambda s: s.generation == 2 and s.accumulation_s > 0)
    assert sample.config == changed.config
    assert 1.0 <= sample.gain <= 4.0
    assert len(fleet.of(GenerationStarted)) == 1
    used = [(s.total_steps, s.total_examples) for s in fleet.of(TrainingSample)]
    sizes = {after[1] - before[1] for before, after in pairwise(used)}
    assert {M0, 96} < sizes
    assert max(sizes) == 96


def test_a_replica_killed_in_mid_run_costs_no_work(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.order(4, 6)
    fleet.wait_for_step(30)
    victim = fleet.members[2]
    os.kill(fleet.processes[victim].pid, signal.SIGKILL)
    lost = fleet.wait_for(ReplicaLost)
    assert lost.generation == 1
    fleet.wait_for_exit(victim)
    fleet.order(3, 8)
    fleet.wait_for_step(200)
    started = fleet.wait_for(GenerationStarted, lambda event: event.generation == 2)
    assert (started.state_from, started.progress_lost) == ("survivor", 0.0)
    assert_same_curve(fleet.losses(), undisturbed(make_fleet, 200), 200)


def test_rank_zero_killed_in_mid_run_is_survived_too(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.order(3, 8)
    fleet.wait_for_step(30)
    victim = fleet.members[0]
    os.kill(fleet.processes[victim].pid, signal.SIGKILL)
    fleet.wait_for(ReplicaLost)
    fleet.wait_for_exit(victim)
    fleet.order(4, 6)
    fleet.wait_for_step(120)
    assert fleet.of(GenerationStarted)[-1].state_from == "survivor"
    assert_same_curve(fleet.losses(), undisturbed(make_fleet, 120), 120)


def test_a_member_that_dies_before_the_group_has_met_is_replaced(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.order(1, M0)
    fleet.wait_for_step(10)
    fleet.order(3, 8)
    os.kill(fleet.processes[fleet.members[2]].pid, signal.SIGKILL)
    fleet.wait_for_exit(fleet.members[2])
    fleet.order(2, 12)
    fleet.wait_for(GenerationRunning, lambda fact: fact.generation == 3)
    fleet.wait_for_step(100)
    assert_same_curve(fleet.losses(), undisturbed(make_fleet, 100), 100)


@pytest.mark.parametrize("sign_of_life", ["announced", "here"], ids=["regrouping", "before-a-collective"])
def test_a_member_that_dies_while_the_group_forms_costs_no_work(
    make_fleet: MakeFleet, sign_of_life: str
) -> None:
    fleet = make_fleet(msgspec.structs.replace(EVERY_STEP, collective_timeout_s=2.0))
    fleet.order(2, 12)
    fleet.wait_for_step(20)
    store = TCPStore("127.0.0.1", fleet.store_port, is_master=False, wait_for_workers=False)
    fleet.order(3, 8)
    victim = fleet.members[2]
    group = f"{fleet.folder.parents[1].name}/{fleet.spec.id}/{fleet.group}"
    store.wait([f"{group}/{sign_of_life}/2"], timedelta(seconds=TIMEOUT_S))
    os.kill(fleet.processes[victim].pid, signal.SIGKILL)
    fleet.wait_for_exit(victim)
    fleet.order(2, 12)
    started = fleet.wait_for(GenerationStarted, lambda event: event.generation == 3)
    assert (started.state_from, started.progress_lost) == ("survivor", 0.0)
    fleet.wait_for_step(100)
    assert_same_curve(fleet.losses(), undisturbed(make_fleet, 100), 100)


def test_a_member_that_hangs_is_given_up_within_the_bound(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(msgspec.structs.replace(EVERY_STEP, collective_timeout_s=2.0))
    fleet.order(3, 8)
    fleet.wait_for_step(20)
    victim = fleet.processes[fleet.members[1]]
    os.kill(victim.pid, signal.SIGSTOP)
    lost = fleet.wait_for(ReplicaLost)
    assert "2000ms" in lost.reason or "closed" in lost.reason or "reset" in lost.reason
    victim.kill()
    fleet.wait_for_exit(fleet.members[1])
    fleet.order(2, 12)
    fleet.wait_for_step(100)
    assert_same_curve(fleet.losses(), undisturbed(make_fleet, 100), 100)


def test_a_store_that_cannot_be_reached_is_reported_and_the_state_kept(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(msgspec.structs.replace(EVERY_STEP, collective_timeout_s=1.0))
    fleet.order(1, M0)
    fleet.wait_for_step(10)
    good_port = fleet.store_port
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        fleet.store_port = nobody_listens.getsockname()[1]
        fleet.order(1, M0)
        lost = fleet.wait_for(ReplicaLost)
    assert lost.generation == 2
    assert f"store at 127.0.0.1:{fleet.store_port} cannot be reached" in lost.reason
    fleet.store_port = good_port
    fleet.order(2, 12)
    fleet.wait_for_step(100)
    assert_same_curve(fleet.losses(), undisturbed(make_fleet, 100), 100)


def test_without_survivors_training_resumes_from_the_last_checkpoint_and_reports_the_loss(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(TrainerConfig(sample_every_s=1e-9, checkpoint_every_s=0.02, warmup_steps=0))
    fleet.order(2, 12)
    fleet.wait_for(CheckpointSaved)
    fleet.wait_for_step(60)
    for name in fleet.members:
        os.kill(fleet.processes[name].pid, signal.SIGKILL)
    for name in fleet.members:
        fleet.wait_for_exit(name)
    known = max(sample.progress for sample in fleet.of(TrainingSample))
    fleet.order(2, 12)
    started = fleet.wait_for(GenerationStarted, lambda event: event.generation == 2)
    assert started.state_from == "checkpoint"
    assert started.progress + started.progress_lost >= known
    fleet.wait_for_step(int(known) + 50)
    assert_same_curve(fleet.losses(), undisturbed(make_fleet, int(known)), int(known))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_preempted_job_resumes_as_if_it_had_never_stopped(make_fleet: MakeFleet, replicas: int) -> None:
    """At four times M0, so that averages and previous gradients matter for the learning rate."""
    settings = {"dropout": 0.2}
    reference = make_fleet(settings=settings)
    reference.order(replicas, 96 // replicas // 2, 1)
    reference.wait_for_step(120)
    fleet = make_fleet(settings=settings)
    fleet.order(replicas, 96 // replicas // 2, 1)
    fleet.wait_for_step(50)
    members = list(fleet.members)
    fleet.preempt()
    saved = fleet.wait_for(JobSaved)
    assert saved.generation == 2
    assert [fleet.wait_for_exit(name) for name in members] == [0] * replicas
    fleet.checkpoint = saved.checkpoint
    fleet.order(replicas, 96 // replicas // 2, 1)
    started = fleet.wait_for(GenerationStarted, lambda event: event.generation == 3)
    assert (started.state_from, started.progress_lost) == ("checkpoint", 0.0)
    fleet.wait_for_step(120)
    assert_same_curve(fleet.losses(), reference.losses(), 120)


def test_a_job_that_moves_to_other_processes_takes_its_state_along(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.order(2, 12)
    fleet.wait_for_step(30)
    leavers = list(fleet.members)
    fleet.order(2, 12, survivors=0)
    assert [fleet.wait_for_exit(name) for name in leavers] == [0, 0]
    started = fleet.wait_for(GenerationStarted, lambda event: event.generation == 2)
    assert (started.state_from, started.progress_lost) == ("checkpoint", 0.0)
    fleet.wait_for_step(100)
    assert_same_curve(fleet.losses(), undisturbed(make_fleet, 100), 100)


def test_damaged_checkpoints_are_skipped_and_reported(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(TrainerConfig(sample_every_s=1e-9, checkpoint_every_s=0.02, warmup_steps=0))
    fleet.order(1, M0)
    fleet.wait_for(CheckpointSaved, lambda event: len(fleet.of(CheckpointSaved)) >= 3)
    members = list(fleet.members)
    fleet.preempt()
    saved = fleet.wait_for(JobSaved)
    fleet.wait_for_exit(members[0])
    newest, former = saved_in(fleet.folder)
    newest.write_bytes(newest.read_bytes()[:-100])
    fleet.checkpoint = saved.checkpoint
    fleet.order(1, M0)
    started = fleet.wait_for(GenerationStarted, lambda event: event.generation == 3)
    fallback = fleet.wait_for(CheckpointFellBack)
    assert (fallback.path, fallback.fallback) == (str(newest), str(former))
    assert started.state_from == "checkpoint"
    assert started.progress_lost > 0


def test_a_reached_target_is_saved_reported_and_confirmed_by_the_verifier(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(target=0.3)
    fleet.order(2, 24)
    reached = fleet.wait_for(TargetReached)
    assert [fleet.wait_for_exit(name) for name in fleet.members] == [0, 0]
    order = VerifyOrder(
        spec=fleet.spec,
        node="a",
        checkpoint=reached.checkpoint,
        metric=reached.metric,
        progress=reached.progress,
    )
    assert reached.metric <= 0.3
    assert verdict_of(order).findings == ()
    lie = VerifyOrder(spec=fleet.spec, node="a", checkpoint=reached.checkpoint, metric=0.1, progress=1.0)
    findings = verdict_of(lie).findings
    assert len(findings) == 2
    assert "0.1 was reported" in findings[0]


def verdict_of(order: VerifyOrder) -> Verified:
    from common.codec import decode

    ours, theirs = context.Pipe()
    start = VerifyStart(order=order, slot_speed=1.0, application_modules=(MODULE,))
    process = context.Process(target=_verify, args=(theirs, start))
    process.start()
    theirs.close()
    assert ours.poll(TIMEOUT_S)
    verified = decode(ours.recv_bytes(), Verified)
    done = decode(ours.recv_bytes(), VerificationDone)
    assert (done.metric, done.findings) == (verified.metric, verified.findings)
    assert verified.ok == (not verified.findings)
    process.join(TIMEOUT_S)
    ours.close()
    return verified


def _verify(connection: Any, start: VerifyStart) -> None:
    from workloads.trainer.verify import run_verifier

    run_verifier(connection, start)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"raise_at": 15.0}, "RuntimeError: raises in loss 15"),
        ({"nan_at": 15.0}, "diverged: loss or gradient not finite in 10 steps"),
    ],
)
def test_a_job_at_fault_says_why_and_exits_with_one(
    make_fleet: MakeFleet, settings: dict[str, float], reason: str
) -> None:
    fleet = make_fleet(settings=settings)
    fleet.order(1, M0)
    raised = fleet.wait_for(JobRaised)
    assert reason in raised.reason
    assert fleet.wait_for_exit(fleet.members[0]) == 1


def test_a_spent_budget_fails_the_job_with_its_best_metric(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(max_progress=50.0)
    fleet.order(2, 12)
    raised = fleet.wait_for(JobRaised)
    assert raised.reason.startswith("progress budget of 50 spent short of the target 0; best metric 0.")


def test_one_loss_that_is_not_finite_is_skipped(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(settings={"nan_once_at": 20.0})
    fleet.order(1, M0)
    sample = fleet.wait_for_step(80)
    assert sample.progress == sample.total_steps - 1
    assert not fleet.of(JobRaised)


def test_a_replica_whose_agent_is_gone_ends(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.order(1, M0)
    fleet.wait_for_step(5)
    fleet.pipes[fleet.members[0]].close()
    fleet.pipes.clear()
    assert fleet.wait_for_exit(fleet.members[0]) == 1
