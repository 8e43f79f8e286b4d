"""Simulations in several processes, when one is killed or the user interrupts."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from services.simulator.parallel import WorkerLost, simulate_all
from tests.fixtures.simulation_cases import synthetic_case

CASES = [synthetic_case("fixed", jobs=1, seed=seed) for seed in (1, 2, 3)]


def test_a_killed_worker_is_reported_with_the_number_of_missing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.simulator.run_case.simulate", lambda _: os._exit(1))
    with pytest.raises(WorkerLost, match=r"killed from outside .*-j 1 needs less.*: 3 of 3 runs are missing"):
        list(simulate_all(CASES, 2))
    assert WorkerLost.exit_code == 1


def test_only_the_parent_process_receives_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blocked(case: Any) -> SimpleNamespace:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return SimpleNamespace(run_id=case.run_id, mean_jct_s=None, cpu_s=0.0, mask=mask)

    monkeypatch.setattr("services.simulator.run_case.simulate", blocked)
    results: list[Any] = list(simulate_all(CASES, 2))
    assert [result.run_id for result in results] == [case.run_id for case in CASES]
    assert all(signal.SIGINT in result.mask for result in results)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
