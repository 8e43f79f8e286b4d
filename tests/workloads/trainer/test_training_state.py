"""Gradients and state in one process. The tests add up several ranks as the all-reduce would."""

import math
import pickle
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from common.types import ApplicationSpec, JobSpec
from tests.fixtures import tiny_app
from tests.fixtures.replica_fleet import tiny_spec
from workloads.applications.interface import Task
from workloads.trainer.checkpoint import CheckpointError
from workloads.trainer.gradient_statistics.adascale import second_moment_ratio
from workloads.trainer.gradient_statistics.flat_gradients import FlatGradients, StepSums
from workloads.trainer.sample_ledger import limbs
from workloads.trainer.training_state import MAX_BAD_STEPS, JobError, TrainingState, meets

ADAM = msgspec.structs.replace(tiny_app.SPEC, optimizer="adam")


def tiny_state(
    application: ApplicationSpec = tiny_app.SPEC, spec: JobSpec | None = None, **settings: float
) -> TrainingState:
    task = tiny_app.build(3, settings)
    if application.optimizer == "adam":
        adam = torch.optim.Adam(task.model.parameters(), lr=0.01)
        task = Task(**(vars(task) | {"optimizer": adam}))
    return TrainingState(spec or tiny_spec(), application, task)


def step(states: list[TrainingState], total: int, passes: int = 1) -> list[float]:
    """Make one step of a group whose ranks are `states`; returns the gains."""
    batches = []
    for rank, state in enumerate(states):
        batch = state.sampler.take(total, rank, len(states), passes)
        loss_share = state.compute(batch)
        mark = limbs(state.fingerprints.mark(batch.passes))
        state.gradients.pack(batch.local / batch.total, StepSums(0, 0, loss_share, 0.0, batch.local, *mark))
        batches.append(batch)
    reduced = sum(state.gradients.flat for state in states)
    gains = []
    for state, batch in zip(states, batches, strict=True):
        state.gradients.flat.copy_(reduced)
        gains.append(state.advance(batch, state.gradients.unpack()))
    return gains


def weights(state: TrainingState) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in state.task.model.parameters()])


