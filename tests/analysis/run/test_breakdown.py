from dataclasses import replace

import pytest
from msgspec import structs

from analysis.run.breakdown import Breakdown, breakdown
from analysis.run.step_times import step_times
from common.protocol import GenerationStarted
from tests.fixtures.logs import add, changed, good_run, history_of
from tests.fixtures.runs import happenings


def test_the_parts_of_a_completion_time_are_read_from_the_log():
    run = history_of(good_run())
    assert breakdown(run.jobs["a"]) == Breakdown(
        queue_s=2.0, wait_s=0.5, start_s=0.5, training_s=14.0 - 2.0 - 0.5 - 0.5 - 0.25 - 2.0, rescale_s=0.25,
        preempted_s=0.0, verification_s=2.0,
    )  # fmt: skip
    assert breakdown(run.jobs["b"]) is None
    (alone, together) = step_times(run)
    assert (alone.placement, alone.step_s, alone.weight_s) == ((1,), pytest.approx(0.1), 5.0)
    assert (sum(together.placement), together.weight_s) == (2, 4.0)


def test_seconds_without_slots_after_the_first_ones_are_preempted():
    told = add(good_run(), "scheduler", 114.0, changed("a", "running", "pending"))
    told = add(told, "scheduler", 116.0, changed("a", "pending", "starting"))
    parts = breakdown(history_of(told).jobs["a"])
    assert parts is not None
    assert parts.preempted_s == 2.0
    # Its slots are there again at 116; the next group's seconds lost end with its first step, at 117.
    assert parts.wait_s == 0.5 + (117.0 - 0.25 - 116.0)
    assert sum(getattr(parts, name) for name in parts.__struct_fields__) == 14.0


def test_waiting_for_somebody_to_leave_its_slots_is_no_training():
    told = [replace(h, event=structs.replace(h.event, first_step_s=0.1)) if h.t_s == 113.0 and
            isinstance(h.event, GenerationStarted) else h for h in good_run()]  # fmt: skip
    parts = breakdown(history_of(told).jobs["a"])
    assert parts is not None
    assert parts.wait_s == pytest.approx(113.0 - 0.1 - 0.5 - 112.0)
    assert parts.training_s == pytest.approx(14.0 - 2.0 - 0.4 - 0.5 - 0.25 - 2.0)


def test_a_first_step_at_the_very_decision_ends_the_waiting():
    run = history_of(happenings("s", "fixed", 1, [20.0]))
    parts = breakdown(run.jobs["job-0"])
    assert parts is not None
    assert (parts.wait_s, parts.training_s) == (0.0, pytest.approx(18.75))
