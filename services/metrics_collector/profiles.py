"""From the trainers' samples to what a policy needs of each job: its profile and its fitted model. Pure.

A profile point is one configuration (nodes, replicas, atomic batch) with the running medians of its times.
A job's model is fitted anew when a configuration was added, or when a median has moved by REFIT_CHANGE since
the last fit. All memory is bounded: windows of medians, configurations a job, and jobs that have ended.

With a memory across jobs (services/metrics_collector/memory.py) a job's model is that of its application, corrected by
what the job has measured, as soon as the scheduler has said which application that is.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from common.goodput.fit import Fit, fit_throughput
from common.protocol import (
    Event,
    GenerationStarted,
    JobCancelled,
    JobCompleted,
    JobFailed,
    TrainingSample,
)
from common.types import (
    GradientStatistics,
    JobProfile,
    ProfilePoint,
    ThroughputParameters,
)
from services.metrics_collector.memory import Memory, fit_error

Configuration: TypeAlias = tuple[int, int, int]
"""(nodes, replicas, atomic batch)"""

WINDOW = 31
"""Samples over which a median runs."""
MAX_CONFIGURATIONS = 256
"""A job's; beyond that the one that was seen least recently goes."""
MAX_ENDED = 256
"""Jobs that have ended and are still known, so that late samples do not make them new."""
REFIT_CHANGE = 0.1


@dataclass
class Times:
    """The last samples of one configuration."""

    accumulation_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    samples: int = 0

    def point(self, configuration: Configuration) -> ProfilePoint:
        nodes, replicas, atomic_batch = configuration
        return ProfilePoint(
            nodes=nodes,
            replicas=replicas,
            atomic_batch=atomic_batch,
            accumulation_s=median(self.accumulation_s),
            step_s=median(self.step_s),
            samples=self.samples,
        )


class ObservedJob:
    """What one job has shown."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.times: dict[Configuration, Times] = {}
        """In the order in which the configurations were last seen."""
        self.fitted: dict[Configuration, tuple[float, float]] = {}
        """The medians (accumulation, step) at the last fit."""
        self.parameters: ThroughputParameters | None = None
        self.statistics: GradientStatistics | None = None
        self.first_statistics: GradientStatistics | None = None
        """The first that could be trusted."""
        self.progress = 0.0
        self.max_profiled_replicas = 0
        self.restarts_s: deque[float] = deque(maxlen=WINDOW)

    def add_sample(self, sample: TrainingSample) -> None:
        self.progress = sample.progress
        # What was trusted once is better than something newer that is not.
        if sample.statistics and (
            sample.statistics.trusted or not self.statistics or not self.statistics.trusted
        ):
            self.statistics = sample.statistics
            if sample.statistics.trusted and not self.first_statistics:
                self.first_statistics = sample.statistics
        usable = _usable(sample.accumulation_s) and _usable(sample.step_s)
        if sample.timed_steps < 1 or not usable:
            return
        configuration = sample.nodes, sample.replicas, sample.config.atomic_batch
        times = self.times.pop(configuration, None) or Times()
        self.times[configuration] = times
        times.accumulation_s.append(sample.accumulation_s)
        times.step_s.append(sample.step_s)
        times.samples += 1
        self.max_profiled_replicas = max(self.max_profiled_replicas, sample.replicas)
        if len(self.times) > MAX_CONFIGURATIONS:
            del self.times[next(iter(self.times))]

    def add_generation(self, started: GenerationStarted) -> None:
        """A first start is not a resize: it says nothing of what the next one will cost."""
        if started.state_from != "scratch" and _usable(started.seconds_lost):
            self.restarts_s.append(started.seconds_lost)

    @property
    def needs_fit(self) -> bool:
        for configuration, times in self.times.items():
            fitted = self.fitted.get(configuration)
            if fitted is None:
                return True
            now = median(times.accumulation_s), median(times.step_s)
            if any(abs(new - old) > REFIT_CHANGE * old for new, old in zip(now, fitted, strict=True)):
                return True
        return False

    def fit(self) -> Fit:
        """Of this job's own data; needs at least one configuration."""
        return self.take_fit(fit_throughput(self.points()))

    def take_fit(self, fit: Fit) -> Fit:
        """Go by this fit until another one is due."""
        points = self.points()
        self.parameters = fit.parameters
        self.fitted = {
            configuration: (point.accumulation_s, point.step_s)
            for configuration, point in zip(self.times, points, strict=True)
        }
        return fit

    def points(self) -> list[ProfilePoint]:
        return [times.point(configuration) for configuration, times in self.times.items()]

    def profile(self) -> JobProfile:
        return JobProfile(
            job_id=self.job_id,
            points=tuple(sorted(self.points(), key=lambda p: (p.nodes, p.replicas, p.atomic_batch))),
            parameters=self.parameters,
            statistics=self.statistics,
            progress=self.progress,
            max_profiled_replicas=self.max_profiled_replicas,
            restart_s=median(self.restarts_s) if self.restarts_s else 0.0,
        )


