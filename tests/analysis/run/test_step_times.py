from pathlib import Path

import pytest

from analysis.run.step_times import StepTime, step_factor, step_factors
from common.types import JobConfig
from tests.fixtures.profiles import write_profiles
from workloads.applications import applications
from workloads.files.measured_profile import read_profiles


def test_what_steps_took_is_compared_with_what_as_many_take_by_the_profile(
    tmp_path: Path,
) -> None:
    profiles = read_profiles(write_profiles(tmp_path), applications())

    def steps(application: str, replicas: int, config: JobConfig, factor: float, weight_s: float) -> StepTime:
        known_s = profiles[application].step_s((replicas,), config.atomic_batch, config.accumulation)
        return StepTime(application, (replicas,), config, factor * known_s, weight_s)

    alone = JobConfig(atomic_batch=512, accumulation=1)
    seen = [
        steps("matfac", 1, alone, 1.5, weight_s=3.0),
        steps("matfac", 2, JobConfig(atomic_batch=256), 1.1, weight_s=1.0),
        steps("char-lm", 1, JobConfig(atomic_batch=16), 0.8, weight_s=4.0),
        StepTime("another", (1,), alone, 1.0, 100.0),
        StepTime("matfac", (9,), alone, 1.0, 100.0),  # nobody has measured so many on one node
    ]
    by_profile_s = {"matfac": 3.0 / 1.5 + 1.0 / 1.1, "char-lm": 4.0 / 0.8}
    factors = {"matfac": 4.0 / by_profile_s["matfac"], "char-lm": 0.8}
    assert dict(step_factors(seen, profiles)) == pytest.approx(factors)
    assert step_factor(seen, profiles) == pytest.approx(8.0 / sum(by_profile_s.values()))
    assert step_factor(seen[-2:], profiles) is None
