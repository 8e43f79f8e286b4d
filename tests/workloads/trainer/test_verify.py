"""What the verifier finds for true and for false claims."""

from pathlib import Path

import msgspec
import pytest

from common.protocol import METRIC_TOLERANCE, VerifyOrder
from tests.fixtures import tiny_app
from tests.fixtures.replica_fleet import tiny_spec
from tests.workloads.trainer.test_training_state import step
from workloads.trainer import checkpoint
from workloads.trainer.evaluation import evaluate
from workloads.trainer.pacer import Pacer
from workloads.trainer.process_group import single_member_group
from workloads.trainer.training_state import TrainingState
from workloads.trainer.verify import Verification, verify

SPEC = tiny_spec(target=100.0)
PACER = Pacer(1.0)


@pytest.fixture
def trained() -> TrainingState:
    """A state after an epoch and a half."""
    state = TrainingState(SPEC, tiny_app.SPEC, tiny_app.build(SPEC.seed, {}))
    for _ in range(16):
        step([state], 24)
    return state


def claim(folder: Path, state: TrainingState) -> VerifyOrder:
    metric = evaluate(state.task, SPEC.max_atomic_batch, single_member_group(), PACER)
    saved = checkpoint.save(folder, state.steps, state.to_bytes())
    return VerifyOrder(
        spec=SPEC, node="a", checkpoint=str(saved.path), metric=metric, progress=state.progress
    )


def verdict_of(order: VerifyOrder) -> Verification:
    return verify(order, PACER, (tiny_app.MODULE,))


def test_a_true_claim_has_no_findings(tmp_path: Path, trained: TrainingState) -> None:
    order = claim(tmp_path, trained)
    assert verdict_of(order) == Verification(order.metric, 1, ())


@pytest.mark.parametrize("times", [1 - 1e-5, 1 + 1e-5])
def test_progress_that_differs_from_the_checkpoint_is_found(
    tmp_path: Path, trained: TrainingState, times: float
) -> None:
    order = claim(tmp_path, trained)
    (finding,) = verdict_of(msgspec.structs.replace(order, progress=order.progress * times)).findings
    assert finding == f"progress is {order.progress:.6g}, but {order.progress * times:.6g} was reported"


@pytest.mark.parametrize("more", [-1, 1])
def test_a_count_of_examples_that_the_sampler_contradicts_is_found(
    tmp_path: Path, trained: TrainingState, more: int
) -> None:
    trained.examples += more
    seen = 250 + 5 * 24
    assert verdict_of(claim(tmp_path, trained)).findings == (
        f"{seen + more} examples were counted, {seen} lie before the sampler's position",
    )


def test_an_example_used_twice_is_found(tmp_path: Path, trained: TrainingState) -> None:
    trained.ledger.add(1, int(trained.fingerprints.hashes[0]))
    assert verdict_of(claim(tmp_path, trained)).findings == ("epoch 1: 121 examples of 120 were used",)


@pytest.mark.parametrize("off", [-2.0, 2.0])
def test_a_metric_that_differs_from_the_checkpoint_is_found(
    tmp_path: Path, trained: TrainingState, off: float
) -> None:
    order = claim(tmp_path, trained)
    wrong = msgspec.structs.replace(order, metric=order.metric + off * METRIC_TOLERANCE)
    (finding,) = verdict_of(wrong).findings
    assert finding.endswith(f"but {wrong.metric:.6g} was reported")
    near = msgspec.structs.replace(order, metric=order.metric + off / 4 * METRIC_TOLERANCE)
    assert verdict_of(near).findings == ()


def test_a_metric_short_of_the_target_is_found(tmp_path: Path, trained: TrainingState) -> None:
    order = claim(tmp_path, trained)
    strict = msgspec.structs.replace(order, spec=msgspec.structs.replace(SPEC, target=order.metric / 2))
    (finding,) = verdict_of(strict).findings
    assert "does not meet the target" in finding


def test_a_checkpoint_that_cannot_be_used_is_the_one_finding(tmp_path: Path, trained: TrainingState) -> None:
    order = claim(tmp_path, trained)
    Path(order.checkpoint).write_bytes(b"something else")
    (finding,) = verdict_of(order).findings
    assert finding == f"checkpoint {order.checkpoint} is not a checkpoint, or only the beginning of one"
