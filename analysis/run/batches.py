"""How near the batches that jobs trained with come to the best ones, by what was measured of applications.

A batch makes gain(batch, progress) / seconds of its step, of progress a second. The best one, of those that
`workloads.files.tuned_requests.configs` tries, makes the most at the same progress on the same slots; both figures are of
the profile, so that how fast the machine was on the day does not count. It is what a policy could win by
choosing nothing but better batches: with the best ones, training takes this part of the time that it took.
"""

from collections.abc import Callable, Mapping

from analysis.log.history import JobHistory, RunHistory
from common.lifecycle import UserError
from common.protocol import TrainingSample
from common.types import JobConfig, JobSpec
from workloads.files.measured_profile import MeasuredProfile, Placement
from workloads.files.tuned_requests import configs


def batch_efficiency(run: RunHistory, profiles: Mapping[str, MeasuredProfile]) -> float | None:
    """Of the run's samples, each weighted by its seconds; 1: always the best batch. None where nothing was
    measured of any of its jobs."""
    total_s = best_s = 0.0
    for job in run.jobs.values():
        measured = profiles.get(job.spec.application)
        if measured is None:
            continue
        placement_of, best = placements(job), dict[tuple[Placement, float], float]()
        for _, sample in job.samples:
            placement = placement_of(sample)
            if placement is None or sample.window_s <= 0 or sample.steps == 0:
                continue
            every = measured.spec.evaluate_every
            progress = sample.progress // every * every
            try:
                if (placement, progress) not in best:
                    best[placement, progress] = best_rate(measured, job.spec, placement, progress)
                chosen = _rate(measured, job.spec, placement, progress, sample.config)
            except UserError:  # a placement of which nothing was measured
                continue
            total_s += sample.window_s
            best_s += sample.window_s * min(chosen / best[placement, progress], 1.0)
    return best_s / total_s if total_s else None


def best_rate(measured: MeasuredProfile, spec: JobSpec, placement: Placement, progress: float) -> float:
    """Progress a second with the best batch."""
    return max(_rate(measured, spec, placement, progress, config) for config in configs(spec, sum(placement)))


def placements(job: JobHistory) -> Callable[[TrainingSample], Placement | None]:
    """The replicas on each node, the most first, of the group that a sample is of; None where the log does
    not tell."""
    known = {
        started.generation: tuple(sorted((part.replicas for part in started.allocation), reverse=True))
        for _, started in job.generations
    }

    def of_sample(sample: TrainingSample) -> Placement | None:
        # A batch alone changes the generation, and not the group that was told of.
        return known.get(max((number for number in known if number <= sample.generation), default=-1))

    return of_sample


def _rate(
    measured: MeasuredProfile, spec: JobSpec, placement: Placement, progress: float, config: JobConfig
) -> float:
    batch = config.total_batch(sum(placement))
    gain = measured.gain(batch, progress, max(batch / spec.min_batch_size, 1.0))
    return gain / measured.step_s(placement, config.atomic_batch, config.accumulation)
