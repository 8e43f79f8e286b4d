"""What the jobs of an application have shown, kept for the next one: the memory across jobs.

*One model an application.* The throughput model is fitted over the configurations that all of its jobs have
run in. A job may differ from its siblings by a constant factor (its settings, the speed of its nodes),

    log t[job, configuration] = log t[configuration] + log scale[job],

so what a job has measured enters the pool divided by its scale, and what the job gets back is the pool's
model multiplied by it. The scale is the geometric mean of the job's times over its siblings', in the
configurations that both have run in; 1 before there is one. Everything else that a job's own data says goes
before what is remembered: its gradient statistics, its progress.

*What a new job starts from:* that model, the gradient statistics that jobs of its application had first,
the most replicas that any of them was profiled with, and the progress that they needed for its target.

Jobs go by keys that are unique across runs. To learn the same twice changes nothing, and all is bounded.
"""

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from statistics import fmean, median
from typing import Annotated, TypeVar

from msgspec import Meta, structs

from common.goodput.fit import Fit, fit_throughput
from common.goodput.model import accumulation_time, last_pass_time
from common.types import (
    GradientStatistics,
    JobProfile,
    ProfilePoint,
    Struct,
    ThroughputParameters,
)

VERSION = 1
MAX_JOBS = 16
"""Of one application: whose times of a configuration, statistics and needed progress are kept."""
MAX_CONFIGURATIONS = 256
"""Of one application; beyond that the one that was learned least recently goes."""
SCALE_STEP = 0.01
"""A job's scale is told to about a hundredth: jobs that are alike then have the very same model."""
REFIT_CHANGE = 0.1
"""The model is fitted anew when a configuration was added, or a time has moved by this much."""

Kept = TypeVar("Kept")
Configuration = tuple[int, int, int]
"""(nodes, replicas, atomic batch)"""
Positive = Annotated[float, Meta(gt=0)]
Times = tuple[Positive, Positive]
"""Seconds of a pass that only accumulates, and of the last pass of a step."""


class PointRecord(Struct, frozen=True):
    """One configuration; `times` of jobs by their keys, each divided by the job's scale."""

    nodes: int
    replicas: int
    atomic_batch: int
    times: dict[str, Times]


class ApplicationRecord(Struct, frozen=True):
    """All that is kept of an application, as it is written to disk. Jobs go by their keys, oldest first;
    `needed` holds (target, progress at which it was verified)."""

    points: tuple[PointRecord, ...]
    first_statistics: dict[str, GradientStatistics]
    needed: dict[str, tuple[float, float]]


class MemoryRecord(Struct, frozen=True):
    """The whole memory, as it is written to disk."""

    version: int
    applications: dict[str, ApplicationRecord]


class Memory:
    """Of all applications."""

    def __init__(self, record: MemoryRecord | None = None) -> None:
        kept = record.applications if record else {}
        self._applications = {name: _Application(of_one) for name, of_one in kept.items()}

    def record(self) -> MemoryRecord:
        kept = {name: known.record() for name, known in sorted(self._applications.items())}
        return MemoryRecord(version=VERSION, applications=kept)

    def learn_points(self, application: str, job: str, points: Sequence[ProfilePoint]) -> None:
        """Take in the step times that the job has shown."""
        self._of(application).learn_points(job, points)

    def learn_statistics(self, application: str, job: str, first: GradientStatistics) -> None:
        """The first gradient statistics of the job that could be trusted."""
        known = self._of(application).first_statistics
        if job not in known:
            _keep(known, job, first)

    def learn_need(self, application: str, job: str, target: float, progress: float) -> None:
        """The job was verified to have reached its target at this progress."""
        _keep(self._of(application).needed, job, (target, progress))

    def recall(self, application: str, job: str, own: JobProfile, target: float | None = None) -> JobProfile:
        """The job's own profile, completed and corrected by what its application has shown."""
        known = self._applications.get(application)
        if known is None:
            return own
        statistics = own.statistics
        if not (statistics and statistics.trusted):
            statistics = known.usual_statistics() or statistics
        fit = known.fit()
        parameters = scaled(fit.parameters, known.scale(job, own.points)) if fit else own.parameters
        return structs.replace(
            own,
            parameters=parameters,
            statistics=statistics,
            application_replicas=known.most_replicas,
            needed_progress=0.0 if target is None else known.usual_need(target),
        )

    def _of(self, application: str) -> "_Application":
        return self._applications.setdefault(application, _Application())


class _Pooled:
    """What jobs have shown in one configuration."""

    def __init__(self, times: dict[str, Times]) -> None:
        self.times: dict[str, Times] = {}
        self.logs: dict[str, Times] = {}
        self.total = (0.0, 0.0)
        for job, of_job in times.items():
            self.set(job, of_job)

    def set(self, job: str, times: Times) -> None:
        _keep(self.times, job, times)
        _keep(self.logs, job, (math.log(times[0]), math.log(times[1])))
        self.total = sum(a for a, _ in self.logs.values()), sum(b for _, b in self.logs.values())

    def mean_logs(self, without: str = "") -> Times | None:
        """Over the jobs but one; None where there is no other."""
        own = self.logs.get(without)
        count = len(self.logs) - (own is not None)
        if not count:
            return None
        own = own or (0.0, 0.0)
        return (self.total[0] - own[0]) / count, (self.total[1] - own[1]) / count


