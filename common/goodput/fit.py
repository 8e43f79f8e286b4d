"""Fit the throughput model to a job's measured step times (Pollux, section 4.1).

Minimises, by L-BFGS-B with its exact gradient,

    RMSLE(accumulation) + RMSLE(last pass)
        + 1e-3 (gamma - 1)^2 + 1e-2 ((beta_n/alpha_n)^2 + (beta_r/alpha_r)^2)

over positive parameters and 1 <= gamma <= 10, where RMSLE is the root mean squared error of logarithms.
The six time parameters are sought as logarithms, from a start of the size of the measured times: the
search then works alike for steps of a millisecond and of a minute.

A parameter that nothing observed tells of is pinned on the optimistic side, so that the scheduler finds
it worth while to try and see: synchronisation is free until it was measured.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from common.goodput.model import ALONE_S, FloatArray, accumulation_time, last_pass_time
from common.types import ProfilePoint, Struct, ThroughputParameters

LOWER_S = 1e-8
UPPER_S = 1e4
START_GAMMA = 1.001
MAX_GAMMA = 10.0
ACROSS_OVER_WITHIN = 1.1
"""Across nodes is taken for at least this much slower than within one, until it was measured."""
SMOOTHING = 1e-3
"""Rounds off the kink of a root mean square at 0, where exact data would stop the line search."""
ALPHA_C, BETA_C, ALPHA_N, BETA_N, ALPHA_R, BETA_R, GAMMA = range(7)


class Fit(Struct, frozen=True):
    """`error` is the root mean squared logarithmic error over both times of all points."""

    parameters: ThroughputParameters
    error: float


def fit_throughput(points: Sequence[ProfilePoint]) -> Fit:
    """The parameters that explain `points` best. Raises ValueError without points, or where a time is
    not a positive finite number."""
    if not points:
        raise ValueError("a fit needs at least one profile point")
    nodes = np.array([p.nodes for p in points])
    replicas = np.array([p.replicas for p in points])
    atomic = np.array([p.atomic_batch for p in points], dtype=float)
    times = np.array([(p.accumulation_s, p.step_s) for p in points]).T
    if not (np.all(np.isfinite(times)) and np.all(times > 0)):
        raise ValueError("profile points need positive, finite times")
    start, lower, upper = _start_and_bounds(nodes, replicas, atomic, times)
    terms = _terms(nodes, replicas, atomic)
    result = minimize(
        _objective,
        start,
        args=(terms, ALONE_S * (replicas == 1), np.log(times)),
        jac=True,
        method="L-BFGS-B",
        bounds=np.stack((lower, upper), axis=1),
        options={"maxiter": 200, "ftol": 1e-7},
    )
    values = np.append(np.exp(result.x[:GAMMA]), result.x[GAMMA])
    if not np.any(nodes > 1):
        values[ALPHA_N] = max(values[ALPHA_N], ACROSS_OVER_WITHIN * values[ALPHA_R])
        values[BETA_N] = max(values[BETA_N], ACROSS_OVER_WITHIN * values[BETA_R])
    names = ThroughputParameters.__struct_fields__
    parameters = ThroughputParameters(**dict(zip(names, values.tolist(), strict=True)))
    predicted = accumulation_time(parameters, atomic), last_pass_time(parameters, nodes, replicas, atomic)
    error = np.sqrt(np.mean((np.log(predicted) - np.log(times)) ** 2))
    return Fit(parameters=parameters, error=float(error))


def _terms(nodes: FloatArray, replicas: FloatArray, atomic: FloatArray) -> FloatArray:
    """What each of the six time parameters is multiplied by, at each point: [6, points]."""
    across, within = nodes > 1, (nodes == 1) & (replicas > 1)
    beyond_two = np.maximum(replicas - 2, 1e-8)
    rows = (np.ones_like(atomic), atomic, across, across * beyond_two, within, within * beyond_two)
    return np.stack(rows).astype(float)


def _start_and_bounds(
    nodes: FloatArray, replicas: FloatArray, atomic: FloatArray, times: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Start, lower and upper bounds of what is sought; equal bounds pin what was not observed."""
    compute = float(np.mean(times[0]))
    network = max(float(np.mean(times[1] - times[0])), compute / 100)
    start = np.array(
        [compute / 2, compute / 2 / float(np.mean(atomic)), network, network / 10, network, network / 10]
    )
    start = np.append(np.log(start), START_GAMMA)
    lower = np.append(np.full(GAMMA, np.log(LOWER_S)), 1.0)
    upper = np.append(np.full(GAMMA, np.log(UPPER_S)), MAX_GAMMA)

    def pin(which: list[int], value_s: float) -> None:
        start[which] = lower[which] = upper[which] = np.log(value_s)

    if len(np.unique(atomic)) == 1:
        pin([ALPHA_C], compute / 2)
    if not np.any(nodes > 1):
        pin([ALPHA_N, BETA_N], LOWER_S)
    if not np.any((nodes == 1) & (replicas > 1)):
        pin([ALPHA_R, BETA_R], LOWER_S)
    if not np.any(replicas > 2):
        pin([BETA_N, BETA_R], LOWER_S)
    return np.clip(start, lower, upper), lower, upper


def _objective(
    x: FloatArray, terms: FloatArray, alone_s: FloatArray, log_times: FloatArray
) -> tuple[float, FloatArray]:
    """The objective and its gradient at x = (logarithms of the six times, gamma)."""
    gamma = float(x[GAMMA])
    parts = np.exp(x[:GAMMA, None]) * terms
    accumulation_s = parts[:ALPHA_N].sum(axis=0)
    network_s = parts[ALPHA_N:].sum(axis=0) + alone_s
    log_accumulation, log_network = np.log(accumulation_s), np.log(network_s)
    blend = np.logaddexp(gamma * log_accumulation, gamma * log_network)
    # The derivatives of a blend's logarithm are the shares of computing and of synchronising in it.
    computing, networking = np.exp(gamma * log_accumulation - blend), np.exp(gamma * log_network - blend)

    of_accumulation, accumulation_rms = _root_mean_square(log_accumulation - log_times[0])
    of_last, last_rms = _root_mean_square(blend / gamma - log_times[1])
    gradient = np.zeros(7)
    gradient[:ALPHA_N] = parts[:ALPHA_N] @ ((of_accumulation + of_last * computing) / accumulation_s)
    gradient[ALPHA_N:GAMMA] = parts[ALPHA_N:] @ (of_last * networking / network_s)
    by_gamma = (computing * log_accumulation + networking * log_network - blend / gamma) / gamma
    gradient[GAMMA] = of_last @ by_gamma + 2e-3 * (gamma - 1)
    value = accumulation_rms + last_rms + 1e-3 * (gamma - 1) ** 2
    for alpha, beta in ((ALPHA_N, BETA_N), (ALPHA_R, BETA_R)):
        penalty = 1e-2 * math.exp(2 * (x[beta] - x[alpha]))
        value += penalty
        gradient[beta] += 2 * penalty
        gradient[alpha] -= 2 * penalty
    return float(value), gradient


def _root_mean_square(errors: FloatArray) -> tuple[FloatArray, float]:
    """Its gradient by the errors, and the root mean square itself, smoothed at 0."""
    rms = math.sqrt(float(errors @ errors) / len(errors) + SMOOTHING**2)
    return errors / (len(errors) * rms), rms
