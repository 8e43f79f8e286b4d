"""From the trainers' samples to each job's profile and fitted model. Pure.

A profile point is one configuration (nodes, replicas, atomic batch) with the running medians of its times. A
job's model is fitted again when a configuration was added, or when a median has changed by REFIT_CHANGE since
the last fit. The size of everything is bounded: windows of medians, configurations per job, and ended jobs.

With a memory across jobs (memory.py), a job's model is that of its application, corrected by the job's own
measurements, as soon as the scheduler has named the application.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

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
from services.metrics_collector.memory import REFIT_CHANGE, Configuration, Memory, fit_error

WINDOW = 31
"""Number of samples in a running median."""
MAX_CONFIGURATIONS = 256
"""Per job. If there are more, the one that was seen least recently is dropped."""
MAX_ENDED = 256
"""Number of ended jobs that are still known, so that late samples do not start a new profile."""


@dataclass
class RecentTimes:
    """The latest times of one configuration."""

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
    """What is measured about one job."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.times: dict[Configuration, RecentTimes] = {}
        """The configuration that was seen least recently comes first."""
        self.fitted: dict[Configuration, tuple[float, float]] = {}
        """The medians (accumulation, step) that the last fit used."""
        self.parameters: ThroughputParameters | None = None
        self.statistics: GradientStatistics | None = None
        self.first_statistics: GradientStatistics | None = None
        """The first trusted ones."""
        self.progress = 0.0
        self.max_profiled_replicas = 0
        self.restarts_s: deque[float] = deque(maxlen=WINDOW)

    def add_sample(self, sample: TrainingSample) -> None:
        self.progress = sample.progress
        # Older trusted statistics are better than newer ones that are not trusted.
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
        times = self.times.pop(configuration, None) or RecentTimes()
        self.times[configuration] = times
        times.accumulation_s.append(sample.accumulation_s)
        times.step_s.append(sample.step_s)
        times.samples += 1
        self.max_profiled_replicas = max(self.max_profiled_replicas, sample.replicas)
        if len(self.times) > MAX_CONFIGURATIONS:
            del self.times[next(iter(self.times))]

    def add_generation(self, started: GenerationStarted) -> None:
        """Learn the cost of a restart. The first start of a job does not count, because it is not a
        restart."""
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
        """A fit to this job's own data, which needs at least one configuration."""
        return self.take_fit(fit_throughput(self.points()))

    def take_fit(self, fit: Fit) -> Fit:
        """Use this fit until another one is needed."""
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
    """All jobs of a run. With a `memory`, their measurements are added to it, and their profiles use it."""

    def __init__(self, run_id: str = "", memory: Memory | None = None) -> None:
        self._run_id = run_id
        self._memory = memory
        self._known: dict[str, tuple[str, float]] = {}
        """Application and target of each job for which the scheduler has named them."""
        self._jobs: dict[str, ObservedJob] = {}
        self._ended: dict[str, None] = {}

    def add(self, event: Event) -> ObservedJob | None:
        """Take an event. Returns the job that it measures, or None."""
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
                    self._known.pop(oldest, None)
        return None

    def fit(self, job: ObservedJob) -> Fit:
        """Fit the job's model again: that of its application, corrected, if the application is known."""
        if self._memory is None or job.job_id not in self._known:
            return job.fit()
        self._teach(job.job_id)
        parameters = self._recall(job.profile()).parameters
        assert parameters is not None, "the memory has at least this job's points"
        return job.take_fit(Fit(parameters=parameters, error=fit_error(parameters, job.points())))

    def active(self) -> list[ObservedJob]:
        return [job for job_id, job in self._jobs.items() if job_id not in self._ended]

    def profile(self, job_id: str, application: str = "", target: float = 0.0) -> JobProfile:
        """The job's profile. For a job without measurements: empty, or what is known about its
        application."""
        job = self._jobs.get(job_id)
        own = job.profile() if job else JobProfile(job_id=job_id)
        if self._memory is None or not application or job_id in self._ended:
            return own
        if job_id not in self._known:
            self._known[job_id] = application, target
            self._teach(job_id)
        elif job and job.first_statistics:
            self._memory.learn_statistics(application, self._key(job_id), job.first_statistics)
        return self._recall(own)

    def _teach(self, job_id: str, needed: float | None = None) -> None:
        """Add the job's measurements to the memory, and the progress that it needed if it has completed."""
        if self._memory is None or job_id not in self._known:
            return
        (application, target), key = self._known[job_id], self._key(job_id)
        job = self._jobs.get(job_id)
        if job and job.times:
            self._memory.learn_points(application, key, job.points())
        if job and job.first_statistics:
            self._memory.learn_statistics(application, key, job.first_statistics)
        if needed is not None:
            self._memory.learn_need(application, key, target, needed)

    def _recall(self, own: JobProfile) -> JobProfile:
        assert self._memory is not None
        application, target = self._known[own.job_id]
        return self._memory.recall(application, self._key(own.job_id), own, target)

    def _key(self, job_id: str) -> str:
        """The job's key in the memory, unique across runs."""
        return f"{self._run_id}/{job_id}"

    def _job(self, job_id: str) -> ObservedJob:
        return self._jobs.setdefault(job_id, ObservedJob(job_id))


def _usable(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0
