"""Step and synchronization times of real replicas, on a grid of placements and local batch sizes.

The cluster is as configured, paced, and full: jobs of one replica, of all applications in turn, keep every
slot busy that the measured job leaves free, because that is what jobs meet in an experiment. One job per
application goes through the whole grid and is resized in place.
"""

import time
from collections import defaultdict
from collections.abc import Sequence

from common.config import Config
from common.protocol import Evaluated, EventRecord, GenerationStarted, JobOrder, TrainingSample
from common.types import ApplicationSpec, JobConfig, batch_config
from services.bench.agent_cluster import AgentCluster, endless
from services.calibration.calibration_plan import GridPoint, MeasuredPlacement, grid_point

NODES = ("node-1", "node-2")
MIN_SAMPLES, MIN_STEPS = 3, 12
"""Enough for a point, if all its steps are timed."""
POINT_S = 8.0
"""After this time a point is made of whatever has been observed."""


class GridMeasurement(AgentCluster):
    """A cluster on which grids are measured."""

    def __init__(self, config: Config, background: Sequence[ApplicationSpec]) -> None:
        agent = config.agent
        super().__init__(NODES, agent.slots, self._observe, speed=agent.slot_speed, trainer=config.trainer)
        self._background = background
        self._started: dict[int, GenerationStarted] = {}
        self._windows: dict[int, list[tuple[TrainingSample, int]]] = defaultdict(list)
        self._evaluated: dict[str, int] = defaultdict(int)
        self._fillers: list[list[JobOrder]] = [[] for _ in NODES]
        self._jobs_made = 0
        self._job: JobOrder | None = None
        self._placement: tuple[int, ...] = ()

    def begin(self, application: ApplicationSpec) -> None:
        """Start a new job with one replica and M0, and end everything that ran before."""
        self.clear()
        self._jobs_made += 1
        self._spec = endless(application, f"{application.name}-{self._jobs_made}")
        self._fillers = [[] for _ in NODES]
        self._placement = (1,) + (0,) * (len(NODES) - 1)
        self._place(self._placement, batch_config(self._spec.min_batch_size, 1, self._spec))

    def measure(self, placement: tuple[int, ...], configs: Sequence[JobConfig]) -> MeasuredPlacement:
        """Measure these configurations of a placement on a full cluster."""
        placement += (0,) * (len(NODES) - len(placement))
        former, self._placement = self._placement, placement
        self._fill(placement)
        started = self._place(placement, configs[0])
        assert self._job is not None
        for filler in self._filler_orders():
            self._await_start(filler)
        self._windows[self._job.generation].clear()
        points = [self._point(configs[0])]
        for config in configs[1:]:
            self._job = self.rebatched(self._job, config)
            self._publish()
            points.append(self._point(config))
        resized = started.state_from == "survivor" and placement != former
        return MeasuredPlacement(points=tuple(points), resize_s=started.seconds_lost if resized else None)

    # ------------------------------------------------------------------ orders

    def _fill(self, placement: tuple[int, ...]) -> None:
        """Order a job of one replica for each slot that the placement leaves. It starts once that is free."""
        for node, (fillers, count) in enumerate(zip(self._fillers, placement, strict=True)):
            while len(fillers) > self._slots - count:
                fillers.pop()
            while len(fillers) < self._slots - count:
                self._jobs_made += 1
                application = self._background[self._jobs_made % len(self._background)]
                spec = endless(application, f"filler-{self._jobs_made}")
                config = batch_config(application.initial_batch_size, 1, spec)
                fillers.append(self.group(spec, [int(n == node) for n in range(len(NODES))], config))

    def _place(self, placement: tuple[int, ...], config: JobConfig) -> GenerationStarted:
        """Order the placement, and wait until the job has made its first step in it."""
        self._job = self.group(self._spec, placement, config)
        self._publish()
        return self._await_start(self._job)

    def _filler_orders(self) -> list[JobOrder]:
        return [order for fillers in self._fillers for order in fillers]

    def _publish(self) -> None:
        assert self._job is not None
        self.publish(self._job, *self._filler_orders())

    # ------------------------------------------------------------------ events

    def _await_start(self, order: JobOrder) -> GenerationStarted:
        self.until(lambda: order.generation in self._started, f"{order.spec.id} made no step")
        return self._started[order.generation]

    def _point(self, config: JobConfig) -> GridPoint:
        assert self._job is not None
        windows = self._windows[self._job.generation]
        end_s = time.monotonic() + POINT_S

        def enough() -> bool:
            settled = [sample.steps for sample, _ in windows if sample.timed_steps == sample.steps]
            if len(settled) >= MIN_SAMPLES and sum(settled) >= MIN_STEPS:
                return True
            return time.monotonic() > end_s and any(sample.timed_steps for sample, _ in windows)

        self.until(enough, f"{self._spec.id} reported no step times", POINT_S)
        return grid_point(config, windows)

    def _observe(self, record: EventRecord) -> None:
        event = record.event
        if isinstance(event, GenerationStarted):
            self._started[event.generation] = event
        elif isinstance(event, Evaluated):
            self._evaluated[event.job_id] += 1
        elif isinstance(event, TrainingSample):
            self._windows[event.generation].append((event, self._evaluated.pop(event.job_id, 0)))
