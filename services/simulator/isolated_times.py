"""Finish-time fairness in simulation: every job's completion time over what it had been alone on its share.

    rho = JCT / T(slots / mean number of active jobs during its life)

T(n) is the time of the same job in the same world up to its verified completion, alone on n slots from the
first round after its submission on (in an event-driven world at once), packed on as few nodes as can be, with the
batch of the largest goodput by its fitted model (Pollux's), the same rounds and the same start. Between two
whole numbers of slots T is interpolated; below one slot it is one slot's time / share, but for what no share
makes longer. Slots that a job cannot use it leaves.
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
from services.simulator.worlds.interface import Happening, World

MAX_ROUNDS = 1_000_000
ENDS = (TargetReached, JobRaised)


class IsolatedTimes:
    """Times of jobs alone, in worlds in which they adapt their batch where that is theirs to do; jobs of one
    `World.kind` are simulated once for each number of slots. Each simulation has a new world of
    `make_world`, so that no time depends on which ones were asked for before."""

    def __init__(self, make_world: Callable[[], World], nodes: Sequence[Node], round_s: float) -> None:
        self.make_world, self.nodes, self.round_s = make_world, nodes, round_s
        self.world = make_world()
        """Only asked about jobs: none runs in it."""
        self.slots = sum(node.slots for node in nodes)
        self._runs_s: dict[tuple[Hashable, int], float] = {}

    def time_s(self, spec: JobSpec, submitted_s: float, share: float) -> float:
        """Seconds from submission to completion, alone on `share` slots, above 0."""
        first_round_s = max(math.ceil(submitted_s / self.round_s), 1) * self.round_s
        wait_s = 0.0 if self.world.event_driven else first_round_s - submitted_s
        spec = self.world.complete(spec)
        most = next(n for n in range(min(spec.max_replicas, self.slots), 0, -1) if can_share(n, spec))
        if share < 1:
            fixed_s = self.world.fixed_s(spec)
            return fixed_s + (wait_s + self._run_s(spec, 1) - fixed_s) / share
        low, high = min(math.floor(share), most), min(math.ceil(share), most)
        low_s, high_s = self._run_s(spec, low), self._run_s(spec, high)
        if math.inf in (low_s, high_s):
            return math.inf
        return wait_s + low_s + (share - math.floor(share)) * (high_s - low_s)

    def _run_s(self, spec: JobSpec, slots: int) -> float:
        key = self.world.kind(spec), slots
        if key not in self._runs_s:
            replicas = next((n for n in range(slots, 0, -1) if can_share(n, spec)), 1)
            self._runs_s[key] = self._simulate(spec, replicas)
        return self._runs_s[key]

    def _simulate(self, spec: JobSpec, replicas: int) -> float:
        """Seconds from its start to its verified end; infinity where it has none."""
        row = Board([node.slots for node in self.nodes]).pack(replicas)
        assert row is not None, "no more replicas than slots"
        return _Alone(self.make_world(), self.round_s).run_s(spec, to_allocation(row, self.nodes), replicas)


class _Alone:
    """One simulation."""

    def __init__(self, world: World, round_s: float) -> None:
        self.world, self.round_s = world, round_s
        self._now_s = 0.0

    def run_s(self, spec: JobSpec, allocation: Allocation, replicas: int) -> float:
        self.world.complete(spec)
        generation, former = 0, None
        end: Happening | None = None
        for number in range(1, MAX_ROUNDS + 1):
            bounds = BatchBounds.of(spec, self.world.accumulates_alone)
            config = _best_config(spec, bounds, allocation, replicas, self.world.profiles((spec.id,)))
            if config != former:
                generation, former = generation + 1, config
                self.world.apply(self._orders(spec, generation, allocation, config), self._now_s)
            end = self._wait_for(ENDS, number * self.round_s)
            if end:
                break
        if end and isinstance(end.what, TargetReached):
            return self._verify(spec, generation + 1, end.what, allocation[0].node, end.t_s)
        return math.inf

    def _wait_for(self, kinds: tuple[type, ...], until_s: float) -> Happening | None:
        """The first fact of these kinds, up to then."""
        while self._now_s < until_s:
            self._now_s, happened = self.world.advance(until_s)
            if found := [h for h in happened if isinstance(h.what, kinds)]:
                return min(found, key=lambda happening: happening.t_s)
        return None

    def _verify(self, spec: JobSpec, version: int, claim: TargetReached, node: str, t_s: float) -> float:
        """When the claim is confirmed."""
        order = VerifyOrder(
            spec=spec,
            node=node,
            checkpoint=claim.checkpoint,
            metric=claim.metric,
            progress=claim.progress,
        )
        orders = Orders(run_id="isolated", version=version, jobs=(), verifications=(order,))
        at_once = [h for h in self.world.apply(orders, t_s) if isinstance(h.what, VerificationDone)]
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
    """The batch of the largest modelled goodput; M0 before there is a model."""
    profile = profiles[0] if profiles else None
    if profile and profile.parameters:
        best = best_batch(bounds, profile.parameters, profile.statistics, len(allocation), replicas)
        if best.goodput > 0:
            return JobConfig(atomic_batch=int(best.atomic_batch), accumulation=int(best.accumulation))
    return batch_config(spec.min_batch_size, replicas, spec)


def rhos(jobs: Mapping[str, JobRecord], isolated: IsolatedTimes) -> dict[str, float]:
    """Finish-time fairness of the completed ones among the jobs that have ended in a run; above 1: worse
    than alone on its share. Left out is whoever would not end alone within MAX_ROUNDS."""
    lives = {name: (job.submitted_s, job.ended_s) for name, job in jobs.items() if job.ended_s is not None}
    active = dict(zip(lives, mean_active(list(lives.values())), strict=True))
    found = {}
    for name, (begin_s, end_s) in lives.items():
        if jobs[name].state is JobState.COMPLETED:
            alone_s = isolated.time_s(jobs[name].spec, begin_s, isolated.slots / active[name])
            if math.isfinite(alone_s):
                found[name] = (end_s - begin_s) / alone_s
    return found


def mean_active(lives: Sequence[tuple[float, float]]) -> list[float]:
    """The mean number of jobs active during each life (begin, end), itself counted."""
    if not lives:
        return []
    begins, ends = np.array(lives).reshape(-1, 2).T
    times = np.unique(np.concatenate((begins, ends)))
    counts = np.searchsorted(np.sort(begins), times, "right") - np.searchsorted(np.sort(ends), times, "right")
    area = np.concatenate(([0.0], np.cumsum(counts[:-1] * np.diff(times))))
    spent = np.interp(ends, times, area) - np.interp(begins, times, area)
    lengths = ends - begins
    means: list[float] = np.divide(spent, lengths, out=np.ones_like(spent), where=lengths > 0).tolist()
    return means
