"""Finish-time fairness in simulation: a job's completion time over its time alone on its share.

    rho = JCT / T(slots / mean number of jobs active during the job's life)

T(n) is the time to the verified completion of the same job in the same world, alone on n slots. It starts at
the first round after its submission (in an event-driven world at once), is packed on as few nodes as
possible, and always has the batch size of the largest goodput by its fitted model, as Pollux would choose it.
T is interpolated between whole numbers of slots. Below one slot it is the time on one slot / share, except
for the overhead, which a small share does not lengthen. A job leaves slots idle that it cannot use.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from common.goodput.model import BatchBounds, best_batch
from common.protocol import (
    JobOrder,
    JobRaised,
    Orders,
    TargetReached,
    VerificationDone,
    VerifyOrder,
)
from common.types import (
    Allocation,
    JobConfig,
    JobProfile,
    JobSpec,
    JobState,
    Node,
    batch_config,
    can_share,
)
from services.scheduler.policies.placement import Board, to_allocation
from services.scheduler.state import JobRecord
from services.simulator.worlds.interface import World, WorldEvent

MAX_ROUNDS = 1_000_000
ENDS = (TargetReached, JobRaised)


class IsolatedTimes:
    """Simulates jobs alone, once for each `World.isolation_key` and number of slots.

    Each simulation gets a new world from `make_world`, so that no time depends on earlier questions."""

    def __init__(self, make_world: Callable[[], World], nodes: Sequence[Node], round_s: float) -> None:
        self.nodes = nodes
        self.slots = sum(node.slots for node in nodes)
        self._make_world, self._round_s = make_world, round_s
        self._world = make_world()
        """Only answers questions about jobs; none runs in it."""
        self._runs_s: dict[tuple[Hashable, int], float] = {}

    def time_s(self, spec: JobSpec, submitted_s: float, share: float) -> float:
        """Seconds from submission to completion, alone on `share` slots (above 0); infinity if it never
        completes."""
        first_round_s = max(math.ceil(submitted_s / self._round_s), 1) * self._round_s
        wait_s = 0.0 if self._world.event_driven else first_round_s - submitted_s
        spec = self._world.add_job(spec)
        most = next(n for n in range(min(spec.max_replicas, self.slots), 0, -1) if can_share(n, spec))
        if share < 1:
            overhead_s = self._world.overhead_s(spec)
            return overhead_s + (wait_s + self._run_s(spec, 1) - overhead_s) / share
        low, high = min(math.floor(share), most), min(math.ceil(share), most)
        low_s, high_s = self._run_s(spec, low), self._run_s(spec, high)
        if math.inf in (low_s, high_s):
            return math.inf
        return wait_s + low_s + (share - math.floor(share)) * (high_s - low_s)

    def _run_s(self, spec: JobSpec, slots: int) -> float:
        key = self._world.isolation_key(spec), slots
        if key not in self._runs_s:
            replicas = next((n for n in range(slots, 0, -1) if can_share(n, spec)), 1)
            self._runs_s[key] = self._simulate(spec, replicas)
        return self._runs_s[key]

    def _simulate(self, spec: JobSpec, replicas: int) -> float:
        """Seconds from the job's start to its verified end; infinity if it has none."""
        row = Board([node.slots for node in self.nodes]).pack(replicas)
        assert row is not None, "there are at least as many slots as replicas"
        run = _IsolatedRun(self._make_world(), self._round_s)
        return run.time_s(spec, to_allocation(row, self.nodes), replicas)


