"""The memory across jobs: what earlier jobs of an application have measured, for the next ones.

*One model per application.* The throughput model is fitted to the configurations that all of its jobs have
run in. A job may differ from the others by a constant factor (because of its settings, or the speed of its
nodes):

    log t[job, configuration] = log t[configuration] + log scale[job].

A job's measurements are therefore divided by its scale before they are pooled, and the job gets the model of
the pool multiplied by its scale. The scale is the geometric mean of the job's times over those of the other
jobs, in the configurations that both have run in; it is 1 before there is such a configuration. A job's own
gradient statistics and progress take precedence over what is remembered.

*A new job starts from* that model, the first gradient statistics of earlier jobs, the largest number of
replicas that any of them was profiled with, and the progress that they needed for its target.

Jobs are identified by keys that are unique across runs. Learning the same thing twice changes nothing, and
the memory has a bounded size.
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
"""Per application: number of jobs kept for the times of a configuration, the statistics, the needed
progress."""
MAX_CONFIGURATIONS = 256
"""Per application. If there are more, the one that was learned least recently is dropped."""
SCALE_STEP = 0.01
"""A job's scale is rounded to about one hundredth, so that similar jobs get exactly the same model."""
REFIT_CHANGE = 0.1
"""The model is fitted again when a configuration was added, or when a time has changed by this fraction."""

Kept = TypeVar("Kept")
Configuration = tuple[int, int, int]
"""(nodes, replicas, atomic batch)"""
Positive = Annotated[float, Meta(gt=0)]
PassTimes = tuple[Positive, Positive]
"""(seconds of a pass that only accumulates, seconds of the last pass of a step)"""


class PointRecord(Struct, frozen=True):
    """One configuration. `times` by job key, each divided by the scale of the job."""

    nodes: int
    replicas: int
    atomic_batch: int
    times: dict[str, PassTimes]


class ApplicationRecord(Struct, frozen=True):
    """What is kept about an application, as written to disk. By job key, oldest first. `needed` holds
    (target, progress at which it was verified)."""

    points: tuple[PointRecord, ...]
    first_statistics: dict[str, GradientStatistics]
    needed: dict[str, tuple[float, float]]


class MemoryRecord(Struct, frozen=True):
    """The whole memory, as written to disk."""

    version: int
    applications: dict[str, ApplicationRecord]


class Memory:
    """The memory of all applications."""

    def __init__(self, record: MemoryRecord | None = None) -> None:
        kept = record.applications if record else {}
        self._applications = {name: ApplicationMemory(of_one) for name, of_one in kept.items()}

    def record(self) -> MemoryRecord:
        kept = {name: known.record() for name, known in sorted(self._applications.items())}
        return MemoryRecord(version=VERSION, applications=kept)

    def learn_points(self, application: str, job: str, points: Sequence[ProfilePoint]) -> None:
        """Learn the job's measured step times."""
        self._of(application).learn_points(job, points)

    def learn_statistics(self, application: str, job: str, first: GradientStatistics) -> None:
        """Learn the job's first trusted gradient statistics."""
        known = self._of(application).first_statistics
        if job not in known:
            _keep(known, job, first)

    def learn_need(self, application: str, job: str, target: float, progress: float) -> None:
        """Learn that the job was verified to have reached its target at this progress."""
        _keep(self._of(application).needed, job, (target, progress))

    def recall(self, application: str, job: str, own: JobProfile, target: float | None = None) -> JobProfile:
        """The job's `own` profile, completed and corrected with what is known about its application."""
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

    def _of(self, application: str) -> "ApplicationMemory":
        return self._applications.setdefault(application, ApplicationMemory())


class PooledTimes:
    """The times of several jobs in one configuration, each divided by the scale of its job."""

    def __init__(self, times: dict[str, PassTimes]) -> None:
        self.times: dict[str, PassTimes] = {}
        self.logs: dict[str, PassTimes] = {}
        self.total = (0.0, 0.0)
        for job, of_job in times.items():
            self.set(job, of_job)

    def set(self, job: str, times: PassTimes) -> None:
        _keep(self.times, job, times)
        _keep(self.logs, job, (math.log(times[0]), math.log(times[1])))
        self.total = sum(a for a, _ in self.logs.values()), sum(b for _, b in self.logs.values())

    def mean_logs(self, without: str = "") -> PassTimes | None:
        """Mean logarithms of the times of all jobs except one; None if there is no other job."""
        own = self.logs.get(without)
        count = len(self.logs) - (own is not None)
        if not count:
            return None
        own = own or (0.0, 0.0)
        return (self.total[0] - own[0]) / count, (self.total[1] - own[1]) / count


