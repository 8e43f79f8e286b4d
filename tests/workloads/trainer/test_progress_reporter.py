"""What a replica reports, with clocks that the test moves."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import TrainerConfig
from common.protocol import GenerationRunning, GenerationStarted
from tests.fixtures.replica_orders import replica_order
from workloads.trainer.progress_reporter import ProgressReporter
from workloads.trainer.step_timer import StepTimer


def test_a_new_group_reports_how_long_no_replica_trained_and_how_long_its_first_step_took(
    tmp_path: Path,
) -> None:
    sent: list[Any] = []
    now = SimpleNamespace(s=100.0)
    reporter = ProgressReporter(
        "job", TrainerConfig(sample_every_s=60.0), tmp_path, sent.append, lambda: now.s
    )
    order = replica_order(3, group=3)
    beginning = GenerationStarted(
        job_id="job",
        generation=3,
        old_replicas=2,
        allocation=(),
        config=order.config,
        state_from="survivor",
        seconds_lost=0.0,
        progress=0.0,
    )
    ticks = count(0)
    timer = StepTimer(1.0, clock=lambda: 0.25 * next(ticks), cpu_clock=lambda: 0.0)
    reporter.switch(order, 7, beginning)
    now.s = 102.0
    timer.end()
    state: Any = SimpleNamespace(progress=9.0)
    reporter.step(state, timer, loss=1.0, gain=1.0)
    started, running = sent
    assert (started.seconds_lost, started.first_step_s) == pytest.approx((1.75, 0.25))
    assert started.progress == 9.0
    assert running == GenerationRunning(job_id="job", generation=3, progress=9.0)
