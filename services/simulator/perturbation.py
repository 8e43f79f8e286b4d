"""Errors in what a scheduler knows of its jobs: perturbed measurements in place of the true ones. Pure."""

import zlib

import numpy as np
from msgspec import structs

from common.types import GradientStatistics, Struct


class Perturbation(Struct, frozen=True):
    """`times` is the bound b of a factor drawn uniformly from [1 - b, 1 + b] for each time of each
    configuration of a job. (One factor for all its times would cancel in every speedup.) `noise` is a factor
    on the job's gradient noise scale."""

    times: float = 0.0
    noise: float = 1.0
    seed: int = 0

    def perturbed_times(
        self, job_id: str, configuration: tuple[int, ...], step_s: float, sync_s: float
    ) -> tuple[float, float]:
        """Step and synchronization time of the last pass of a step, in seconds. Computation and
        synchronization each get a factor, which is fixed for a job and a configuration."""
        if not self.times:
            return step_s, sync_s
        rng = np.random.default_rng([self.seed, zlib.crc32(job_id.encode()), *configuration])
        compute, network = (1.0 + self.times * rng.uniform(-1.0, 1.0, size=2)).tolist()
        perturbed_sync_s = network * sync_s
        return compute * (step_s - sync_s) + perturbed_sync_s, perturbed_sync_s

    def perturbed_statistics(self, statistics: GradientStatistics) -> GradientStatistics:
        return statistics if self.noise == 1 else structs.replace(statistics, var=self.noise * statistics.var)


UNPERTURBED = Perturbation()
