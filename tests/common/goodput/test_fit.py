"""The fit recovers known parameters, and predicts what it cannot identify."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy.optimize import approx_fprime, minimize

from common.goodput import fit as fitting
from common.goodput.fit import fit_throughput
from common.goodput.model import accumulation_time, last_pass_time, step_time
from common.types import ProfilePoint, ThroughputParameters

TRUE = ThroughputParameters(
    alpha_c=0.011, beta_c=0.0004, alpha_n=0.03, beta_n=0.002, alpha_r=0.008, beta_r=0.0015, gamma=1.8
)
NAMES = ("alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r", "gamma")
EVERYWHERE = [(n, r, m) for n, r in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (3, 8)) for m in (8, 32, 128)]


def points(
    truth: ThroughputParameters, configurations: list[tuple[int, int, int]], noise: float = 0.0
) -> list[ProfilePoint]:
    rng = np.random.default_rng(3)
    return [
        ProfilePoint(
            nodes=nodes,
            replicas=replicas,
            atomic_batch=atomic,
            accumulation_s=float(accumulation_time(truth, atomic) * np.exp(noise * rng.normal())),
            step_s=float(last_pass_time(truth, nodes, replicas, atomic) * np.exp(noise * rng.normal())),
            samples=1,
        )
        for nodes, replicas, atomic in configurations
    ]


def test_parameters_of_a_synthetic_profile_are_recovered() -> None:
    fitted = fit_throughput(points(TRUE, EVERYWHERE))
    for name in NAMES:
        assert getattr(fitted.parameters, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    assert fitted.error < 0.005


@given(
    alphas=st.tuples(*[st.floats(1e-3, 1.0)] * 3),
    beta_c=st.floats(1e-5, 1e-2),
    ratios=st.tuples(*[st.floats(1e-3, 0.5)] * 2),
    gamma=st.floats(1.0, 3.0),
)
def test_predictions_of_unseen_configurations_are_within_5_percent(
    alphas: tuple[float, float, float], beta_c: float, ratios: tuple[float, float], gamma: float
) -> None:
    """Where a further replica costs less than the first synchronisation: the objective's prior says so, and
    bends the fit of jobs of which that is not true."""
    alpha_c, alpha_n, alpha_r = alphas
    truth = ThroughputParameters(
        alpha_c=alpha_c,
        beta_c=beta_c,
        alpha_n=alpha_n,
        beta_n=alpha_n * ratios[0],
        alpha_r=alpha_r,
        beta_r=alpha_r * ratios[1],
        gamma=gamma,
    )
    fitted = fit_throughput(points(truth, EVERYWHERE)).parameters
    for nodes, replicas, atomic in ((1, 3, 16), (2, 3, 64), (2, 6, 100), (1, 1, 50)):
        assert last_pass_time(fitted, nodes, replicas, atomic) == pytest.approx(
            last_pass_time(truth, nodes, replicas, atomic), rel=0.05
        )
        assert accumulation_time(fitted, atomic) == pytest.approx(accumulation_time(truth, atomic), rel=0.05)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_the_unit_of_time_does_not_matter(unit: float) -> None:
    seconds = {
        name: getattr(TRUE, name) * (1.0 if name == "gamma" else unit)
        for name in ThroughputParameters.__struct_fields__
    }
    truth = ThroughputParameters(**seconds)
    fitted = fit_throughput(points(truth, EVERYWHERE)).parameters
    assert last_pass_time(fitted, 2, 6, 64) == pytest.approx(last_pass_time(truth, 2, 6, 64), rel=0.02)


def test_the_update_of_a_step_counts_neither_as_computing_nor_as_synchronising() -> None:
    truth = replace(TRUE, update_s=0.009)
    fitted = fit_throughput(points(truth, EVERYWHERE))
    assert fitted.parameters.update_s == pytest.approx(0.009)
    assert fitted.error < 0.005
    for nodes, replicas, atomic, accumulation in ((1, 1, 64, 3), (1, 3, 16, 0), (2, 6, 100, 1)):
        assert step_time(fitted.parameters, nodes, replicas, atomic, accumulation) == pytest.approx(
            step_time(truth, nodes, replicas, atomic, accumulation), rel=0.02
        )


def test_without_points_of_one_replica_the_update_takes_no_time() -> None:
    groups = [(nodes, replicas, atomic) for nodes, replicas, atomic in EVERYWHERE if replicas > 1]
    fitted = fit_throughput(points(replace(TRUE, update_s=0.009), groups))
    assert fitted.parameters.update_s == 0.0
    assert fitted.error < 0.1


def test_steps_that_are_shorter_than_their_passes_have_no_update() -> None:
    alone = ProfilePoint(nodes=1, replicas=1, atomic_batch=8, accumulation_s=0.02, step_s=0.019, samples=3)
    assert fit_throughput([alone]).parameters.update_s == 0.0


def test_a_group_that_is_faster_than_the_update_of_one_replica_is_still_explained() -> None:
    """Medians of different moments, on a machine whose speed has changed in between."""
    alone = ProfilePoint(nodes=1, replicas=1, atomic_batch=8, accumulation_s=0.01, step_s=0.05, samples=3)
    group = ProfilePoint(nodes=1, replicas=2, atomic_batch=8, accumulation_s=0.01, step_s=0.03, samples=3)
    fitted = fit_throughput([alone, group]).parameters
    assert fitted.update_s == pytest.approx(0.04)
    assert math.isfinite(float(last_pass_time(fitted, 1, 2, 8)))


def test_noisy_measurements_are_fitted_as_well_as_their_noise_allows() -> None:
    fitted = fit_throughput(points(TRUE, EVERYWHERE, noise=0.05))
    assert fitted.error < 0.06
    assert last_pass_time(fitted.parameters, 1, 3, 64) == pytest.approx(
        last_pass_time(TRUE, 1, 3, 64), rel=0.1
    )


def test_one_configuration_is_fitted_with_free_synchronisation() -> None:
    fitted = fit_throughput(points(TRUE, [(1, 1, 32)]))
    assert fitted.error < 0.01
    mean_s = float(accumulation_time(TRUE, 32))
    assert fitted.parameters.alpha_c == pytest.approx(mean_s / 2)
    assert fitted.parameters.alpha_r == pytest.approx(1e-8)
    assert fitted.parameters.alpha_n == pytest.approx(1.1e-8)
    assert last_pass_time(fitted.parameters, 1, 4, 32) == pytest.approx(mean_s, rel=0.02)


def test_synchronising_across_nodes_is_assumed_a_tenth_slower_until_measured() -> None:
    fitted = fit_throughput(points(TRUE, [(1, 1, 8), (1, 2, 8), (1, 4, 32)])).parameters
    assert fitted.alpha_n == pytest.approx(1.1 * fitted.alpha_r)
    assert fitted.beta_n == pytest.approx(1.1 * fitted.beta_r)


def test_nothing_above_two_replicas_pins_the_growth_of_synchronisation() -> None:
    fitted = fit_throughput(points(TRUE, [(1, 1, 8), (1, 2, 8), (2, 2, 32)])).parameters
    assert fitted.beta_r == pytest.approx(1e-8)
    assert fitted.beta_n == pytest.approx(1e-8)


def test_gamma_stays_within_its_bounds() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        noisy = [
            ProfilePoint(
                nodes=n,
                replicas=r,
                atomic_batch=m,
                samples=1,
                accumulation_s=a,
                step_s=a * rng.uniform(0.5, 3),
            )
            for (n, r, m), a in zip(EVERYWHERE, rng.uniform(0.01, 0.2, len(EVERYWHERE)), strict=True)
        ]
        assert 1.0 <= fit_throughput(noisy).parameters.gamma <= 10.0


def measured(profile: list[ProfilePoint]) -> fitting.FitData:
    columns = [
        np.array([getattr(p, name) for p in profile]) for name in ("nodes", "replicas", "atomic_batch")
    ]
    return fitting.FitData(*columns, np.array([(p.accumulation_s, p.step_s) for p in profile]).T)


def test_the_gradient_is_that_of_the_objective() -> None:
    profile = measured(points(TRUE, EVERYWHERE, noise=0.3))
    rng = np.random.default_rng(0)
    for _ in range(20):
        x = np.append(rng.uniform(-7, -1, 6), rng.uniform(1, 5))
        gradient, _ = fitting.Objective(x, profile).derivatives()
        numeric = approx_fprime(x, lambda at: fitting.Objective(at, profile).value, 1e-7)
        assert gradient == pytest.approx(numeric, rel=1e-5, abs=1e-5)


def test_the_objective_of_an_exact_explanation_is_its_prior() -> None:
    *times_s, gamma = (getattr(TRUE, name) for name in NAMES)
    x = np.append(np.log(times_s), gamma)
    value = fitting.Objective(x, measured(points(TRUE, EVERYWHERE))).value
    prior = 1e-3 * (gamma - 1) ** 2 + 1e-2 * ((0.002 / 0.03) ** 2 + (0.0015 / 0.008) ** 2)
    assert value - 2 * fitting.SMOOTHING == pytest.approx(prior, rel=1e-4)


def random_profile(seed: int) -> list[ProfilePoint]:
    """Up to 30 configurations of a job of any speed, exact or with up to 20 % of noise."""
    rng = np.random.default_rng(seed)
    pass_s = 10 ** rng.uniform(-3, 0)
    truth = ThroughputParameters(
        alpha_c=pass_s,
        beta_c=pass_s * 10 ** rng.uniform(-3, 0),
        alpha_n=pass_s * 10 ** rng.uniform(-1.5, 1),
        beta_n=pass_s * 10 ** rng.uniform(-3, 0),
        alpha_r=pass_s * 10 ** rng.uniform(-2, 0.5),
        beta_r=pass_s * 10 ** rng.uniform(-3, -0.5),
        gamma=rng.uniform(1, 6),
    )
    most = int(rng.choice([1, 2, 4, 16, 32]))
    configurations = set()
    for _ in range(rng.integers(1, 31)):
        replicas = int(rng.integers(1, most + 1))
        nodes = int(rng.integers(1, min(replicas, 4) + 1))
        configurations.add((nodes, replicas, int(2 ** rng.uniform(2, 9))))
    return points(truth, sorted(configurations), noise=rng.choice([0.0, 0.01, 0.05, 0.2]))


def test_no_minimum_is_worse_than_that_of_a_quasi_newton_method() -> None:
    """Scipy's L-BFGS-B, from the same start. It often stops short in a narrow valley."""
    better = 0
    for seed in range(60):
        profile = random_profile(seed)
        columns = [np.array([getattr(p, n) for p in profile]) for n in ("nodes", "replicas", "atomic_batch")]
        times = np.array([(p.accumulation_s, p.step_s) for p in profile]).T
        start, lower, upper = fitting._start_and_bounds(*columns, times)
        explained = measured(profile)
        found = fitting._minimise(explained, start, lower, upper)
        assert np.all((lower <= found.x) & (found.x <= upper))

        def objective(x: np.ndarray, explained: fitting.FitData = explained) -> tuple[float, np.ndarray]:
            at = fitting.Objective(x, explained)
            return at.value, at.derivatives()[0]

        bounds = np.stack((lower, upper), axis=1)
        other = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"ftol": 1e-7})
        assert found.value <= other.fun + 1e-6, seed
        better += found.value < other.fun - 1e-6
    assert better >= 20