class ObservedJobs:
    """All jobs of a run. With a `memory` they teach it, and learn from it."""

    def __init__(self, run_id: str = "", memory: Memory | None = None) -> None:
        self._run_id = run_id
        self._memory = memory
        self._asked: dict[str, tuple[str, float]] = {}
        """The applications and targets of the jobs, as far as they have been told."""
        self._jobs: dict[str, ObservedJob] = {}
        self._ended: dict[str, None] = {}

    def add(self, event: Event) -> ObservedJob | None:
        """Take in an event; the job that it tells of, None where it is of no interest."""
        match event:
            case TrainingSample():
                job = self._job(event.job_id)
                job.add_sample(event)
                return job
            case GenerationStarted():
                job = self._job(event.job_id)
                job.add_generation(event)
                return job
            case JobCompleted() | JobFailed() | JobCancelled():
                self._teach(event.job_id, event.progress if isinstance(event, JobCompleted) else None)
                self._ended.setdefault(event.job_id)
                if len(self._ended) > MAX_ENDED:
                    oldest = next(iter(self._ended))
                    del self._ended[oldest]
                    self._jobs.pop(oldest, None)
                    self._asked.pop(oldest, None)
        return None

    def fit(self, job: ObservedJob) -> Fit:
        """The job's model anew: its application's, where that is known and remembered."""
        if self._memory is None or job.job_id not in self._asked:
            return job.fit()
        self._teach(job.job_id)
        parameters = self._recall(job.profile()).parameters
        assert parameters is not None, "the memory has learned at least this job's points"
        return job.take_fit(Fit(parameters=parameters, error=fit_error(parameters, job.points())))

    def active(self) -> list[ObservedJob]:
        return [job for job_id, job in self._jobs.items() if job_id not in self._ended]

    def profile(self, job_id: str, application: str = "", target: float = 0.0) -> JobProfile:
        """Of a job that has shown nothing yet: an empty one, or what jobs of its application have shown."""
        job = self._jobs.get(job_id)
        own = job.profile() if job else JobProfile(job_id=job_id)
        if self._memory is None or not application or job_id in self._ended:
            return own
        if job_id not in self._asked:
            self._asked[job_id] = application, target
            self._teach(job_id)
        elif job and job.first_statistics:
            self._memory.learn_statistics(application, self._key(job_id), job.first_statistics)
        return self._recall(own)

    def _teach(self, job_id: str, needed: float | None = None) -> None:
        """Let the memory learn what the job has shown, and the progress that it needed in the end."""
        if self._memory is None or job_id not in self._asked:
            return
        (application, target), key = self._asked[job_id], self._key(job_id)
        job = self._jobs.get(job_id)
        if job and job.times:
            self._memory.learn_points(application, key, job.points())
        if job and job.first_statistics:
            self._memory.learn_statistics(application, key, job.first_statistics)
        if needed is not None:
            self._memory.learn_need(application, key, target, needed)

    def _recall(self, own: JobProfile) -> JobProfile:
        assert self._memory is not None
        application, target = self._asked[own.job_id]
        return self._memory.recall(application, self._key(own.job_id), own, target)

    def _key(self, job_id: str) -> str:
        """Unique across runs."""
        return f"{self._run_id}/{job_id}"

    def _job(self, job_id: str) -> ObservedJob:
        return self._jobs.setdefault(job_id, ObservedJob(job_id))


def _usable(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0
