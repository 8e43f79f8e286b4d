"""How wrong a scheduler may be about its jobs: what is told of them, beside what is true. Pure."""

import zlib

import numpy as np
from msgspec import structs

from common.types import GradientStatistics, Struct


class Perturbation(Struct, frozen=True):
    """`times`: bound b of a factor in [1 - b, 1 + b], uniform, on each time of each configuration of a job
    (one factor for all its times would cancel in every speedup). `noise`: factor on its noise scale."""

    times: float = 0.0
    noise: float = 1.0
    seed: int = 0

    def told_times(
        self, job_id: str, configuration: tuple[int, ...], step_s: float, sync_s: float
    ) -> tuple[float, float]:
        """Of the last pass of a step: the computing in it and the synchronisation are wrong by factors of
        their own, always the same ones for a job and its configuration."""
        if not self.times:
            return step_s, sync_s
        rng = np.random.default_rng([self.seed, zlib.crc32(job_id.encode()), *configuration])
        compute, network = (1.0 + self.times * rng.uniform(-1.0, 1.0, size=2)).tolist()
        told_s = network * sync_s
        return compute * (step_s - sync_s) + told_s, told_s

    def told_statistics(self, statistics: GradientStatistics) -> GradientStatistics:
        return statistics if self.noise == 1 else structs.replace(statistics, var=self.noise * statistics.var)


UNPERTURBED = Perturbation()
