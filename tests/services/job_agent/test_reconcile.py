"""The actions that `reconcile` derives from orders and running processes."""

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.protocol import JobOrder, Orders, ReplicaOrder, VerifyOrder
from common.types import JobConfig, Placement
from services.job_agent.reconcile import (
    LEAVES,
    Action,
    Forget,
    Kill,
    Phase,
    ReplicaRecord,
    SendOrder,
    StartReplica,
    StartVerifier,
    VerifierRecord,
    ranks_on,
    reconcile,
    replica_order,
)
from tests.fixtures.job_orders import job_order, orders, verify_order

NODE = "node-1"
OTHER = "node-2"


def resize(
    job_id: str, generation: int, here: int, other: int = 0, *, group: int = 0, other_first: bool = False
) -> JobOrder:
    """An order for so many replicas on this node and on the other one."""
    placements = [Placement(node=NODE, replicas=here), Placement(node=OTHER, replicas=other)]
    if other_first:
        placements.reverse()
    allocation = tuple(placement for placement in placements if placement.replicas)
    return job_order(job_id, generation, allocation, group=group)


@dataclass
class World:
    """Carries out actions in memory, as the agent does with processes."""

    slots: int
    replicas: dict[str, ReplicaRecord] = field(default_factory=dict)
    verifiers: dict[str, VerifierRecord] = field(default_factory=dict)
    started: int = 0

    def reconcile(self, present: Orders) -> list[Action]:
        actions = reconcile(
            present, NODE, self.slots, tuple(self.replicas.values()), tuple(self.verifiers.values())
        )
        for action in actions:
            self._carry_out(action)
            assert self.living <= self.slots
        return actions

    def exit(self, name: str) -> None:
        """A process exits. It is remembered if it was not ordered to."""
        table = self.replicas if name in self.replicas else self.verifiers
        lost = name in self.verifiers and self.verifiers[name].lost_at is not None
        if table[name].phase is Phase.ACTIVE or lost:
            table[name] = msgspec.structs.replace(table[name], phase=Phase.GONE)
        else:
            del table[name]

    def lose(self, verifier: str, version: int, phase: Phase) -> None:
        """A verifier died under these orders (GONE), or the agent gave it up (KILLED)."""
        lost = msgspec.structs.replace(self.verifiers[verifier], phase=phase, lost_at=version)
        self.verifiers[verifier] = lost

    def settle(self, present: Orders) -> None:
        """Let processes exit that have to, until nothing is left to do."""
        for _ in range(100):
            actions = self.reconcile(present)
            ending = [p.name for p in self.processes if p.phase in (Phase.LEAVING, Phase.KILLED)]
            if not actions and not ending:
                return
            for name in ending:
                self.exit(name)
        pytest.fail("does not settle")

    @property
    def processes(self) -> list[ReplicaRecord | VerifierRecord]:
        return [*self.replicas.values(), *self.verifiers.values()]

    @property
    def living(self) -> int:
        return sum(p.phase is not Phase.GONE for p in self.processes)

    def ranks(self, job_id: str, phase: Phase = Phase.ACTIVE) -> dict[int, str]:
        found = [r for r in self.replicas.values() if r.job_id == job_id and r.phase is phase]
        ranks = {r.order.rank: r.name for r in found}
        assert len(ranks) == len(found), "two processes have the same rank"
        return ranks

    def _carry_out(self, action: Action) -> None:
        match action:
            case Kill(name):
                table = self.replicas if name in self.replicas else self.verifiers
                assert table[name].phase in (Phase.ACTIVE, Phase.LEAVING)
                table[name] = msgspec.structs.replace(table[name], phase=Phase.KILLED)
            case Forget(name):
                gone = self.replicas.pop(name, None) or self.verifiers.pop(name)
                assert gone.phase is Phase.GONE
            case SendOrder(name, order):
                self._send(self.replicas[name], order)
            case StartReplica(job, order):
                self.started += 1
                name = f"r{self.started}"
                assert order.rank >= 0
                self.replicas[name] = ReplicaRecord(
                    name=name, job_id=job.spec.id, serial=self.started, phase=Phase.ACTIVE, order=order
                )
            case StartVerifier(order):
                self.started += 1
                name = f"v{self.started}"
                self.verifiers[name] = VerifierRecord(
                    name=name, job_id=order.spec.id, checkpoint=order.checkpoint, phase=Phase.ACTIVE
                )

    def _send(self, replica: ReplicaRecord, order: ReplicaOrder) -> None:
        assert replica.phase in (Phase.ACTIVE, Phase.LEAVING)
        assert order.generation > replica.order.generation
        if replica.phase is Phase.LEAVING:
            assert order.rank == LEAVES, "a leaving replica was called back"
        elif order.group == replica.order.group:
            assert order.rank == replica.order.rank, "a rank changed within its group"
        phase = Phase.LEAVING if order.rank == LEAVES else replica.phase
        self.replicas[replica.name] = msgspec.structs.replace(replica, order=order, phase=phase)


