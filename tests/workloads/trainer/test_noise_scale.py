"""The estimates against gradients whose noise is known in closed form.

Linear regression, x ~ N(0, I_d), y = x'(w - delta) + noise of variance s^2, loss (x'w - y)^2 / 2: one
example's gradient is x (x'delta - noise), so that at fixed weights

    mu = delta        tr(Sigma) = d (|delta|^2 + s^2) + |delta|^2.
"""

import math
import statistics

import pytest
import torch

from workloads.trainer.gradients import FlatGradients, StepSums
from workloads.trainer.noise_scale import GradientNoiseScale, GroupNorms, successive
from workloads.trainer.sampler import StepBatch

DIMENSIONS = 20
NOISE = 1.5
M0 = 16


def regression_statistics(ranks: int, passes: int, batch: int, steps: int, seed: int) -> GradientNoiseScale:
    """Statistics after `steps` at fixed weights, `ranks` being added up here as the all-reduce would."""
    draw = torch.Generator().manual_seed(seed)
    delta = torch.full((DIMENSIONS,), 0.4, dtype=torch.float64)
    model = torch.nn.Linear(DIMENSIONS, 1, bias=False, dtype=torch.float64)
    model.weight.data[:] = delta
    gradients = FlatGradients(model, torch.optim.SGD(model.parameters(), lr=0.0))
    estimator = GradientNoiseScale(M0)
    for _ in range(steps):
        x = torch.randn(batch, DIMENSIONS, generator=draw, dtype=torch.float64)
        y = NOISE * torch.randn(batch, 1, generator=draw, dtype=torch.float64)
        groups = x.chunk(ranks * passes), y.chunk(ranks * passes)
        reduced = torch.zeros_like(gradients.flat)
        for rank in range(ranks):
            gradients.start()
            for j in range(passes):
                group_x, group_y = groups[0][rank * passes + j], groups[1][rank * passes + j]
                weight = len(group_x) / batch
                (weight * 0.5 * ((model(group_x) - group_y) ** 2).mean()).backward()
                gradients.end_pass(weight, alone=ranks * passes == 1, last=j == passes - 1)
            gradients.pack(1 / ranks, StepSums())
            reduced += gradients.flat
        gradients.flat.copy_(reduced)
        taken = StepBatch((), batch, ranks * passes)
        norms = gradients.norms(taken, gradients.unpack().local_sqr)
        if norms:
            estimator.update(norms, batch / M0)
    return estimator


@pytest.mark.parametrize(("ranks", "batch"), [(1, 16), (1, 64), (4, 16), (4, 64)])
def test_noise_known_in_closed_form_is_found_within_a_tenth_in_500_steps(ranks: int, batch: int) -> None:
    known = regression_statistics(ranks, 1, batch, 500, seed=3).statistics()
    sqr = DIMENSIONS * 0.4**2
    var = (DIMENSIONS * (sqr + NOISE**2) + sqr) / M0
    assert known is not None
    assert known.trusted
    assert known.sqr == pytest.approx(sqr, rel=0.1)
    assert known.var == pytest.approx(var, rel=0.1)


def test_the_gain_does_not_depend_on_how_groups_are_spread_over_replicas_and_passes() -> None:
    gains = [
        regression_statistics(ranks, passes, 64, 40, seed=5).gain(4.0)
        for ranks, passes in [(4, 1), (2, 2), (1, 4)]
    ]
    assert gains[1:] == pytest.approx(gains[:1] * 2, abs=1e-6)
    assert 1.0 < gains[0] < 4.0


def test_two_successive_steps_are_two_groups() -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    pair = successive(10, first.dot(first).item(), 30, second.dot(second).item(), first.dot(second).item())
    mean = 0.25 * first + 0.75 * second
    assert (pair.groups, pair.batch) == (2, 40)
    assert pair.mean_sqr == pytest.approx(mean.dot(mean).item())
    assert pair.local_sqr == pytest.approx(0.25 * 5.0 + 0.75 * 10.0)


def fed(norms: GroupNorms, times: int = 50, scale: float = 8.0) -> GradientNoiseScale:
    estimator = GradientNoiseScale(M0)
    for _ in range(times):
        estimator.update(norms, scale)
    return estimator


