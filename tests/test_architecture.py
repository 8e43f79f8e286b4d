"""Who may import whom, and what pure modules must not touch: checked from the syntax tree."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("common", "workloads", "services", "analysis")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_LINES = 400
LONGER = {"common/protocol.py"}
"""Declarations only, and every message has to stand in one place."""

MAY_IMPORT = {
    "common": {"common"},
    "workloads": {"common", "workloads"},
    "services": {"common", "workloads", "services"},
    "analysis": {"common", "analysis"},
}
PURE_PARTS_OF_SERVICES = {
    "services.scheduler.job_states",
    "services.simulator.calibrated",
    "services.simulator.isolated",
    "workloads.measured",
    "workloads.requests",
    "workloads.tasks",
}
"""What analysis may use of the services: rules and models; and what these models are made of."""
DISPATCHERS = {
    "services/cli.py",
    "services/experiment/runner.py",
    "services/fidelity_cli.py",
    "services/sensitivity_cli.py",
    "services/stack.py",
}
"""The command line reaches every part, and so does the experiment, which sums up its runs."""
DRIVERS = {"bench", "experiment", "simulator"}
"""Services that measure others, or drive the scheduler's core."""
ONLY_IN = {
    "zmq": ("common/transport.py",),
    "torch": ("workloads/trainer/", "workloads/tasks/"),
    "rich": (
        "services/monitor/",
        "services/cli.py",
        "services/experiment/cli.py",
        "services/simulator/cli.py",
        "services/simulator/parallel.py",
        "analysis/",
    ),
}
PURE = (
    "common/goodput/",
    "common/types.py",
    "common/protocol.py",
    "services/scheduler/commands.py",
    "services/scheduler/core.py",
    "services/scheduler/decisions.py",
    "services/scheduler/job_states.py",
    "services/scheduler/policies/",
    "services/scheduler/state.py",
    "services/scheduler/step.py",
    "services/bench/calibration/plan.py",
    "services/job_agent/reconcile.py",
    "services/job_agent/unsaved.py",
    "services/metrics_collector/profiles.py",
    "services/monitor/view.py",
    "services/simulator/agents.py",
    "services/simulator/calibrated.py",
    "services/simulator/driver.py",
    "services/simulator/errors.py",
    "services/simulator/fleet.py",
    "services/simulator/isolated.py",
    "services/simulator/timeline.py",
    "services/simulator/training.py",
    "services/simulator/world.py",
    "analysis/audit.py",
    "analysis/batches.py",
    "analysis/bootstrap.py",
    "analysis/breakdown.py",
    "analysis/comparison.py",
    "analysis/fairness.py",
    "analysis/metrics.py",
    "analysis/noise.py",
    "analysis/pairing.py",
    "analysis/steps.py",
    "analysis/winners.py",
)
IMPURE_MODULES = {"os", "time", "random", "socket", "secrets", "subprocess", "threading", "zmq", "datetime"}
IMPURE_CALLS = {("np", "random"), ("numpy", "random")}
HEAVY_AT_TOP = ("torch", "scipy", "sklearn", "matplotlib", "polars", "numpy")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST, *, top_level_only: bool = False) -> Iterator[str]:
    """Dotted names of what is imported; what stands under `if TYPE_CHECKING` is left out."""
    nodes = tree.body if top_level_only and isinstance(tree, ast.Module) else ast.walk(tree)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_packages_import_only_what_they_may(path: Path) -> None:
    own = name_of(path).split("/")[0]
    named = {name for name in imports(tree_of(path)) if name not in PURE_PARTS_OF_SERVICES}
    used = {name.split(".")[0] for name in named} & set(PACKAGES)
    assert name_of(path) in DISPATCHERS or used <= MAY_IMPORT[own]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_service_never_imports_another(path: Path) -> None:
    parts = name_of(path).split("/")
    if parts[0] != "services" or name_of(path) in DISPATCHERS or len(parts) < 3 or parts[1] in DRIVERS:
        return
    used = {name.split(".")[1] for name in imports(tree_of(path)) if name.startswith("services.")}
    assert used <= {parts[1]}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    for name in imports(tree_of(path)):
        rooms = ONLY_IN.get(name.split(".")[0])
        assert rooms is None or name_of(path).startswith(rooms), f"{name} in {name_of(path)}"


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).startswith(PURE)], ids=name_of)
def test_pure_modules_read_no_clock_environment_chance_or_socket(path: Path) -> None:
    tree = tree_of(path)
    assert not {name.split(".")[0] for name in imports(tree)} & IMPURE_MODULES
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            seeded = node.attr == "random" and "default_rng" in ast.unparse(tree)
            assert (node.value.id, node.attr) not in IMPURE_CALLS or seeded
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "input", "print"}


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).startswith("workloads/tasks/")], ids=name_of)
def test_applications_can_be_named_without_loading_torch(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imports(tree_of(path), top_level_only=True)} & set(HEAVY_AT_TOP)
    assert not heavy


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_stay_short_enough_to_read(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert name_of(path) in LONGER or len(lines) <= MAX_LINES


def test_every_pure_module_is_there() -> None:
    names = [name_of(path) for path in FILES]
    assert all(any(name.startswith(pure) for name in names) for pure in PURE)


def test_nothing_else_moves_in_at_the_root() -> None:
    files = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "Procfile"}
    files |= {"coadapt.toml", "constraints.txt"}
    folders = {*PACKAGES, "tests", "logs", "build"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert files <= found
    assert {name for name in found if not name.endswith((".egg-info", "__pycache__"))} <= files | folders
