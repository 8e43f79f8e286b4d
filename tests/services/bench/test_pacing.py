"""The benchmark's own measurement, short: real replicas in a real group keep to the speed of their slots."""

import pytest

from services.bench.pacing import PacingCase, ReplicaStarter, parallel_rounds
from workloads.trainer.pacer import BURST_S

pytestmark = pytest.mark.timeout(120)
PIECE_S = 0.1
"""CPU seconds of the last piece of work, communication and all, that may be still owed; far too many."""


def test_a_pair_of_replicas_uses_no_more_than_its_slots_are_worth() -> None:
    """However busy the machine is. That it gets as much is what the benchmark shows on an idle one."""
    case = PacingCase("digits-cnn", replicas=2, speed=0.2)
    with ReplicaStarter() as starter:
        small, large = starter.measure([case], window_s=1.5)
    assert (small["atomic_batch"], large["atomic_batch"]) == (8, 64)
    for figure in (small, large):
        allowed_s = case.speed * (figure["wall_s"] + BURST_S) + PIECE_S
        for share in figure["shares"]:
            assert 0.0 < share * figure["wall_s"] <= allowed_s


def test_groups_are_measured_together_as_long_as_there_are_cores() -> None:
    cases = [PacingCase("a", replicas, speed) for replicas in (1, 2) for speed in (0.1, 0.5, 1.0)]
    rounds = parallel_rounds(cases, 2)
    assert sorted(case for together in rounds for case in together) == sorted(cases)
    assert [sum(case.cores for case in together) for together in rounds] == pytest.approx([2.0, 2.0, 0.8])
    assert parallel_rounds([PacingCase("a", 2, 1.0)], 1) == [[PacingCase("a", 2, 1.0)]]