class ApplicationMemory:
    """The memory of one application."""

    def __init__(self, record: ApplicationRecord | None = None) -> None:
        self.points: dict[Configuration, PooledTimes] = {}
        """The one that was learned least recently comes first."""
        for p in record.points if record else ():
            self.points[p.nodes, p.replicas, p.atomic_batch] = PooledTimes(p.times)
        self.first_statistics = dict(record.first_statistics) if record else {}
        self.needed = dict(record.needed) if record else {}
        self.most_replicas = max((replicas for _, replicas, _ in self.points), default=0)
        self.fitted: dict[Configuration, PassTimes] = {}
        """The times that the last fit used."""
        self.last_fit: Fit | None = None
        self.has_news = bool(self.points)
        """Whether points were learned since `fit` was last called."""

    def record(self) -> ApplicationRecord:
        points = (
            PointRecord(nodes=nodes, replicas=replicas, atomic_batch=atomic, times=pooled.times)
            for (nodes, replicas, atomic), pooled in self.points.items()
        )
        return ApplicationRecord(
            points=tuple(points), first_statistics=self.first_statistics, needed=self.needed
        )

    def scale(self, job: str, points: Iterable[ProfilePoint]) -> float:
        """The job's times over those of the other jobs (see above)."""
        logs = []
        for own in points:
            pooled = self.points.get((own.nodes, own.replicas, own.atomic_batch))
            others = pooled.mean_logs(without=job) if pooled else None
            if others:
                logs += [math.log(own.accumulation_s) - others[0], math.log(own.step_s) - others[1]]
        return math.exp(SCALE_STEP * round(sum(logs) / len(logs) / SCALE_STEP)) if logs else 1.0

    def learn_points(self, job: str, points: Sequence[ProfilePoint]) -> None:
        scale = self.scale(job, points)
        self.has_news = self.has_news or bool(points)
        for own in points:
            configuration = own.nodes, own.replicas, own.atomic_batch
            pooled = self.points.pop(configuration, None) or PooledTimes({})
            self.points[configuration] = pooled
            pooled.set(job, (own.accumulation_s / scale, own.step_s / scale))
            self.most_replicas = max(self.most_replicas, own.replicas)
        while len(self.points) > MAX_CONFIGURATIONS:
            del self.points[next(iter(self.points))]

    def fit(self) -> Fit | None:
        """The model of the application, fitted again if needed; None without points."""
        if not self.has_news:
            return self.last_fit
        self.has_news = False
        means: dict[Configuration, PassTimes] = {}
        for configuration, pooled in sorted(self.points.items(), key=itemgetter(0)):
            logs = pooled.mean_logs()
            if logs:
                means[configuration] = math.exp(logs[0]), math.exp(logs[1])
        if means and (self.last_fit is None or _need_refit(means, self.fitted)):
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
        """The statistics of a typical new job: medians of the first statistics of earlier jobs."""
        firsts = self.first_statistics.values()
        if not firsts:
            return None
        return GradientStatistics(sqr=median(s.sqr for s in firsts), var=median(s.var for s in firsts))

    def usual_need(self, target: float) -> float:
        """The median progress that jobs needed for this target. For a target between those of earlier jobs,
        linear interpolation between the medians of the two nearest ones; 0 if it is unknown."""
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
    """Root mean squared logarithmic error over both times of all points, like `Fit.error`."""
    squares = []
    for p in points:
        accumulation_s = accumulation_time(parameters, p.atomic_batch)
        last_pass_s = last_pass_time(parameters, p.nodes, p.replicas, p.atomic_batch)
        squares.append(math.log(float(accumulation_s) / p.accumulation_s) ** 2)
        squares.append(math.log(float(last_pass_s) / p.step_s) ** 2)
    return math.sqrt(fmean(squares))


def scaled(parameters: ThroughputParameters, scale: float) -> ThroughputParameters:
    """The model of a job whose times are all `scale` times as long."""
    times = {name: scale * getattr(parameters, name) for name in parameters.__struct_fields__}
    return ThroughputParameters(**{**times, "gamma": parameters.gamma})


def _keep(by_job: dict[str, Kept], job: str, value: Kept) -> None:
    """Set the value of a job. If there are too many jobs, drop the oldest one."""
    by_job[job] = value
    if len(by_job) > MAX_JOBS:
        del by_job[next(iter(by_job))]


def _need_refit(now: dict[Configuration, PassTimes], fitted: dict[Configuration, PassTimes]) -> bool:
    return any(
        configuration not in fitted
        or any(abs(a - b) > REFIT_CHANGE * b for a, b in zip(times, fitted[configuration], strict=True))
        for configuration, times in now.items()
    )
