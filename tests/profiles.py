"""A complete folder of profiles of our four applications, made from formulas, for tests of what reads one.

pass_s(m)    = PASS_S[app] x (1 + m / M0)              step_s = pass_s + sync_s
sync_s       = 0, 0.02 s within a node, 0.05 s across; and 0.005 s for every replica above two
noise scale  = NOISE[app] x M0 x (1 + progress / needed)
needed(S)    = NEEDED[app] x (1 + 0.04 log2 S) for a batch of S x M0, at the default target
"""

import math
from pathlib import Path

from common.types import ApplicationSpec
from workloads.tasks import applications

PASS_S = {"digits-cnn": 0.02, "mnist1d-conv": 0.01, "char-lm": 0.025, "matfac": 0.012}
NEEDED = {"digits-cnn": 375, "mnist1d-conv": 1350, "char-lm": 425, "matfac": 700}
NOISE = {"digits-cnn": 4.0, "mnist1d-conv": 10.0, "char-lm": 5.0, "matfac": 80.0}
PLACEMENTS = (1, 2, 3, 4, 11, 12, 13, 22)
GROUPS = ((2, 6), (2, 8))
BEYOND = 1.5
"""Trained on to so many times what the default target needs."""
COSTS = {"start_s": 1.0, "resize_s": 0.25, "verify_s": 1.5, "evaluation_slot_s": 0.2}
MACHINE = {"cores": 2, "processor": "a formula", "slot_speed": 0.2, "nodes": 2, "slots": 4}


def write_profiles(folder: Path, costs: dict[str, float] | None = None, **needed: float) -> Path:
    """Returns `folder`. `costs` replaces some of COSTS for all applications; `needed` (by application, with _
    for -) some of NEEDED."""
    for name, spec in applications().items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        sizes = _doubling(spec.min_atomic_batch, spec.max_atomic_batch)
        rows = [(digits, m, *_times(spec, str(digits), m)) for digits in PLACEMENTS for m in sizes]
        _write(place / "placements.csv", "placement,local_bsz,step_time,sync_time", rows)
        larger = [
            (nodes, n, m, *_times(spec, f"{n // 2}{n - n // 2}", m)) for nodes, n in GROUPS for m in sizes
        ]
        header = "num_nodes,num_replicas,local_bsz,step_time,sync_time"
        _write(place / "scalability.csv", header, larger)
        need = needed.get(name.replace("-", "_"), NEEDED[name])
        for batch in _doubling(spec.initial_batch_size, spec.max_batch_size):
            header = "progress,iteration,metric,grad_sqr,grad_var"
            _write(place / f"validation-{batch}.csv", header, _course(spec, batch, need))
    text = [f"{key} = {value!r}".replace("'", '"') for key, value in MACHINE.items()]
    for name in applications():
        text += ["", f"[applications.{name}]"]
        text += [f"{key} = {value!r}" for key, value in {**COSTS, **(costs or {})}.items()]
    (folder / "machine.toml").write_text("\n".join([*text, ""]))
    return folder


def add_passes(table: Path, of_groups: float, of_one: float = 0.0) -> None:
    """The column, in seconds, to a table of step times."""
    header, *rows = table.read_text().splitlines()
    passes = [f"{row},{of_one if row.startswith('1,') else of_groups}" for row in rows]
    table.write_text("\n".join([f"{header},pass_time", *passes, ""]))


def needed_at(name: str, batch: int, needed: float | None = None) -> float:
    """Progress to the default target, by the formula: the evaluation that meets it."""
    spec = applications()[name]
    scale = math.log2(batch / spec.initial_batch_size)
    need = (NEEDED[name] if needed is None else needed) * (1 + 0.04 * scale)
    return math.ceil(need / spec.evaluate_every - 1e-9) * spec.evaluate_every


def _times(spec: ApplicationSpec, digits: str, atomic: int) -> tuple[float, float]:
    replicas = sum(map(int, digits))
    sync_s = 0.0 if replicas == 1 else (0.05 if len(digits) > 1 else 0.02) + 0.005 * max(replicas - 2, 0)
    return PASS_S[spec.name] * (1 + atomic / spec.initial_batch_size) + sync_s, sync_s


def _course(spec: ApplicationSpec, batch: int, needed: float) -> list[tuple[float, ...]]:
    need = needed_at(spec.name, batch, needed)
    untrained = 0.2 if spec.metric_mode == "max" else 2.0 * spec.target
    rows = []
    for number in range(1, math.ceil(BEYOND * need / spec.evaluate_every) + 1):
        progress = number * spec.evaluate_every
        metric = spec.target + (spec.target - untrained) * (math.sqrt(progress / need) - 1.0)
        var = NOISE[spec.name] * (1 + progress / need)
        scale = batch / spec.initial_batch_size
        steps = progress * (var / scale + 1.0) / (var + 1.0)
        rows.append((progress, math.ceil(steps), metric, 1.0, var))
    return rows


def _doubling(low: int, high: int) -> list[int]:
    return [low * 2**k for k in range(int(math.log2(high / low)) + 1)]


def _write(path: Path, header: str, rows: list[tuple[float, ...]]) -> None:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows), ""]))
