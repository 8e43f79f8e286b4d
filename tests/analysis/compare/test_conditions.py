from analysis.compare.conditions import Spread, noise
from analysis.compare.experiment_files import RunRecord
from tests.fixtures.runs import compared_run


def test_the_spread_over_the_runs_of_a_policy_skips_what_was_not_recorded() -> None:
    runs = [compared_run("tail", "fixed", seed, 10) for seed in (1, 2, 3)]
    runs.append(compared_run("tail", "pollux", 1, 10))
    measured = ({"wall_s": 20.0, "load_mean": 1.0}, {"wall_s": 30.0}, {"wall_s": 10.0})
    records = {
        run.name: RunRecord(set="tail", policy="fixed", seed=run.seed, **figures)
        for run, figures in zip(runs, measured, strict=False)
    }
    found = noise(runs, records)
    assert found["fixed"]["wall_s"] == Spread(least=10.0, median=20.0, most=30.0)
    assert found["fixed"]["load_mean"] == Spread(1.0, 1.0, 1.0)
    assert found["fixed"]["steal_fraction"] is None
    assert found["pollux"]["wall_s"] is None
