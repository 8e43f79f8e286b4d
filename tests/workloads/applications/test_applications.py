"""The applications: what they declare, that they are repeatable, and that they learn."""

import subprocess
import sys
import warnings
from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest
import torch

from workloads.applications import (
    UnknownApplication,
    UnknownSetting,
    applications,
    build_task,
    char_lm,
    matfac,
)
from workloads.applications.digits_cnn import read_digits
from workloads.applications.interface import Task
from workloads.applications.mnist1d_conv import SIGNAL_POINTS, TEMPLATES, signals
from workloads.trainer.training_state import meets

SPECS = applications()
NAMES = sorted(SPECS)
every_application = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def steps(task: Task, batch: int, count: int) -> list[float]:
    """Losses of `count` plain steps on examples drawn at random."""
    losses = []
    random = np.random.default_rng(0)
    for _ in range(count):
        task.optimizer.zero_grad()
        loss = task.loss(task.model, torch.from_numpy(random.integers(task.train_examples, size=batch)))
        loss.backward()
        task.optimizer.step()
        losses.append(loss.item())
    return losses


def held_out_sum(task: Task, indices: torch.Tensor) -> float:
    task.model.eval()
    with torch.no_grad():
        return task.metric_sum(task.model, indices)


# ---------------------------------------------------------------------- what is declared


def test_there_are_four_applications() -> None:
    assert NAMES == ["char-lm", "digits-cnn", "matfac", "mnist1d-conv"]
    assert all(name == spec.name for name, spec in SPECS.items())


def test_naming_the_applications_loads_no_heavy_library() -> None:
    program = (
        "import sys; from workloads.applications import applications; applications(); "
        "print({'torch', 'numpy', 'sklearn', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


@every_application
def test_bounds_leave_room_for_one_to_eight_replicas(name: str) -> None:
    spec = SPECS[name]
    assert spec.target_min <= spec.target <= spec.target_max
    assert spec.min_atomic_batch <= spec.initial_batch_size // 4
    assert spec.initial_batch_size <= spec.max_atomic_batch < spec.max_batch_size
    assert 8 * spec.min_atomic_batch <= spec.max_batch_size <= 8 * spec.max_atomic_batch
    assert spec.max_batch_size < spec.examples
    assert 0 < spec.evaluate_every < spec.max_progress


@every_application
def test_the_task_is_what_its_spec_declares(name: str) -> None:
    spec, task = SPECS[name], build_task(name, 0)
    assert task.train_examples == spec.examples
    assert type(task.optimizer).__name__.lower() == spec.optimizer
    assert {group["lr"] for group in task.optimizer.param_groups} == {spec.settings["learning_rate"]}
    parameters = list(task.model.parameters())
    assert 10_000 <= sum(p.numel() for p in parameters) <= 200_000
    task.loss(task.model, torch.arange(spec.min_atomic_batch)).backward()
    assert all(p.grad is not None and p.grad.layout == torch.strided for p in parameters)


@every_application
def test_the_untrained_model_is_far_from_the_easiest_target(name: str) -> None:
    spec, task = SPECS[name], build_task(name, 0)
    whole = held_out_sum(task, torch.arange(task.held_out_examples)) / task.held_out_examples
    easiest = spec.target_min if spec.metric_mode == "max" else spec.target_max
    assert not meets(spec, task.metric(whole), easiest)


# ---------------------------------------------------------------------- training


@every_application
def test_one_seed_gives_one_training_and_another_seed_another(name: str) -> None:
    batch = SPECS[name].initial_batch_size
    first, again, other = (steps(build_task(name, seed), batch, 3) for seed in (5, 5, 6))
    assert first == again
    assert first != other


@every_application
def test_the_loss_falls(name: str) -> None:
    losses = steps(build_task(name, 1), SPECS[name].initial_batch_size, 240)
    assert np.mean(losses[-40:]) < 0.95 * np.mean(losses[:40])


@every_application
def test_the_loss_of_a_batch_is_the_mean_over_its_parts(name: str) -> None:
    task = build_task(name, 2)
    task.model.eval()
    indices = torch.arange(7, 47)
    with torch.no_grad():
        parts = [task.loss(task.model, indices[start:end]).item() for start, end in ((0, 10), (10, 40))]
        whole = task.loss(task.model, indices).item()
    assert whole == pytest.approx(0.25 * parts[0] + 0.75 * parts[1], rel=1e-5)


@every_application
def test_shards_of_the_held_out_data_sum_to_the_whole(name: str) -> None:
    task = build_task(name, 3)
    everything = torch.arange(task.held_out_examples)
    shards = sum(held_out_sum(task, everything[rank::3]) for rank in range(3))
    assert shards == pytest.approx(held_out_sum(task, everything), rel=1e-5)


@every_application
def test_every_seed_is_measured_on_the_same_held_out_data(name: str) -> None:
    one, other = build_task(name, 1), build_task(name, 2)
    other.model.load_state_dict(one.model.state_dict())
    everything = torch.arange(one.held_out_examples)
    assert held_out_sum(one, everything) == held_out_sum(other, everything)


# ---------------------------------------------------------------------- names and settings


def test_a_setting_overrides_the_default() -> None:
    rates = {build_task("matfac", 0, {"learning_rate": 0.5}).optimizer.param_groups[0]["lr"]}
    assert rates == {0.5}


def test_an_unknown_application_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownApplication, match=r"'imagenet'.*digits-cnn, mnist1d-conv, char-lm, matfac"):
        build_task("imagenet", 0)


