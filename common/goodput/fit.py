"""Fit the throughput model to a job's measured step times (Pollux, section 4.1).

The fit minimises

    RMSLE(accumulation) + RMSLE(last pass)
        + 1e-3 (gamma - 1)^2 + 1e-2 ((beta_n/alpha_n)^2 + (beta_r/alpha_r)^2)

over positive parameters and 1 <= gamma <= 10, where RMSLE is the root mean squared error of the logarithms.
The search runs over the logarithms of the six time parameters and starts near the measured times, so it works
for steps of a millisecond and of a minute alike. It is a Levenberg-Marquardt descent within bounds. With at
most seven parameters and exact derivatives it needs a third of the evaluations of a quasi-Newton method, and
does not get stuck in the narrow valleys of this objective. A fit depends only on its points, not on earlier
fits.

The time of a step of one replica beyond its pass is neither computing nor synchronising. It is measured
first, as the median over the points with one replica, and subtracted from all last passes; predictions add it
again. In the paper's jobs it is negligible. In small jobs it is a large part of a step, and it is what makes
accumulation worthwhile.

A parameter about which no point says anything is fixed at an optimistic value, so that the scheduler tries
it: synchronisation is free until it has been measured.
"""

import math
from collections.abc import Sequence

import numpy as np

from common.goodput.model import ALONE_S, FloatArray, accumulation_time, last_pass_time
from common.types import ProfilePoint, Struct, ThroughputParameters

LOWER_S = 1e-8
UPPER_S = 1e4
START_GAMMA = 1.001
MAX_GAMMA = 10.0
ACROSS_OVER_WITHIN = 1.1
"""Synchronising across nodes is assumed to be at least this much slower than within one, until measured."""
LEAST_LEFT = 0.5
"""At least this fraction of a last pass counts as computing and synchronising."""
SMOOTHING = 1e-3
"""Smooths the kink of a root mean square at 0, where exact data would stop the search."""
PRECISION = 1e-8
"""The search ends when its next step is predicted to lower the objective by less than this."""
NEAR = 1e-3
"""If a step lowers the objective by less than this fraction, the search is near the minimum."""
MAX_EVALUATIONS = 80
ALPHA_C, BETA_C, ALPHA_N, BETA_N, ALPHA_R, BETA_R, GAMMA = range(7)
GROWTH_SLOPE = np.array([-1.0, 1.0])
"""Derivative of log(beta / alpha) by (log alpha, log beta)."""
GROWTH_CURVATURE = np.outer(GROWTH_SLOPE, GROWTH_SLOPE)
IDENTITY = np.eye(7)


class Fit(Struct, frozen=True):
    """The result of a fit. `error` is the root mean squared logarithmic error over both times of all
    points."""

    parameters: ThroughputParameters
    error: float


def fit_throughput(points: Sequence[ProfilePoint]) -> Fit:
    """The parameters that fit `points` best. Raises ValueError if there is no point, or if a time is not
    positive and finite."""
    if not points:
        raise ValueError("a fit needs at least one profile point")
    nodes = np.array([p.nodes for p in points])
    replicas = np.array([p.replicas for p in points])
    atomic = np.array([p.atomic_batch for p in points], dtype=float)
    times = np.array([(p.accumulation_s, p.step_s) for p in points]).T
    if not (np.all(np.isfinite(times)) and np.all(times > 0)):
        raise ValueError("profile points need positive, finite times")
    update_s = _update_time(replicas, times)
    synchronised = np.array((times[0], np.maximum(times[1] - update_s, LEAST_LEFT * times[1])))
    start, lower, upper = _start_and_bounds(nodes, replicas, atomic, synchronised)
    measured = FitData(nodes, replicas, atomic, synchronised)
    x = _minimise(measured, start, lower, upper).x
    values = np.append(np.exp(x[:GAMMA]), x[GAMMA])
    if not np.any(nodes > 1):
        values[ALPHA_N] = max(values[ALPHA_N], ACROSS_OVER_WITHIN * values[ALPHA_R])
        values[BETA_N] = max(values[BETA_N], ACROSS_OVER_WITHIN * values[BETA_R])
    names = ThroughputParameters.__struct_fields__
    parameters = ThroughputParameters(**dict(zip(names, [*values.tolist(), update_s], strict=True)))
    predicted = accumulation_time(parameters, atomic), last_pass_time(parameters, nodes, replicas, atomic)
    error = np.sqrt(np.mean((np.log(predicted) - np.log(times)) ** 2))
    return Fit(parameters=parameters, error=float(error))