def test_the_order_of_the_points_does_not_matter() -> None:
    for seed in range(10):
        profile = random_profile(seed)
        one, two = fit_throughput(profile), fit_throughput(profile[::-1])
        assert two.error == pytest.approx(one.error, rel=1e-4, abs=1e-5)


def test_an_outlier_for_a_third_replica_moves_the_fit_only_halfway() -> None:
    """The prior's weight: without it the exact ratio of 10 comes out, with ten times of it one below 1.1."""
    truth = ThroughputParameters(
        alpha_c=0.011, beta_c=0.0004, alpha_n=0.03, beta_n=0.3, alpha_r=0.008, beta_r=0.08, gamma=1.8
    )
    fitted = fit_throughput(points(truth, EVERYWHERE)).parameters
    assert 1.5 < fitted.beta_r / fitted.alpha_r < 4.0
    assert 1.5 < fitted.beta_n / fitted.alpha_n < 5.0


@pytest.mark.parametrize("bad_s", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_not_positive_and_finite_are_refused(bad_s: float) -> None:
    point = ProfilePoint(nodes=1, replicas=1, atomic_batch=8, accumulation_s=0.1, step_s=bad_s, samples=1)
    with pytest.raises(ValueError, match="positive, finite"):
        fit_throughput([point])


def test_a_fit_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fit_throughput([])