def test_an_unknown_setting_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(
        UnknownSetting, match=r"'momentum': no such setting of matfac; allowed: learning_rate"
    ):
        build_task("matfac", 0, {"momentum": 0.5})


def test_an_application_of_the_user_is_listed_with_ours() -> None:
    module = "tests.fixtures.tiny_app"
    assert {*applications([module])} == {*NAMES, "tiny"}
    assert build_task("tiny", 0, modules=[module]).train_examples == applications([module])["tiny"].examples


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit: 0"),
        ("SPEC = 'mine'", r"needs SPEC \(an ApplicationSpec\) and build"),
        (
            "from workloads.applications.matfac import SPEC, build",
            "the name 'matfac' is taken by workloads.applications.matfac",
        ),
    ],
)
def test_a_module_without_an_application_is_refused(
    text: str, complaint: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"users_module_{sha256(text.encode()).hexdigest()[:8]}"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownApplication, match=complaint):
        applications([name])


def test_a_missing_module_is_refused() -> None:
    with pytest.raises(
        UnknownApplication, match=r"'no\.such\.module': cannot be imported: ModuleNotFoundError"
    ):
        applications(["no.such.module"])


# ---------------------------------------------------------------------- the data


def test_the_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    theirs = load_digits()
    table = read_digits()
    assert np.array_equal(table[:, :64], theirs.data)
    assert np.array_equal(table[:, 64], theirs.target)


def test_signals_are_repeatable_balanced_and_of_moderate_size() -> None:
    signal, digit = signals(2000, seed=4)
    again, other = signals(2000, seed=4)[0], signals(2000, seed=5)[0]
    assert np.array_equal(signal, again)
    assert not np.array_equal(signal, other)
    assert signal.shape == (2000, SIGNAL_POINTS)
    assert np.bincount(digit).tolist() == [200] * len(TEMPLATES)
    assert np.isfinite(signal).all()
    assert 0.2 < signal.std() < 2.0


def test_no_two_templates_are_alike() -> None:
    shapes = sorted(TEMPLATES)
    assert all(first != second for first, second in pairwise(shapes))


def test_label_noise_spoils_training_answers_and_no_held_out_ones() -> None:
    clean, noisy = (build_task("mnist1d-conv", 0, {"label_noise": noise}) for noise in (0.0, 0.9))
    held_out, train = torch.arange(clean.held_out_examples), torch.arange(512)
    assert held_out_sum(clean, held_out) == held_out_sum(noisy, held_out)
    assert clean.loss(clean.model, train).item() != noisy.loss(noisy.model, train).item()


def test_a_user_rates_an_item_once_and_ratings_have_the_declared_spread() -> None:
    items, rating = matfac.ratings(seed=4)
    assert all(len(set(row)) == len(row) for row in items.tolist())
    assert rating.var() == pytest.approx(1.0 + matfac.NOISE**2, rel=0.15)
    often = np.bincount(items.ravel(), minlength=matfac.ITEMS)
    assert often.max() > 4 * np.median(often)


def test_the_text_of_another_python_is_used_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "é" + "a" * char_lm.CHARACTERS
    with pytest.warns(UserWarning, match="differ from those for which the target was chosen"):
        codes = char_lm.text_codes(text)
    assert codes.tobytes() == b"?" + b"a" * (char_lm.CHARACTERS - 1)
    monkeypatch.setattr(char_lm, "TEXT_SHA256", sha256(codes.tobytes()).hexdigest())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        char_lm.text_codes(text)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(RuntimeError, match=f"have 12 characters; {char_lm.CHARACTERS} are needed"):
        char_lm.text_codes("only so much")