class _Application:
    def __init__(self, record: ApplicationRecord | None = None) -> None:
        self.points: dict[Configuration, _Pooled] = {}
        """In the order in which they were last learned."""
        for p in record.points if record else ():
            self.points[p.nodes, p.replicas, p.atomic_batch] = _Pooled(p.times)
        self.first_statistics = dict(record.first_statistics) if record else {}
        self.needed = dict(record.needed) if record else {}
        self.most_replicas = max((replicas for _, replicas, _ in self.points), default=0)
        self.fitted: dict[Configuration, Times] = {}
        self.last_fit: Fit | None = None
        self.learned = bool(self.points)
        """Whether anything has come since the last look at what was fitted."""

    def record(self) -> ApplicationRecord:
        points = (
            PointRecord(nodes=nodes, replicas=replicas, atomic_batch=atomic, times=pooled.times)
            for (nodes, replicas, atomic), pooled in self.points.items()
        )
        return ApplicationRecord(
            points=tuple(points), first_statistics=self.first_statistics, needed=self.needed
        )

    def scale(self, job: str, points: Iterable[ProfilePoint]) -> float:
        """The job's times over its siblings' (see above)."""
        logs = []
        for own in points:
            pooled = self.points.get((own.nodes, own.replicas, own.atomic_batch))
            theirs = pooled.mean_logs(without=job) if pooled else None
            if theirs:
                logs += [math.log(own.accumulation_s) - theirs[0], math.log(own.step_s) - theirs[1]]
        return math.exp(SCALE_STEP * round(sum(logs) / len(logs) / SCALE_STEP)) if logs else 1.0

    def learn_points(self, job: str, points: Sequence[ProfilePoint]) -> None:
        scale = self.scale(job, points)
        self.learned = self.learned or bool(points)
        for own in points:
            configuration = own.nodes, own.replicas, own.atomic_batch
            pooled = self.points.pop(configuration, None) or _Pooled({})
            self.points[configuration] = pooled
            pooled.set(job, (own.accumulation_s / scale, own.step_s / scale))
            self.most_replicas = max(self.most_replicas, own.replicas)
        while len(self.points) > MAX_CONFIGURATIONS:
            del self.points[next(iter(self.points))]

    def fit(self) -> Fit | None:
        if not self.learned:
            return self.last_fit
        self.learned = False
        means: dict[Configuration, Times] = {}
        for configuration, pooled in sorted(self.points.items(), key=itemgetter(0)):
            logs = pooled.mean_logs()
            if logs:
                means[configuration] = math.exp(logs[0]), math.exp(logs[1])
        if means and (self.last_fit is None or _moved(means, self.fitted)):
            self.last_fit = fit_throughput(
                [
                    ProfilePoint(
                        nodes=nodes,
                        replicas=replicas,
                        atomic_batch=atomic,
                        accumulation_s=accumulation_s,
                        step_s=step_s,
                        samples=len(self.points[nodes, replicas, atomic].times),
                    )
                    for (nodes, replicas, atomic), (accumulation_s, step_s) in means.items()
                ]
            )
            self.fitted = means
        return self.last_fit

    def usual_statistics(self) -> GradientStatistics | None:
        """Of a job that has just begun: medians over those that jobs had first."""
        firsts = self.first_statistics.values()
        if not firsts:
            return None
        return GradientStatistics(sqr=median(s.sqr for s in firsts), var=median(s.var for s in firsts))

    def usual_need(self, target: float) -> float:
        """Median progress that jobs needed for this target; for one that lies between targets of theirs,
        linear between the medians of the two nearest; 0: it cannot be told."""
        by_target: dict[float, list[float]] = {}
        for reached, progress in self.needed.values():
            by_target.setdefault(reached, []).append(progress)
        below = max((t for t in by_target if t <= target), default=None)
        above = min((t for t in by_target if t >= target), default=None)
        if below is None or above is None:
            return 0.0
        low, high = median(by_target[below]), median(by_target[above])
        share = (target - below) / (above - below) if above > below else 0.0
        return low + share * (high - low)


def fit_error(parameters: ThroughputParameters, points: Sequence[ProfilePoint]) -> float:
    """Root mean squared logarithmic error over both times of all points, as `Fit.error`."""
    squares = []
    for p in points:
        of_pass = accumulation_time(parameters, p.atomic_batch)
        of_last = last_pass_time(parameters, p.nodes, p.replicas, p.atomic_batch)
        squares.append(math.log(float(of_pass) / p.accumulation_s) ** 2)
        squares.append(math.log(float(of_last) / p.step_s) ** 2)
    return math.sqrt(fmean(squares))


def scaled(parameters: ThroughputParameters, scale: float) -> ThroughputParameters:
    """The model of a job whose every time is `scale` times as long."""
    times = {name: scale * getattr(parameters, name) for name in parameters.__struct_fields__}
    return ThroughputParameters(**{**times, "gamma": parameters.gamma})


def _keep(of_jobs: dict[str, Kept], job: str, value: Kept) -> None:
    """Set the job's value; where there are too many jobs, the oldest one goes."""
    of_jobs[job] = value
    if len(of_jobs) > MAX_JOBS:
        del of_jobs[next(iter(of_jobs))]


def _moved(now: dict[Configuration, Times], fitted: dict[Configuration, Times]) -> bool:
    return any(
        configuration not in fitted
        or any(abs(a - b) > REFIT_CHANGE * b for a, b in zip(times, fitted[configuration], strict=True))
        for configuration, times in now.items()
    )