@pytest.mark.parametrize("application", [tiny_app.SPEC, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize(("ranks", "passes"), [(4, 1), (2, 2)])
def test_four_replicas_train_as_one_with_four_passes(
    application: ApplicationSpec, ranks: int, passes: int
) -> None:
    alone = [tiny_state(application)]
    group = [tiny_state(application) for _ in range(ranks)]
    for _ in range(30):
        gains = step(group, 96, passes)
        assert gains == pytest.approx(step(alone, 96, 4) * ranks, abs=1e-6)
    assert weights(group[0]) == pytest.approx(weights(alone[0]), abs=1e-9)
    assert group[0].progress == pytest.approx(alone[0].progress)
    assert 30.0 < alone[0].progress < 120.0


def test_the_gradient_is_the_mean_over_the_batch_also_where_ranks_have_none() -> None:
    states = [tiny_state() for _ in range(4)]
    for state in states:
        state.sampler.advance(247)
    start, rate = weights(states[0]), states[0].task.optimizer.param_groups[0]["lr"]
    reference = tiny_state()
    reference.sampler.advance(247)
    reference.task.loss(reference.task.model, reference.sampler.take(96).passes[0]).backward()
    gradient = torch.cat([p.grad.flatten() for p in reference.task.model.parameters()])  # type: ignore[union-attr]
    step(states, 96)
    assert weights(states[3]) == pytest.approx(start - rate * gradient, abs=1e-12)
    assert states[0].ledger.finished[0][0] == 3


@pytest.mark.parametrize("application", [tiny_app.SPEC, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("passes", [1, 3])
def test_training_continues_identically_from_a_saved_state(application: ApplicationSpec, passes: int) -> None:
    one = tiny_state(application, dropout=0.3)
    for _ in range(25):
        step([one], 72, passes)
    other = tiny_state(application, dropout=0.3)
    step([other], 24)
    other.load_bytes(one.to_bytes())
    for total in [72] * 20 + [48] * 5:
        assert step([one], total, passes) == step([other], total, passes)
    assert torch.equal(weights(one), weights(other))
    assert other.ledger.finished == one.ledger.finished
    assert (other.steps, other.examples, other.progress) == (one.steps, one.examples, one.progress)
    assert other.last_scale == one.last_scale == 2.0


def test_rates_follow_gain_and_schedule() -> None:
    state = tiny_state()
    task = Task(**(vars(state.task) | {"rate": lambda progress: 0.5}))
    state = TrainingState(tiny_spec(), tiny_app.SPEC, task)
    for _ in range(15):
        [gain] = step([state], 96, 4)
    assert gain > 1.0
    assert task.optimizer.param_groups[0]["lr"] == pytest.approx(0.02 * gain * 0.5)


def averages(state: TrainingState) -> tuple[float, float]:
    """Adam's number of steps, and the sum of its averaged squares."""
    kept = list(state.task.optimizer.state.values())
    return float(kept[0]["step"]), sum(float(of["exp_avg_sq"].sum()) for of in kept)


def test_adams_averages_are_converted_to_the_scale_of_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update itself is left out, so that only the change of scale remains."""
    state = tiny_state(ADAM)
    for _ in range(4):
        step([state], 24)
    steps, squares = averages(state)
    monkeypatch.setattr(state.task.optimizer, "step", lambda: None)
    step([state], 48, 2)
    known = state.estimator.statistics()
    assert known is not None
    bias = (1.0 - 0.999**2) / (1.0 - 0.999**4)
    told = averages(state)
    assert (steps, told[0]) == (4.0, 2.0)
    assert told[1] == pytest.approx(squares * bias * second_moment_ratio(known, 1.0, 2.0), rel=1e-6)
    step([state], 48, 2)
    assert averages(state) == told, "nothing changes while the batch stays"
    assert state.last_scale == 2.0


def test_the_length_of_adams_memory_follows_the_batch_before_anything_is_known() -> None:
    state = tiny_state(ADAM)
    step([state], 24)
    assert state.estimator.statistics() is None
    step([state], 96)
    assert state.estimator.statistics() is None
    assert averages(state)[0] == 1 / 4 + 1


def test_a_change_of_scale_leaves_an_optimizer_that_remembers_no_squares_alone() -> None:
    momentum = tiny_state()
    for total, passes in ((24, 1),) * 4 + ((48, 2),) * 2:
        step([momentum], total, passes)
    assert momentum.last_scale == 2.0
    assert all("exp_avg_sq" not in kept for kept in momentum.task.optimizer.state.values())


def test_a_step_that_is_not_finite_changes_no_weight_and_is_not_trusted() -> None:
    state = tiny_state(nan_once_at=13.0)
    for _ in range(12):
        step([state], 24)
    before, progress = weights(state), state.progress
    assert step([state], 24) == [0.0]
    assert torch.equal(weights(state), before)
    assert (state.progress, state.steps) == (progress, 13)
    known = state.estimator.statistics()
    assert known is not None
    assert not known.trusted
    assert math.isfinite(known.sqr + known.var)
    assert step([state], 24) == [1.0]


def test_a_loss_that_stays_not_finite_is_the_fault_of_the_job() -> None:
    state = tiny_state(nan_at=1.0)
    for _ in range(MAX_BAD_STEPS - 1):
        step([state], 24)
    with pytest.raises(JobError, match="diverged"):
        step([state], 24)


def test_the_state_of_another_job_is_refused() -> None:
    data = tiny_state().to_bytes()
    for spec in (tiny_spec(seed=8), tiny_spec(settings={"dropout": 0.5}), tiny_spec(id="other")):
        with pytest.raises(CheckpointError, match="belongs to"):
            tiny_state(spec=spec).load_bytes(data)


def test_bytes_that_are_code_are_refused() -> None:
    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("run",))

    for data in (pickle.dumps(Code(), protocol=2), b"", b"nonsense", tiny_state().to_bytes()[:-200]):
        with pytest.raises(CheckpointError):
            tiny_state().load_bytes(data)


def test_running_averages_of_a_model_are_shared_and_a_broken_step_leaves_none() -> None:
    def normalising() -> tuple[nn.Module, FlatGradients]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        return model, FlatGradients(model, torch.optim.SGD(model.parameters(), lr=0.1))

    x = torch.randn(12, 4)
    ranks = [normalising() for _ in range(2)]
    for rank, (model, gradients) in enumerate(ranks):
        gradients.start()
        model(x[rank * 4 : rank * 8 + 4]).mean().backward()
        gradients.pack((1 + rank) / 3, StepSums())
    means = [model[1].running_mean.clone() for model, _ in ranks]
    reduced = ranks[0][1].flat + ranks[1][1].flat
    for _, gradients in ranks:
        gradients.flat.copy_(reduced)
        gradients.unpack()
    for model, _ in ranks:
        assert model[1].running_mean == pytest.approx((means[0] + 2 * means[1]) / 3)

    model, gradients = ranks[0]
    before = model[1].running_mean.clone()
    gradients.start()
    model(x).mean().backward()
    assert not torch.equal(model[1].running_mean, before)
    gradients.undo()
    assert torch.equal(model[1].running_mean, before)
    model[1].running_mean.add_(1.0)  # as a newer state does that is loaded
    gradients.undo()
    assert torch.equal(model[1].running_mean, before + 1.0), "there is nothing more to undo"


def test_a_constant_buffer_of_a_model_stays_exactly_the_same() -> None:
    """Such as a mask of infinities: infinity times a weight of 0 would be NaN."""

    def masking() -> tuple[nn.Module, FlatGradients]:
        model = nn.Linear(1, 1)
        model.register_buffer("mask", torch.tensor([0.1, -math.inf]))
        return model, FlatGradients(model, torch.optim.SGD(model.parameters(), lr=0.1))

    ranks = [masking() for _ in range(3)]
    for weights in [*[(1 / 3, 1 / 3, 1 / 3)] * 20, (0.0, 0.0, 1.0)]:
        for (_, gradients), weight in zip(ranks, weights, strict=True):
            gradients.start()
            gradients.pack(weight, StepSums())
        reduced = sum(gradients.flat for _, gradients in ranks)
        for _, gradients in ranks:
            gradients.flat.copy_(reduced)
            gradients.unpack()
    for model, _ in ranks:
        assert torch.equal(model.mask, torch.tensor([0.1, -math.inf]))


def test_a_model_of_mixed_precision_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).double())
    with pytest.raises(ValueError, match=r"torch.float32, torch.float64"):
        FlatGradients(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_target_is_met_from_its_own_side() -> None:
    assert meets(tiny_app.SPEC, 0.04, 0.05)
    assert not meets(tiny_app.SPEC, 0.06, 0.05)
    assert not meets(tiny_app.SPEC, math.nan, 0.05)
    assert meets(msgspec.structs.replace(tiny_app.SPEC, metric_mode="max"), 0.06, 0.05)


def test_dropout_depends_on_the_passes_of_a_step_and_not_on_the_replica() -> None:
    """Also in uneven steps and at the end of an epoch. No two passes draw the same numbers."""

    def train(ranks: int, passes: int, steps: int = 15) -> torch.Tensor:
        states = [tiny_state(dropout=0.5) for _ in range(ranks)]
        for _ in range(steps):
            step(states, min(46, tiny_app.EXAMPLES - states[0].sampler.cursor), passes)
        assert states[0].sampler.epoch == 2
        return weights(states[0])

    one = train(1, 4)
    torch.testing.assert_close(train(4, 1), one, atol=1e-9, rtol=0.0)
    torch.testing.assert_close(train(2, 2), one, atol=1e-9, rtol=0.0)
    assert not torch.allclose(train(1, 1), one, atol=1e-3, rtol=0.0)


def test_each_pass_of_each_step_draws_different_numbers() -> None:
    state = tiny_state()
    drawn = set()
    for _ in range(20):
        batch = state.sampler.take(24, passes=4)
        for indices in batch.passes:
            state.seed_pass(indices)
            drawn.add(torch.rand(1).item())
        step([state], 24)
    assert len(drawn) == 80
