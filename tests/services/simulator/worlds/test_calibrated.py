"""The calibrated world: jobs whose times can be computed by hand, and properties of all jobs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.log.audit import audit
from analysis.log.frames import read
from analysis.log.history import history
from common.eventlog import EventLogWriter
from common.protocol import (
    BatchChanged,
    Evaluated,
    Event,
    EventRecord,
    GenerationStarted,
    JobCompleted,
    JobFailed,
    JobStateChanged,
    ReplicaExited,
    ReplicaStarted,
    TrainingSample,
    VerificationStarted,
)
from common.types import (
    Allocation,
    JobConfig,
    JobState,
    Node,
    Placement,
    batch_config,
    can_share,
)
from services.metrics_collector.memory import Memory
from services.scheduler.policies.interface import ClusterView, Decision, Policy
from services.scheduler.policies.placement import Board, number_nodes, to_allocation, to_row
from services.scheduler.policies.registry import make_policy
from services.simulator.engine import SimulatedRun, Simulation, SimulationPlan
from services.simulator.isolated_times import IsolatedTimes
from services.simulator.perturbation import Perturbation
from services.simulator.worlds.calibrated import CalibratedWorld
from tests.fixtures.profiles import COSTS, needed_at, write_profiles
from workloads.applications import applications
from workloads.files.measured_profile import MeasuredProfile, read_profiles
from workloads.files.workload_file import Arrival, JobFields, complete_spec

NODES = [Node(name=f"node-{number}", slots=4, slot_speed=0.2) for number in (1, 2)]
ONE_SLOT = [Node(name="node-1", slots=1, slot_speed=0.2)]
START_S, RESIZE_S, VERIFY_S = COSTS["start_s"], COSTS["resize_s"], COSTS["verify_s"]
PASS_S = 0.04
"""One pass of digits-cnn at M0, on a single replica."""
ON_NODE_S = 0.02
"""Synchronization of two replicas on a node."""


EPOCH_STEPS = 94
"""Of digits-cnn at M0: 93 steps of 16 examples and one of 12."""


def train_s(first: int, last: int, replicas: int = 1) -> float:
    """Seconds of the steps after number `first` up to number `last`, at M0."""
    step_s = PASS_S if replicas == 1 else 0.03 + ON_NODE_S
    short_ones = last // EPOCH_STEPS - first // EPOCH_STEPS
    return (last - first) * step_s - short_ones * 0.005 / replicas


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, MeasuredProfile]:
    folder = write_profiles(tmp_path_factory.mktemp("profiles"), {"evaluation_slot_s": 0.0})
    return read_profiles(folder, applications())


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, MeasuredProfile]:
    """Profiles of short jobs."""
    needs = {"digits_cnn": 100, "mnist1d_conv": 250, "char_lm": 75, "matfac": 150}
    folder = write_profiles(tmp_path_factory.mktemp("quick"), {"save_s": 0.1, "exit_s": 0.05}, **needs)
    return read_profiles(folder, applications())


@dataclass
class Scripted:
    """Gives job "a" the last entry of the script that is due: (time in s, allocation, batch size)."""

    script: Sequence[tuple[float, Allocation, int]]
    name: str = "scripted"

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        allocations, configs = {}, {}
        for job in view.jobs:
            due = [row for row in self.script if row[0] <= view.now_s and job.spec.id == "a"]
            allocation, batch = due[-1][1:] if due else ((), 0)
            allocations[job.spec.id] = allocation
            if allocation:
                replicas = sum(placement.replicas for placement in allocation)
                configs[job.spec.id] = batch_config(batch, replicas, job.spec)
        reasons = dict.fromkeys(allocations, "by script")
        return Decision(allocations=allocations, configs=configs, reasons=reasons)


def on(**replicas: int) -> Allocation:
    return tuple(Placement(node=name.replace("_", "-"), replicas=n) for name, n in replicas.items())


@dataclass
class Outcome:
    run: SimulatedRun
    records: list[EventRecord] = field(default_factory=list)

    def of(self, kind: type[Event], job_id: str = "a") -> list[tuple[float, Any]]:
        return [
            (record.t_s, record.event)
            for record in self.records
            if isinstance(record.event, kind) and getattr(record.event, "job_id", "") == job_id
        ]

    def jct_s(self, job_id: str = "a") -> float:
        ended = self.run.state.ended[job_id]
        assert ended.state is JobState.COMPLETED
        assert ended.ended_s is not None
        return ended.ended_s - ended.submitted_s


def simulate(
    profiles: Mapping[str, MeasuredProfile],
    policy: Policy,
    jobs: Sequence[JobFields],
    *,
    nodes: Sequence[Node] = NODES,
    seed: int = 0,
    round_s: float = 2.0,
    **options: Any,
) -> Outcome:
    world = CalibratedWorld(profiles, nodes, **options)
    arrivals = []
    for number, fields in enumerate(jobs):
        spec = complete_spec(fields, world.applications, fields.id or f"job-{number}", number)
        arrivals.append(Arrival(at_s=fields.at_s, spec=world.add_job(spec)))
    plan = SimulationPlan(
        run_id="run", workload="w", arrivals=arrivals, nodes=nodes, round_s=round_s, seed=seed
    )
    records: list[EventRecord] = []
    return Outcome(Simulation(plan, world, policy, lambda: 0.0, records.extend).run(), records)


def digits(**fields: Any) -> JobFields:
    return JobFields(**{"application": "digits-cnn", "id": "a", **fields})


def findings(outcome: Outcome, folder: Path) -> tuple[str, ...]:
    writer = EventLogWriter(folder)
    writer.append(outcome.records)
    writer.close()
    return audit(history(read(folder / "events.jsonl"))).findings


# --------------------------------------------------------------------------- jobs computed by hand


def test_a_job_starts_trains_evaluates_and_is_verified(tmp_path: Path) -> None:
    costs = {"evaluation_slot_s": 0.5, "save_s": 0.125, "exit_s": 0.0625, "step_overhead": 1.1}
    measured = read_profiles(write_profiles(tmp_path / "profiles", costs), applications())
    outcome = simulate(measured, make_policy("fixed"), [digits(at_s=3.0)], nodes=ONE_SLOT)
    evaluations = 15
    training_s = 1.1 * train_s(0, 375) + evaluations * 0.5
    assert outcome.jct_s() == pytest.approx(START_S + training_s + 0.125 + 0.0625 + VERIFY_S)
    evaluated = outcome.of(Evaluated)
    assert len(evaluated) == evaluations
    assert [event.reached for _, event in evaluated] == [False] * 14 + [True]
    assert evaluated[-1][1].metric == 0.965
    (begun,) = outcome.of(GenerationStarted)
    assert begun[0] == pytest.approx(3.0 + START_S + 1.1 * PASS_S)
    assert begun[1].seconds_lost == pytest.approx(START_S)
    assert begun[1].state_from == "scratch"
    (verifier,) = outcome.of(VerificationStarted)
    assert verifier[0] == pytest.approx(3.0 + START_S + training_s + 0.125 + 0.0625), "its slot is free then"
    assert findings(outcome, tmp_path / "log") == ()


def test_replicas_share_the_evaluations(tmp_path: Path) -> None:
    measured = read_profiles(write_profiles(tmp_path, {"evaluation_slot_s": 0.5}), applications())
    outcome = simulate(measured, make_policy("fixed"), [digits(replicas=2, batch_size=16)])
    assert outcome.jct_s() == pytest.approx(START_S + train_s(0, 375, 2) + 15 * 0.25 + VERIFY_S)


def test_survivors_train_until_the_newcomer_is_ready_and_then_lose_only_the_resize(profiles) -> None:
    script = [(0.0, on(node_1=1), 16), (4.0, on(node_1=2), 16)]
    outcome = simulate(profiles, Scripted(script), [digits()])
    (_, second) = outcome.of(GenerationStarted)
    ready_s = 4.0 + START_S - RESIZE_S
    before = next(n for n in range(375) if START_S + train_s(0, n) >= ready_s) + 1
    """Steps of one replica. The last one begins when all are ready, and the new group forms at its end."""
    switched_s = START_S + train_s(0, before)
    assert second[0] == pytest.approx(switched_s + RESIZE_S + train_s(before, before + 1, 2))
    assert second[1].seconds_lost == pytest.approx(RESIZE_S)
    assert second[1].state_from == "survivor"
    assert second[1].old_replicas == 1
    assert outcome.jct_s() == pytest.approx(switched_s + RESIZE_S + train_s(before, 375, 2) + VERIFY_S)


def test_a_shrinking_group_does_not_wait(profiles) -> None:
    script = [(0.0, on(node_1=2), 16), (4.01, on(node_1=1), 16)]
    outcome = simulate(profiles, Scripted(script), [digits()], round_s=4.01)
    before = next(n for n in range(375) if START_S + train_s(0, n, 2) >= 4.01) + 1
    """The last step begins after the order has arrived."""
    switched_s = START_S + train_s(0, before, 2)
    left = next(t_s for t_s, event in outcome.of(ReplicaExited) if event.exit_code == 0)
    assert left == pytest.approx(switched_s)
    assert outcome.jct_s() == pytest.approx(switched_s + RESIZE_S + train_s(before, 375) + VERIFY_S)


def test_a_change_of_batch_alone_costs_no_time_and_steps_count_by_the_need_at_their_batch(profiles) -> None:
    script = [(0.0, on(node_1=1), 16), (4.0, on(node_1=1), 64)]
    outcome = simulate(profiles, Scripted(script), [digits()])
    assert len(outcome.of(GenerationStarted)) == 1
    ((changed_s, changed),) = outcome.of(BatchChanged)
    assert changed_s == pytest.approx(4.0 + PASS_S)
    assert changed.total_batch == 64
    done = changed.step
    assert done == 76
    (_, reached) = outcome.of(Evaluated)[-1]
    need = needed_at("digits-cnn", 64)
    assert reached.progress == pytest.approx(done + (1 - done / 375.0) * need, abs=25 / 2 + 4)
    samples = [event for _, event in outcome.of(TrainingSample)]
    assert {sample.statistics.trusted for sample in samples if sample.total_steps >= 10} == {True}
    assert samples[0].gain == 1.0
    assert samples[-1].gain == pytest.approx(2.7, abs=0.3), "noise scale 4 to 8 at a scale of 4"


def test_a_preempted_job_saves_its_state_and_resumes_from_it(tmp_path: Path) -> None:
    costs = {"evaluation_slot_s": 0.0, "save_s": 0.5}
    measured = read_profiles(write_profiles(tmp_path / "profiles", costs), applications())
    script: list[tuple[float, Allocation, int]] = [(0.0, on(node_1=1), 16), (4.0, (), 0)]
    outcome = simulate(measured, Scripted([*script, (10.0, on(node_2=1), 16)]), [digits()])
    before = 76
    left_s = START_S + before * PASS_S + 0.5
    states = {event.new: t_s for t_s, event in outcome.of(JobStateChanged)}
    assert states[JobState.PREEMPTING] == pytest.approx(4.0)
    assert states[JobState.PENDING] == pytest.approx(left_s)
    (_, resumed) = outcome.of(GenerationStarted)
    assert resumed[1].state_from == "checkpoint"
    assert resumed[1].progress == before + 1
    assert resumed[1].seconds_lost == pytest.approx(START_S)
    rest_s = train_s(before, 375) + 0.5
    assert outcome.jct_s() == pytest.approx(10.0 + START_S + rest_s + VERIFY_S)
    assert findings(outcome, tmp_path / "log") == ()


def test_a_job_that_moves_to_another_node_saves_when_the_newcomer_is_ready(profiles) -> None:
    script = [(0.0, on(node_1=1), 16), (4.0, on(node_2=1), 16)]
    outcome = simulate(profiles, Scripted(script), [digits()])
    (_, moved) = outcome.of(GenerationStarted)
    assert moved[1].state_from == "checkpoint"
    ready_s = 4.0 + START_S - RESIZE_S
    before = next(n for n in range(375) if START_S + train_s(0, n) >= ready_s) + 1
    assert moved[1].progress == before + 1
    expected_s = START_S + train_s(0, 375) + RESIZE_S + VERIFY_S
    assert outcome.jct_s() == pytest.approx(expected_s)


def test_a_replica_ordered_to_leave_while_it_starts_keeps_its_slot_until_it_exits(profiles) -> None:
    """Its agent does not wait for a saved state, because the job has never trained."""
    script: list[tuple[float, Allocation, int]] = [(0.0, on(node_1=1), 16), (0.5, (), 0)]
    script.append((0.75, on(node_1=1), 16))
    jobs = [digits(), digits(id="b", at_s=0.5), digits(id="c", at_s=0.8)]
    outcome = simulate(profiles, Scripted(script), jobs[:3], nodes=ONE_SLOT, round_s=100.0)
    starts = [t_s for t_s, _ in outcome.of(ReplicaStarted)]
    exits = [t_s for t_s, _ in outcome.of(ReplicaExited)]
    built_s = START_S - RESIZE_S
    assert exits[0] == pytest.approx(built_s)
    assert starts[0] == 0.0
    assert starts[1] >= exits[0]
    changes = [(event.old, event.new) for _, event in outcome.of(JobStateChanged)]
    assert changes[:3] == [
        (JobState.PENDING, JobState.STARTING),
        (JobState.STARTING, JobState.PREEMPTING),
        (JobState.PREEMPTING, JobState.PENDING),
    ]


def test_a_newcomer_waits_until_another_job_frees_its_slot(profiles) -> None:
    class ShareEqually:
        """Two replicas for the first job until a second one arrives, then one for each."""

        name = "share-equally"

        def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
            share = 2 if len(view.jobs) == 1 else 1
            allocations = {job.spec.id: on(node_1=share) for job in view.jobs}
            configs = {job.spec.id: batch_config(16, share, job.spec) for job in view.jobs}
            reasons = dict.fromkeys(allocations, "a share")
            return Decision(allocations=allocations, configs=configs, reasons=reasons)

    nodes = [Node(name="node-1", slots=2, slot_speed=0.2)]
    outcome = simulate(profiles, ShareEqually(), [digits(), digits(id="b", at_s=5.01)], nodes=nodes)
    ((started_s, _),) = outcome.of(ReplicaStarted, "b")[:1]
    step_s = 0.03 + ON_NODE_S
    steps = math.ceil((5.01 - START_S) / step_s) + 1
    assert started_s == pytest.approx(START_S + steps * step_s)


def test_the_needed_progress_depends_on_target_and_batch_size(profiles) -> None:
    for batch, target in ((16, 0.8), (64, 0.965), (128, 0.97)):
        job = digits(replicas=2, batch_size=batch, target=target)
        outcome = simulate(profiles, make_policy("fixed"), [job])
        (_, reached) = outcome.of(Evaluated)[-1]
        need = profiles["digits-cnn"].needed_progress(batch, target)
        assert abs(reached.progress - need) <= 25 / 2, (batch, target)
        assert reached.metric == target
        assert all(event.metric < target for _, event in outcome.of(Evaluated)[:-1])


def test_the_last_step_of_an_epoch_takes_the_remaining_examples(profiles) -> None:
    outcome = simulate(profiles, make_policy("fixed"), [digits(replicas=2, batch_size=128)])
    last = outcome.of(TrainingSample)[-1][1]
    assert last.epoch > 0
    epochs, rest = divmod(last.total_examples, 1500)
    assert epochs == last.epoch
    assert last.total_steps == 12 * epochs + math.ceil(rest / 128)


def test_a_job_fails_when_it_has_spent_its_budget(profiles, tmp_path: Path) -> None:
    job = digits(target=0.975, max_progress=120.0)
    outcome = simulate(profiles, make_policy("fixed"), [job])
    ((t_s, failed),) = outcome.of(JobFailed)
    assert failed.reason.startswith("progress budget of 120 spent short of the target 0.975; last metric 0.")
    assert t_s == pytest.approx(START_S + train_s(0, 121))
    assert findings(outcome, tmp_path) == ()


# --------------------------------------------------------------------------- profiles and the oracle


def test_a_profile_has_the_fitted_model_and_the_measured_restart_time(profiles) -> None:
    world = CalibratedWorld(profiles, NODES)
    script = [(0.0, on(node_1=1), 32), (4.0, on(node_1=2), 32)]
    spec = world.add_job(complete_spec(digits(), world.applications, "a", 0))
    plan = SimulationPlan(
        run_id="r", workload="w", arrivals=[Arrival(at_s=0, spec=spec)], nodes=NODES, round_s=2, seed=0
    )
    Simulation(plan, world, Scripted(script), lambda: 0.0).run()
    (profile,) = world.profiles(("a", "unknown"))
    assert profile.restart_s == pytest.approx(RESIZE_S)
    assert profile.max_profiled_replicas == 2
    assert profile.needed_progress == 0.0
    assert profile.parameters is not None
    assert profile.points == (), "as live: the points stay with the collector"


def test_with_memory_a_job_starts_from_what_earlier_jobs_have_shown(profiles) -> None:
    memory = Memory()
    world = CalibratedWorld(profiles, NODES, memory=memory)
    for job_id in ("a", "b"):
        spec = world.add_job(complete_spec(digits(id=job_id), world.applications, job_id, 0))
        (fresh,) = world.profiles((job_id,))
        assert (fresh.parameters is not None) == (job_id == "b")
        assert fresh.needed_progress == (375.0 if job_id == "b" else 0.0)
        arrivals = [Arrival(at_s=0.0, spec=spec)]
        plan = SimulationPlan(run_id="r", workload="w", arrivals=arrivals, nodes=NODES, round_s=2.0, seed=0)
        if job_id == "a":
            Simulation(plan, world, make_policy("fixed"), lambda: 0.0).run()


def test_perturbation_changes_samples_and_not_the_training(profiles) -> None:
    job = digits(replicas=2, batch_size=128)
    exact = simulate(profiles, make_policy("fixed"), [job])
    errors = Perturbation(times=0.5, noise=2.0, seed=3)
    wrong = simulate(profiles, make_policy("fixed"), [job], perturbation=errors)
    again = simulate(profiles, make_policy("fixed"), [job], perturbation=errors)
    assert wrong.jct_s() == exact.jct_s()
    assert wrong.records == again.records
    seen, true = (outcome.of(TrainingSample)[-1][1] for outcome in (wrong, exact))
    assert seen.statistics.var == pytest.approx(2.0 * true.statistics.var)
    assert seen.gain == true.gain
    assert 0.5 <= seen.step_s / true.step_s <= 1.5
    assert seen.step_s != true.step_s
    factors = [errors.perturbed_times("a", (1, n, 8), 2.0, 1.0) for n in range(1, 100)]
    assert all(0.5 <= sync_s <= 1.5 and 0.5 <= step_s - sync_s <= 1.5 for step_s, sync_s in factors)
    assert len(set(factors)) == 99
    assert Perturbation().perturbed_times("a", (1, 1, 8), 2.0, 1.0) == (2.0, 1.0)


def test_a_given_restart_cost_is_paid_by_every_new_group(profiles) -> None:
    script = [(0.0, on(node_1=1), 16), (4.0, on(node_1=2), 16)]
    outcome = simulate(profiles, Scripted(script), [digits()], restart_s=5.0)
    first, second = (event.seconds_lost for _, event in outcome.of(GenerationStarted))
    assert first == pytest.approx(START_S - RESIZE_S + 5.0)
    assert second == pytest.approx(5.0)


def test_the_oracle_predicts_the_end_of_a_job(profiles) -> None:
    world = CalibratedWorld(profiles, NODES)
    spec = world.add_job(complete_spec(digits(replicas=2, batch_size=64), world.applications, "a", 0))
    steps, step_s = world.remaining_steps(spec.id), world.step_time_s(spec.id, 2)
    outcome = simulate(profiles, make_policy("fixed"), [digits(replicas=2, batch_size=64)])
    assert outcome.jct_s() == pytest.approx(START_S + steps * step_s + VERIFY_S, rel=0.05)


def test_the_isolated_time_equals_that_of_a_run_with_one_job(profiles) -> None:
    job = digits(application="matfac")
    run_s = simulate(profiles, make_policy("pollux"), [job], nodes=ONE_SLOT).jct_s()
    world = CalibratedWorld(profiles, ONE_SLOT)
    spec = complete_spec(job, world.applications, "a", 0)
    isolated = IsolatedTimes(lambda: CalibratedWorld(profiles, ONE_SLOT), ONE_SLOT, 2.0)
    isolated_s = isolated.time_s(spec, 0.0, 1.0)
    assert isolated_s == pytest.approx(run_s, rel=0.02)
    overhead_s = START_S + VERIFY_S
    assert isolated.time_s(spec, 7.0, 0.5) == pytest.approx(overhead_s + 2 * (isolated_s - overhead_s))
    slow = CalibratedWorld(profiles, ONE_SLOT, restart_s=RESIZE_S + 9.0)
    assert slow.overhead_s(spec) == pytest.approx(overhead_s + 9.0)
    other = complete_spec(
        digits(application="matfac", id="b", replicas=2, batch_size=512), applications(), "", 9
    )
    assert world.isolation_key(other) == world.isolation_key(spec)
    hopeless = complete_spec(digits(max_progress=50.0), applications(), "c", 0)
    assert isolated.time_s(hopeless, 0.0, 1.0) == math.inf


def test_isolated_times_do_not_depend_on_earlier_questions(profiles) -> None:
    nodes = [Node(name="n", slots=4, slot_speed=1.0)]
    applications = CalibratedWorld(profiles, nodes).applications
    asked = [
        (complete_spec(digits(application=name), applications, name, 0), share)
        for name in ("digits-cnn", "matfac")
        for share in (1.0, 3.0, 4.0)
    ]
    times_s = []
    for order in (asked, asked[::-1]):
        isolated = IsolatedTimes(lambda: CalibratedWorld(profiles, nodes), nodes, 2.0)
        times_s.append(
            {(spec.application, share): isolated.time_s(spec, 0.0, share) for spec, share in order}
        )
    assert times_s[0] == times_s[1]


# --------------------------------------------------------------------------- properties of all jobs


class RandomAllocation:
    """A random valid division of the cluster in every round."""

    name = "random"

    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        rng = np.random.default_rng(seed)
        board, numbers = Board([node.slots for node in view.nodes]), number_nodes(view.nodes)
        allocations: dict[str, Allocation] = {}
        configs: dict[str, JobConfig] = {}
        for number in rng.permutation(len(view.jobs)).tolist():
            job = view.jobs[number]
            most = min(sum(board.free), job.spec.max_replicas)
            counts = [n for n in range(1, most + 1) if can_share(n, job.spec)]
            wanted = int(rng.choice(counts)) if counts and rng.random() < 0.8 else 0
            row = to_row(job.allocation, numbers)
            if not row or not board.fits(row) or rng.random() < 0.3:
                row = board.pack(wanted) if wanted else ()
            allocations[job.spec.id] = to_allocation(row or (), view.nodes, job.allocation)
            if row:
                board.take(row)
                batch = job.spec.min_batch_size * int(rng.choice([1, 4]))
                configs[job.spec.id] = batch_config(batch, sum(n for _, n in row), job.spec)
        reasons = dict.fromkeys(allocations, "at random")
        return Decision(allocations=allocations, configs=configs, reasons=reasons)


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_events_loses_a_job_or_overfills_a_node(quick, tmp_path: Path, seed: int) -> None:
    """Jobs are resized, moved and preempted while they start, train and leave."""
    rng = np.random.default_rng(seed)
    jobs = [
        JobFields(application=name, id=f"{name}-{number}", at_s=float(rng.choice([0.0, rng.uniform(0, 9)])))
        for number in range(2)
        for name in applications()
    ]
    outcome = simulate(quick, RandomAllocation(), jobs, seed=seed, round_s=float(rng.choice([0.7, 1.0, 3.0])))
    assert outcome.run.stalled == ""
    assert outcome.run.invalid_decisions == []
    assert {job.state for job in outcome.run.state.ended.values()} == {JobState.COMPLETED}
    assert len(outcome.run.state.ended) == len(jobs)
    assert findings(outcome, tmp_path) == ()


@pytest.mark.parametrize("policy", ["pollux", "coadapt", "dynamic", "throughput", "optimus", "srtf"])
def test_every_policy_completes_every_job_and_is_repeatable(quick, tmp_path: Path, policy: str) -> None:
    jobs = [
        JobFields(application=name, replicas=2, at_s=at_s) for at_s in (0.0, 4.0) for name in applications()
    ]
    outcome, again = (simulate(quick, make_policy(policy), jobs) for _ in range(2))
    assert outcome.records == again.records
    assert len([record for record in outcome.records if isinstance(record.event, JobCompleted)]) == len(jobs)
    assert outcome.run.invalid_decisions == []
    assert findings(outcome, tmp_path) == ()