class _IsolatedRun:
    """One simulation of one job that keeps its allocation."""

    def __init__(self, world: World, round_s: float) -> None:
        self._world, self._round_s = world, round_s
        self._now_s = 0.0

    def time_s(self, spec: JobSpec, allocation: Allocation, replicas: int) -> float:
        self._world.add_job(spec)
        bounds = BatchBounds.of(spec, self._world.accumulates_alone)
        generation, current = 0, None
        end: WorldEvent | None = None
        for number in range(1, MAX_ROUNDS + 1):
            config = _best_config(spec, bounds, allocation, replicas, self._world.profiles((spec.id,)))
            if config != current:
                generation, current = generation + 1, config
                self._world.apply(self._orders(spec, generation, allocation, config), self._now_s)
            end = self._wait_for(ENDS, number * self._round_s)
            if end:
                break
        if end and isinstance(end.content, TargetReached):
            return self._verify(spec, generation + 1, end.content, allocation[0].node, end.t_s)
        return math.inf

    def _wait_for(self, kinds: tuple[type, ...], until_s: float) -> WorldEvent | None:
        """The first fact of these kinds by `until_s`."""
        while self._now_s < until_s:
            self._now_s, events = self._world.advance(until_s)
            if found := [event for event in events if isinstance(event.content, kinds)]:
                return min(found, key=lambda event: event.t_s)
        return None

    def _verify(self, spec: JobSpec, version: int, claim: TargetReached, node: str, t_s: float) -> float:
        """Let the claim be verified. Returns the time at which that is done."""
        order = VerifyOrder(
            spec=spec,
            node=node,
            checkpoint=claim.checkpoint,
            metric=claim.metric,
            progress=claim.progress,
        )
        orders = Orders(run_id="isolated", version=version, jobs=(), verifications=(order,))
        at_once = [e for e in self._world.apply(orders, t_s) if isinstance(e.content, VerificationDone)]
        done = at_once[0] if at_once else self._wait_for((VerificationDone,), math.inf)
        return done.t_s if done else math.inf

    def _orders(self, spec: JobSpec, generation: int, allocation: Allocation, config: JobConfig) -> Orders:
        order = JobOrder(
            spec=spec,
            generation=generation,
            group=1,
            allocation=allocation,
            config=config,
            store_host="",
            store_port=0,
            checkpoint="",
            leaving=(),
        )
        return Orders(run_id="isolated", version=generation, jobs=(order,), verifications=())


def _best_config(
    spec: JobSpec,
    bounds: BatchBounds,
    allocation: Allocation,
    replicas: int,
    profiles: Sequence[JobProfile],
) -> JobConfig:
    """The batch of the largest modelled goodput; M0 until there is a model."""
    profile = profiles[0] if profiles else None
    if profile and profile.parameters:
        best = best_batch(bounds, profile.parameters, profile.statistics, len(allocation), replicas)
        if best.goodput > 0:
            return JobConfig(atomic_batch=int(best.atomic_batch), accumulation=int(best.accumulation))
    return batch_config(spec.min_batch_size, replicas, spec)


def finish_time_fairness(jobs: Mapping[str, JobRecord], isolated: IsolatedTimes) -> dict[str, float]:
    """rho of each completed job among the ended `jobs` of a run, without jobs that never complete alone.

    Above 1: the job took longer than alone on its share."""
    lifetimes = {
        name: (job.submitted_s, job.ended_s) for name, job in jobs.items() if job.ended_s is not None
    }
    active = dict(zip(lifetimes, mean_active(list(lifetimes.values())), strict=True))
    rhos = {}
    for name, (begin_s, end_s) in lifetimes.items():
        if jobs[name].state is JobState.COMPLETED:
            isolated_s = isolated.time_s(jobs[name].spec, begin_s, isolated.slots / active[name])
            if math.isfinite(isolated_s):
                rhos[name] = (end_s - begin_s) / isolated_s
    return rhos


def mean_active(lifetimes: Sequence[tuple[float, float]]) -> list[float]:
    """The mean number of active jobs during each lifetime (begin, end), including the job itself."""
    if not lifetimes:
        return []
    begins, ends = np.array(lifetimes).reshape(-1, 2).T
    times = np.unique(np.concatenate((begins, ends)))
    counts = np.searchsorted(np.sort(begins), times, "right") - np.searchsorted(np.sort(ends), times, "right")
    area = np.concatenate(([0.0], np.cumsum(counts[:-1] * np.diff(times))))
    spent = np.interp(ends, times, area) - np.interp(begins, times, area)
    lengths = ends - begins
    means: list[float] = np.divide(spent, lengths, out=np.ones_like(spent), where=lengths > 0).tolist()
    return means