def test_identical_gradients_gain_nothing_and_are_not_trusted() -> None:
    estimator = fed(GroupNorms(groups=4, batch=128, local_sqr=2.0 + 1e-9, mean_sqr=2.0))
    known = estimator.statistics()
    assert known is not None
    assert not known.trusted
    assert estimator.gain(8.0) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_zero_mean_gradients_are_not_trusted_and_do_not_gain_the_whole_scale(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    estimator = GradientNoiseScale(M0)
    for _ in range(200):
        groups = torch.randn(4, 10, generator=draw, dtype=torch.float64)
        mean = groups.mean(0)
        local_sqr = (groups * groups).sum().item() / 4
        estimator.update(GroupNorms(4, 128, local_sqr, mean.dot(mean).item()), 8.0)
        known = estimator.statistics()
        assert 1.0 <= estimator.gain(1024.0) < 1024.0
    assert known is not None
    assert known.sqr > 0.0
    assert not known.trusted


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_one_step_that_is_not_finite_is_flagged_and_does_not_hurt_the_averages(bad: float) -> None:
    good = GroupNorms(groups=4, batch=128, local_sqr=3.0, mean_sqr=2.0)
    estimator = fed(good)
    before = estimator.statistics()
    assert before is not None
    assert before.trusted
    for norms in (GroupNorms(4, 128, bad, 2.0), GroupNorms(4, 128, 3.0, bad), GroupNorms(4, 128, bad, bad)):
        estimator.update(norms, 8.0)
        flagged = estimator.statistics()
        assert flagged is not None
        assert not flagged.trusted
        assert (flagged.sqr, flagged.var) == (before.sqr, before.var)
        assert 1.0 <= estimator.gain(8.0) <= 8.0
    estimator.update(good, 8.0)
    after = estimator.statistics()
    assert after is not None
    assert after.trusted
    assert (after.sqr, after.var) == pytest.approx((before.sqr, before.var))


def test_without_estimates_nothing_is_gained_and_nothing_reported() -> None:
    estimator = fed(GroupNorms(groups=4, batch=128, local_sqr=3.0, mean_sqr=1.0), times=1)
    assert estimator.statistics() is None
    assert estimator.gain(64.0) == 1.0


@pytest.mark.parametrize("estimates", [[1.0, -2.0, 3.0, -2.5, 0.5], [4.0, -4.0]])
def test_an_average_below_its_standard_error_is_taken_for_as_large_as_that(estimates: list[float]) -> None:
    """At next to no scale the averages weigh all estimates alike."""
    estimator = GradientNoiseScale(M0)
    for sqr in estimates:
        # Of two groups, |mu|^2 = 2 |g|^2 - sum w_i |g_i|^2.
        estimator.update(GroupNorms(groups=2, batch=32, local_sqr=5.0, mean_sqr=(sqr + 5.0) / 2), 1e-4)
    known = estimator.statistics()
    assert known is not None
    assert known.sqr == pytest.approx(statistics.stdev(estimates) / math.sqrt(len(estimates)), rel=1e-4)


def test_averages_survive_in_their_state() -> None:
    estimator = fed(GroupNorms(groups=4, batch=128, local_sqr=3.0, mean_sqr=2.0), times=7)
    other = GradientNoiseScale(M0)
    other.load(estimator.state())
    for one in (estimator, other):
        one.update(GroupNorms(2, 64, 5.0, 1.0), 4.0)
    assert other.state() == estimator.state()


def test_old_gradients_are_forgotten_by_examples_not_by_steps() -> None:
    old, new = GroupNorms(4, 128, 3.0, 2.0), GroupNorms(4, 128, 9.0, 1.0)
    many_small, few_large = fed(old), fed(old)
    for _ in range(80):
        many_small.update(new, 1.0)
    for _ in range(10):
        few_large.update(new, 8.0)
    one, other = many_small.statistics(), few_large.statistics()
    assert one is not None
    assert other is not None
    assert one.var == pytest.approx(other.var, rel=1e-9)