def test_a_new_job_starts_one_process_per_rank_on_this_node() -> None:
    world = World(slots=4)
    job = resize("a", 1, here=2, other=1, other_first=True)
    actions = world.reconcile(orders(job))
    assert actions == [StartReplica(job=job, order=replica_order(job, rank)) for rank in (1, 2)]
    assert actions[0].order == ReplicaOrder(
        generation=1,
        group=1,
        rank=1,
        world_size=3,
        nodes=2,
        config=JobConfig(atomic_batch=8),
        store_host="127.0.0.1",
        store_port=4242,
        allocation=job.allocation,
    )


def test_repeated_orders_do_nothing() -> None:
    world = World(slots=4)
    present = orders(resize("a", 1, here=2), verifications=(verify_order("b"),))
    assert len(world.reconcile(present)) == 3
    assert world.reconcile(present) == []


def test_a_job_on_another_node_causes_no_action() -> None:
    assert World(slots=4).reconcile(orders(resize("a", 1, here=0, other=3))) == []


def test_a_batch_change_reaches_every_member_with_its_rank() -> None:
    world = World(slots=4)
    world.reconcile(orders(resize("a", 1, here=2)))
    members = world.ranks("a")
    job = msgspec.structs.replace(resize("a", 2, here=2, group=1), config=JobConfig(atomic_batch=4))
    assert world.reconcile(orders(job)) == [
        SendOrder(name=members[rank], order=replica_order(job, rank)) for rank in (0, 1)
    ]


def test_survivors_keep_their_order_and_new_processes_come_after_them() -> None:
    world = World(slots=4)
    world.reconcile(orders(resize("a", 1, here=2, other=2, other_first=True)))
    first, second = (world.ranks("a")[rank] for rank in (2, 3))
    world.reconcile(orders(resize("a", 2, here=3, other=2)))
    assert world.ranks("a") == {0: first, 1: second, 2: "r3"}


def test_the_last_ranks_leave_when_a_job_shrinks() -> None:
    world = World(slots=4)
    world.reconcile(orders(resize("a", 1, here=3)))
    first, second, third = (world.ranks("a")[rank] for rank in range(3))
    job = resize("a", 2, here=1, other=1)
    assert world.reconcile(orders(job)) == [
        SendOrder(name=first, order=replica_order(job, 0)),
        SendOrder(name=second, order=replica_order(job, LEAVES)),
        SendOrder(name=third, order=replica_order(job, LEAVES)),
    ]


def test_a_preempted_job_leaves_with_an_order_of_world_size_0() -> None:
    world = World(slots=4)
    world.reconcile(orders(resize("a", 1, here=2)))
    actions = world.reconcile(orders(resize("a", 2, here=0)))
    assert [(a.order.rank, a.order.world_size, a.order.nodes) for a in actions] == [(LEAVES, 0, 0)] * 2


