from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import TrainerConfig
from common.protocol import GenerationRunning, GenerationStarted, ReplicaOrder
from common.types import JobConfig
from workloads.trainer.reports import Reporter, StepWatch


def test_a_new_group_tells_how_long_nobody_trained_and_how_long_its_first_step_took(tmp_path: Path) -> None:
    sent: list[Any] = []
    now = SimpleNamespace(s=100.0)
    reporter = Reporter("job", TrainerConfig(sample_every_s=60.0), tmp_path, sent.append, lambda: now.s)
    order = ReplicaOrder(
        generation=3,
        group=3,
        rank=0,
        world_size=1,
        nodes=1,
        config=JobConfig(atomic_batch=8),
        store_host="",
        store_port=0,
    )
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
    watch = StepWatch(1.0, clock=lambda: 0.25 * next(ticks), cpu_clock=lambda: 0.0)
    reporter.switch(order, 7, beginning)
    now.s = 102.0
    watch.end()
    state: Any = SimpleNamespace(progress=9.0)
    reporter.step(state, watch, loss=1.0, gain=1.0)
    started, running = sent
    assert (started.seconds_lost, started.first_step_s) == pytest.approx((1.75, 0.25))
    assert started.progress == 9.0
    assert running == GenerationRunning(job_id="job", generation=3, progress=9.0)
