"""How close the batches that jobs trained with come to the best ones, by the measured profiles. Pure.

A batch makes gain(batch, progress) / (seconds of its step) AdaScale steps a second. The best batch, among
those that `workloads.files.tuned_requests.configs` tries, makes the most at the same progress on the same
slots. Both rates come from the profile, so the speed of the machine on the day of the run does not count. The
result is what a policy could win by choosing better batches alone: with the best ones, training takes this
fraction of the time that it took.
"""

from collections.abc import Mapping

from analysis.log.history import RunHistory
from analysis.run.placements import placed_samples
from common.lifecycle import UserError
from common.types import JobConfig, JobSpec
from workloads.files.measured_profile import MeasuredProfile, Placement
from workloads.files.tuned_requests import configs


def batch_efficiency(run: RunHistory, profiles: Mapping[str, MeasuredProfile]) -> float | None:
    """Mean over the samples' seconds of rate / best rate; 1: always the best batch. None without a profile of
    any of the run's applications."""
    total_s = best_s = 0.0
    best: dict[tuple[str, Placement, float], float] = {}
    columns = ("job_id", "placement", "progress", "atomic_batch", "accumulation", "window_s", "steps")
    for job_id, nodes, at, atomic_batch, accumulation, window_s, steps in (
        placed_samples(run).select(columns).iter_rows()
    ):
        spec = run.jobs[job_id].spec
        measured = profiles.get(spec.application)
        if measured is None or window_s <= 0 or steps == 0:
            continue
        placement = tuple(nodes)
        every = measured.spec.evaluate_every
        progress = at // every * every
        config = JobConfig(atomic_batch=atomic_batch, accumulation=accumulation)
        try:
            key = (job_id, placement, progress)
            if key not in best:
                best[key] = best_rate(measured, spec, placement, progress)
            chosen = _rate(measured, spec, placement, progress, config)
        except UserError:  # a placement that was not measured
            continue
        total_s += window_s
        best_s += window_s * min(chosen / best[key], 1.0)
    return best_s / total_s if total_s else None


def best_rate(measured: MeasuredProfile, spec: JobSpec, placement: Placement, progress: float) -> float:
    """AdaScale steps a second with the best batch."""
    return max(_rate(measured, spec, placement, progress, config) for config in configs(spec, sum(placement)))


def _rate(
    measured: MeasuredProfile, spec: JobSpec, placement: Placement, progress: float, config: JobConfig
) -> float:
    batch = config.total_batch(sum(placement))
    gain = measured.gain(batch, progress, max(batch / spec.min_batch_size, 1.0))
    return gain / measured.step_s(placement, config.atomic_batch, config.accumulation)