def _update_time(replicas: FloatArray, times: FloatArray) -> float:
    """Seconds of a step of one replica beyond its pass; 0 if no point has one replica."""
    beyond = (times[1] - times[0])[replicas == 1]
    return max(float(np.median(beyond)), 0.0) if len(beyond) else 0.0


class FitData:
    """The data to fit. terms [6, points]: the factor of each time parameter at each point. log_times [2 x
    points]: logarithms of the accumulation passes, then of the last passes. `times` is [2, points]."""

    def __init__(
        self, nodes: FloatArray, replicas: FloatArray, atomic: FloatArray, times: FloatArray
    ) -> None:
        across, within = nodes > 1, (nodes == 1) & (replicas > 1)
        beyond_two = np.maximum(replicas - 2, 1e-8)
        self.terms = np.empty((GAMMA, len(nodes)))
        for row, term in enumerate((1.0, atomic, across, across * beyond_two, within, within * beyond_two)):
            self.terms[row] = term
        self.alone_s = ALONE_S * (replicas == 1)
        self.log_times = np.log(times).ravel()


class Objective:
    """The objective at x = (logarithms of the six time parameters, gamma) [7], and its derivatives there."""

    def __init__(self, x: FloatArray, measured: FitData) -> None:
        self.x = x
        self.gamma = float(x[GAMMA])
        self.parts = np.exp(x[:GAMMA, None]) * measured.terms
        self.compute_s = self.parts[ALPHA_C] + self.parts[BETA_C]
        self.network_s = self.parts[ALPHA_N:].sum(axis=0) + measured.alone_s
        log_compute = np.log(self.compute_s)
        self.apart = self.gamma * (np.log(self.network_s) - log_compute)
        self.overlap = np.logaddexp(0.0, self.apart)
        points = len(self.compute_s)
        predicted = np.concatenate((log_compute, log_compute + self.overlap / self.gamma))
        self.errors = predicted - measured.log_times
        squares = self.errors * self.errors
        self.rms = [
            math.sqrt(float(part.sum()) / points + SMOOTHING**2)
            for part in (squares[:points], squares[points:])
        ]
        self.growth = [1e-2 * math.exp(2.0 * float(x[alpha + 1] - x[alpha])) for alpha in (ALPHA_N, ALPHA_R)]
        self.value = sum(self.rms) + sum(self.growth) + 1e-3 * (self.gamma - 1.0) ** 2

    def derivatives(self, near: bool = False) -> tuple[FloatArray, FloatArray]:
        """The gradient [7] and the curvature [7, 7], both as if the errors were linear in x.

        `near` a minimum, the curvature is that of the objective. Elsewhere it is that of a quadratic that
        lies above the objective: a square root lies below its tangents.
        """
        points = len(self.compute_s)
        # The logarithm of a last pass has as derivatives the shares of computing and synchronising in the
        # pass.
        networking = np.exp(self.apart - self.overlap)
        slopes = np.zeros((GAMMA + 1, 2 * points))
        shares = self.parts[:ALPHA_N] / self.compute_s
        slopes[:ALPHA_N, :points] = shares
        slopes[:ALPHA_N, points:] = shares * (1.0 - networking)
        slopes[ALPHA_N:GAMMA, points:] = self.parts[ALPHA_N:] * (networking / self.network_s)
        slopes[GAMMA, points:] = (networking * self.apart - self.overlap) / self.gamma**2
        weighted = slopes.copy()
        weighted[:, :points] /= points * self.rms[0]
        weighted[:, points:] /= points * self.rms[1]
        gradient, curvature = weighted @ self.errors, weighted @ slopes.T
        if near:
            halves = (weighted * self.errors).reshape(GAMMA + 1, 2, points).sum(axis=2)
            curvature -= (halves / self.rms) @ halves.T
        gradient[GAMMA] += 2e-3 * (self.gamma - 1.0)
        curvature[GAMMA, GAMMA] += 2e-3
        for alpha, growth in zip((ALPHA_N, ALPHA_R), self.growth, strict=True):
            pair = slice(alpha, alpha + 2)
            gradient[pair] += 2.0 * growth * GROWTH_SLOPE
            curvature[pair, pair] += 4.0 * growth * GROWTH_CURVATURE
        return gradient, curvature