def test_a_job_that_is_no_longer_ordered_is_killed_including_leaving_replicas() -> None:
    world = World(slots=4)
    world.reconcile(orders(resize("a", 1, here=2)))
    world.reconcile(orders(resize("a", 2, here=1)))
    assert world.reconcile(orders()) == [Kill(name="r1"), Kill(name="r2")]
    assert world.reconcile(orders()) == []


def test_starts_wait_until_leaving_processes_have_exited() -> None:
    world = World(slots=2)
    world.reconcile(orders(resize("a", 1, here=2)))
    present = orders(resize("a", 2, here=0), resize("b", 1, here=2))
    assert all(isinstance(action, SendOrder) for action in world.reconcile(present))
    assert world.reconcile(present) == []
    world.exit("r1")
    assert [action.order.rank for action in world.reconcile(present)] == [0]
    world.exit("r2")
    assert [action.order.rank for action in world.reconcile(present)] == [1]
    assert world.reconcile(present) == []


def test_killed_processes_hold_their_slots_until_they_have_exited() -> None:
    world = World(slots=1)
    world.reconcile(orders(resize("a", 1, here=1)))
    present = orders(resize("b", 1, here=1))
    assert world.reconcile(present) == [Kill(name="r1")]
    world.exit("r1")
    assert [type(action) for action in world.reconcile(present)] == [StartReplica]


def test_a_leaving_replica_receives_newer_generations_and_is_replaced_not_called_back() -> None:
    world = World(slots=3)
    world.reconcile(orders(resize("a", 1, here=2)))
    world.reconcile(orders(resize("a", 2, here=1)))
    job = resize("a", 3, here=2)
    assert world.reconcile(orders(job)) == [
        SendOrder(name="r2", order=replica_order(job, LEAVES)),
        SendOrder(name="r1", order=replica_order(job, 0)),
        StartReplica(job=job, order=replica_order(job, 1)),
    ]


def test_the_rank_of_a_dead_process_is_reused_only_in_the_next_group() -> None:
    world = World(slots=4)
    present = orders(resize("a", 1, here=3))
    world.reconcile(present)
    world.exit("r2")
    assert world.reconcile(present) == []
    assert world.reconcile(orders(resize("a", 2, here=3, group=1)))[1].order.rank == 2
    actions = world.reconcile(orders(resize("a", 3, here=3)))
    assert actions[0] == Forget(name="r2")
    assert world.ranks("a") == {0: "r1", 1: "r3", 2: "r4"}


def test_a_finished_job_is_not_started_again_while_it_is_still_ordered() -> None:
    world = World(slots=4)
    present = orders(resize("a", 1, here=2))
    world.reconcile(present)
    world.exit("r1")
    world.exit("r2")
    assert world.reconcile(present) == []
    assert world.reconcile(orders()) == [Forget(name="r1"), Forget(name="r2")]


def test_a_verifier_runs_once_per_claim_and_gets_a_slot_before_replicas() -> None:
    world = World(slots=1)
    present = orders(resize("a", 1, here=1), verifications=(verify_order("b"),))
    assert world.reconcile(present) == [StartVerifier(order=verify_order("b"))]
    world.exit("v1")
    assert [type(action) for action in world.reconcile(present)] == [StartReplica]
    assert world.reconcile(present) == []
    assert world.reconcile(orders(resize("a", 1, here=1))) == [Forget(name="v1")]


def test_a_withdrawn_verification_or_one_on_another_node_has_no_process_here() -> None:
    world = World(slots=2)
    assert world.reconcile(orders(verifications=(verify_order("b", node=OTHER),))) == []
    world.reconcile(orders(verifications=(verify_order("b"),)))
    assert world.reconcile(orders(verifications=(verify_order("b", "newer"),)))[0] == Kill(name="v1")


