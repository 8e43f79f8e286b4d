"""Fit the throughput model to a job's measured step times (Pollux, section 4.1).

Minimises

    RMSLE(accumulation) + RMSLE(last pass)
        + 1e-3 (gamma - 1)^2 + 1e-2 ((beta_n/alpha_n)^2 + (beta_r/alpha_r)^2)

over positive parameters and 1 <= gamma <= 10, where RMSLE is the root mean squared error of logarithms.
The six time parameters are sought as logarithms, from a start of the size of the measured times: the
search then works alike for steps of a millisecond and of a minute. It is a Levenberg-Marquardt descent
within bounds: with at most seven parameters and the exact derivatives of the errors it needs a third of the
evaluations of a quasi-Newton method, and does not give up in the narrow valleys of this objective. A fit
depends on its points alone, not on former fits.

What a step of one replica takes beyond its pass is neither computing nor synchronisation, and would be told
as both: it is measured first, as the median over the points of one replica, taken off all last passes, and
added to each that is foreseen. In the paper's jobs it is next to nothing; in small ones it is a good part of
a step, and what makes it worth while to accumulate.

A parameter that nothing observed tells of is pinned on the optimistic side, so that the scheduler finds
it worth while to try and see: synchronisation is free until it was measured.
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
"""Across nodes is taken for at least this much slower than within one, until it was measured."""
LEAST_LEFT = 0.5
"""At least this part of a last pass is computing and synchronising, whatever the update takes of others."""
SMOOTHING = 1e-3
"""Rounds off the kink of a root mean square at 0, where exact data would stop the search."""
PRECISION = 1e-8
"""The search ends when its next step promises less than this of the objective."""
NEAR = 1e-3
"""A step that lowered the objective by less than this part of it is taken to be near the minimum."""
MAX_EVALUATIONS = 80
ALPHA_C, BETA_C, ALPHA_N, BETA_N, ALPHA_R, BETA_R, GAMMA = range(7)
GROWTH_SLOPE = np.array([-1.0, 1.0])
"""Of the logarithm of beta / alpha by those of (alpha, beta)."""
GROWTH_CURVATURE = np.outer(GROWTH_SLOPE, GROWTH_SLOPE)
IDENTITY = np.eye(7)


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
    """Seconds; 0 where no point is of one replica."""
    beyond = (times[1] - times[0])[replicas == 1]
    return max(float(np.median(beyond)), 0.0) if len(beyond) else 0.0


class FitData:
    """What is to be explained. terms: what each of the six time parameters is multiplied by at each point,
    [6, points]; log_times: of accumulation passes, then of last passes, [2 x points]; times: [2, points]."""

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
    """The objective at x = (logarithms of the six times, gamma), and its derivatives there."""

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
        """The gradient [7], and the curvature [7, 7], as if the errors were linear. `near` a minimum it is
        that of the objective itself, else that of a quadratic above it: the square root of a mean square
        lies below each of its tangents in the square."""
        points = len(self.compute_s)
        # The derivatives of a last pass's logarithm are the shares of computing and synchronising in it.
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
    """A minimum within bounds. Damping is lowered while the quadratic predicts well, and raised where a
    step does not lower the objective."""
    at = Objective(start, measured)
    gradient, curvature = at.derivatives()
    damping = 1e-2
    for _ in range(MAX_EVALUATIONS):
        step = _step_within(gradient, curvature, damping, lower - at.x, upper - at.x)
        promised = -float(gradient @ step + step @ curvature @ step / 2.0)
        if 0.0 <= promised < PRECISION:
            break
        tried = Objective(np.minimum(np.maximum(at.x + step, lower), upper), measured)
        gained = at.value - tried.value
        if promised > 0.0 and gained > 1e-3 * promised:
            at = tried
            gradient, curvature = at.derivatives(near=gained < NEAR * at.value)
            if gained > 0.75 * promised:
                damping = max(damping / 5.0, 1e-9)
            elif gained < 0.25 * promised:
                damping *= 2.0
        else:
            damping *= 4.0
    return at


def _step_within(
    gradient: FloatArray, curvature: FloatArray, damping: float, below: FloatArray, above: FloatArray
) -> FloatArray:
    """The damped Newton step whose components stay between `below` and `above`: those that would leave
    stop at the bound, and the others are sought anew."""
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
    """Start, lower and upper bounds of what is sought; equal bounds pin what was not observed."""
    compute = float(np.mean(times[0]))
    network = max(float(np.mean(times[1] - times[0])), compute / 100)
    # Of a replica alone both times are of computing: a start at one of them is at a kink of the objective.
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