def _minimise(measured: FitData, start: FloatArray, lower: FloatArray, upper: FloatArray) -> Objective:
    """Find a minimum within bounds. Damping falls while the quadratic model predicts well, and rises when a
    step does not lower the objective."""
    at = Objective(start, measured)
    gradient, curvature = at.derivatives()
    damping = 1e-2
    for _ in range(MAX_EVALUATIONS):
        step = _step_within(gradient, curvature, damping, lower - at.x, upper - at.x)
        predicted = -float(gradient @ step + step @ curvature @ step / 2.0)
        if 0.0 <= predicted < PRECISION:
            break
        tried = Objective(np.minimum(np.maximum(at.x + step, lower), upper), measured)
        gained = at.value - tried.value
        if predicted > 0.0 and gained > 1e-3 * predicted:
            at = tried
            gradient, curvature = at.derivatives(near=gained < NEAR * at.value)
            if gained > 0.75 * predicted:
                damping = max(damping / 5.0, 1e-9)
            elif gained < 0.25 * predicted:
                damping *= 2.0
        else:
            damping *= 4.0
    return at


def _step_within(
    gradient: FloatArray, curvature: FloatArray, damping: float, below: FloatArray, above: FloatArray
) -> FloatArray:
    """The damped Newton step with every component between `below` and `above`. A component that would leave
    these bounds is fixed at the bound, and the others are solved for again."""
    step = np.zeros(len(gradient))
    damped = curvature + damping * IDENTITY
    slope = -gradient
    free = np.flatnonzero(np.where(slope < 0.0, below < 0.0, above > 0.0))
    while len(free):
        wanted = np.linalg.solve(damped[free[:, None], free], slope[free])
        kept = np.minimum(np.maximum(wanted, below[free]), above[free])
        step[free] = kept
        inside = kept == wanted
        if inside.all():
            break
        stopped, free = free[~inside], free[inside]
        slope -= damped[:, stopped] @ step[stopped]
    return step


def _start_and_bounds(
    nodes: FloatArray, replicas: FloatArray, atomic: FloatArray, times: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Start, lower and upper bounds of the search, [7] each. Equal bounds fix what was not observed."""
    compute = float(np.mean(times[0]))
    network = max(float(np.mean(times[1] - times[0])), compute / 100)
    # With one replica both times are computing times, and a start at either is at a kink of the objective.
    seen = compute if np.any(replicas > 1) else math.sqrt(compute * float(np.mean(times[1])))
    a_batch = max(seen - compute / 2, compute / 100) / float(np.mean(atomic))
    start = np.array([compute / 2, a_batch, network, network / 10, network, network / 10])
    start = np.append(np.log(start), START_GAMMA)
    lower = np.append(np.full(GAMMA, np.log(LOWER_S)), 1.0)
    upper = np.append(np.full(GAMMA, np.log(UPPER_S)), MAX_GAMMA)

    def pin(which: list[int], value_s: float) -> None:
        start[which] = lower[which] = upper[which] = np.log(value_s)

    if np.all(atomic == atomic[0]):
        pin([ALPHA_C], compute / 2)
    if not np.any(nodes > 1):
        pin([ALPHA_N, BETA_N], LOWER_S)
    if not np.any((nodes == 1) & (replicas > 1)):
        pin([ALPHA_R, BETA_R], LOWER_S)
    if not np.any(replicas > 2):
        pin([BETA_N, BETA_R], LOWER_S)
    return np.clip(start, lower, upper), lower, upper