@pytest.mark.parametrize("phase", [Phase.GONE, Phase.KILLED])
def test_a_lost_verifier_is_started_again_only_by_newer_orders(phase: Phase) -> None:
    world = World(slots=2)
    claim = (verify_order("b"),)
    world.reconcile(orders(verifications=claim, version=3))
    world.lose("v1", 3, phase)
    assert world.reconcile(orders(verifications=claim, version=3)) == []
    world.exit("v1")
    assert world.reconcile(orders(verifications=claim, version=3)) == []
    assert world.reconcile(orders(verifications=claim, version=4)) == [
        Forget(name="v1"),
        StartVerifier(order=claim[0]),
    ]
    assert world.reconcile(orders(verifications=claim, version=5)) == []


def test_a_verifier_that_is_being_killed_holds_its_slot_until_it_has_exited() -> None:
    world = World(slots=1)
    claim = (verify_order("b"),)
    world.reconcile(orders(verifications=claim))
    world.lose("v1", 1, Phase.KILLED)
    assert world.reconcile(orders(verifications=claim, version=2)) == []
    world.exit("v1")
    assert world.reconcile(orders(verifications=claim, version=2)) == [
        Forget(name="v1"),
        StartVerifier(order=claim[0]),
    ]


# --------------------------------------------------------------------------- any sequence of orders

JOBS = ("a", "b", "c")


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, list[tuple[str, int, int]]]:
    """Slots of the node, and steps: (what happens, number of a job or process, replicas)."""
    slots = draw(st.integers(1, 5))
    steps = st.tuples(
        st.sampled_from(["resize", "batch", "remove", "verify", "lost", "exit", "unverified", "again"]),
        st.integers(0, 7),
        st.integers(0, slots),
    )
    return slots, draw(st.lists(steps, max_size=25))


@settings(max_examples=300, deadline=None)
@given(scripts())
def test_any_sequence_of_orders_respects_the_slots_and_converges(
    script: tuple[int, list[tuple[str, int, int]]],
) -> None:
    slots, steps = script
    world = World(slots=slots)
    jobs: dict[str, JobOrder] = {}
    verifications: dict[str, VerifyOrder] = {}

    def fits(job_id: str, replicas: int) -> bool:
        others = sum(len(list(ranks_on(job, NODE))) for name, job in jobs.items() if name != job_id)
        return others + len(verifications) + replicas <= slots

    for generation, (what, which, replicas) in enumerate(steps, start=1):
        job_id = JOBS[which % len(JOBS)]
        if what == "resize" and fits(job_id, replicas):
            verifications.pop(job_id, None)
            jobs[job_id] = resize(job_id, generation, replicas, other=which % 2)
        elif what == "batch" and job_id in jobs:
            jobs[job_id] = msgspec.structs.replace(jobs[job_id], generation=generation)
        elif what == "remove":
            jobs.pop(job_id, None)
        elif what == "verify" and job_id in jobs and fits(job_id, 1):
            del jobs[job_id]
            verifications[job_id] = verify_order(job_id, f"final-{generation}")
        elif what == "lost" and job_id in jobs:
            jobs[job_id] = msgspec.structs.replace(jobs[job_id], generation=generation, group=generation)
        elif what == "exit" and world.processes:
            process = world.processes[which % len(world.processes)]
            if process.phase is not Phase.GONE:
                world.exit(process.name)
        elif what == "unverified":
            for verifier in list(world.verifiers.values()):
                if verifier.phase is Phase.ACTIVE:
                    world.lose(verifier.name, generation - 1, Phase.KILLED if which % 2 else Phase.GONE)
        claims = tuple(verifications.values())
        world.reconcile(orders(*jobs.values(), verifications=claims, version=generation))

    claims = tuple(verifications.values())
    present = orders(*jobs.values(), verifications=claims, version=len(steps) + 1)
    world.settle(present)
    assert world.reconcile(present) == []
    for job_id in JOBS:
        ranks = set(ranks_on(jobs[job_id], NODE)) if job_id in jobs else set()
        active, gone = world.ranks(job_id), world.ranks(job_id, Phase.GONE)
        assert set(active) | set(gone) == ranks
        assert not set(active) & set(gone)
    assert {v.job_id for v in world.verifiers.values()} == set(verifications)
    assert all(v.lost_at is None for v in world.verifiers.values())
