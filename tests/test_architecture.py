"""Who may import whom, and what pure modules must not touch: checked from the syntax tree.

`LAYERS` is the one ordered list: a module imports from its own place and from those before it. Places on one
line are equals, which import none of each other.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("common", "workloads", "analysis", "services")
LAYERS: tuple[tuple[str, ...], ...] = (
    ("common",),
    ("workloads",),
    ("analysis",),
    (
        "services.scheduler",
        "services.job_agent",
        "services.metrics_collector",
        "services.event_logger",
        "services.monitor",
    ),
    ("services.launcher",),
    ("services.simulator",),
    ("services.bench",),
    ("services.calibration",),
    ("services.experiment",),
    ("services.cli",),
)
ONLY_IN = {
    "zmq": ("common/messaging/",),
    "torch": ("workloads/trainer/", "workloads/applications/"),
    "rich": (
        "analysis/report/",
        "services/cli/",
        "services/monitor/",
        "services/simulator/parallel.py",
        "services/experiment/",
    ),
    "matplotlib": ("analysis/report/",),
    "argparse": (),
}
PURE = (
    "common/goodput/",
    "common/job_states.py",
    "common/protocol.py",
    "common/types.py",
    "services/scheduler/commands.py",
    "services/scheduler/core.py",
    "services/scheduler/decisions.py",
    "services/scheduler/policies/",
    "services/scheduler/state.py",
    "services/calibration/calibration_plan.py",
    "services/job_agent/reconcile.py",
    "services/job_agent/unsaved_jobs.py",
    "services/metrics_collector/memory.py",
    "services/metrics_collector/profiles.py",
    "services/monitor/view.py",
    "services/simulator/engine.py",
    "services/simulator/event_recorder.py",
    "services/simulator/isolated_times.py",
    "services/simulator/perturbation.py",
    "services/simulator/stall_detector.py",
    "services/simulator/worlds/calibrated.py",
    "services/simulator/worlds/fleet.py",
    "services/simulator/worlds/interface.py",
    "services/simulator/worlds/simulated_agents.py",
    "services/simulator/worlds/simulated_training.py",
    "services/simulator/worlds/timeline.py",
    "analysis/compare/comparison.py",
    "analysis/compare/conditions.py",
    "analysis/compare/intervals.py",
    "analysis/compare/pairing.py",
    "analysis/compare/sensitivity_study.py",
    "analysis/compare/verdicts.py",
    "analysis/fidelity/winners.py",
    "analysis/log/audit.py",
    "analysis/run/",
)
IMPURE_MODULES = {"os", "time", "random", "socket", "secrets", "subprocess", "threading", "zmq", "datetime"}
IMPURE_CALLS = {("np", "random"), ("numpy", "random")}
HEAVY_AT_TOP = ("torch", "scipy", "sklearn", "matplotlib", "polars", "numpy")
SAME_ROLE = {"__init__", "__main__", "service", "interface"}
"""Module names that stand for the same role in equal places; all others are unique."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TREES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
MODULES = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in TREES}
EVERY_FILE = pytest.mark.parametrize("name", TREES)


def imports(tree: ast.AST, *, top_level_only: bool = False, typing_too: bool = False) -> Iterator[str]:
    """Dotted names of what is imported, a module or a name in one; without those under `if TYPE_CHECKING`,
    unless `typing_too`."""
    nodes = tree.body if top_level_only and isinstance(tree, ast.Module) else ast.walk(tree)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in nodes:
        if id(node) in typing_only and not typing_too:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(name: str) -> set[str]:
    """The modules of the project that a file imports, those for type checking included."""
    found = set()
    for imported in imports(TREES[name], typing_too=True):
        parts = imported.split(".")
        modules = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        if module := next((one for one in modules if one in MODULES), None):
            found.add(module)
    return found


def place_of(module: str) -> tuple[int, str]:
    """The number of the layer, and the place in it."""
    for number, places in enumerate(LAYERS):
        for place in places:
            if module == place or module.startswith(f"{place}."):
                return number, place
    raise AssertionError(f"{module} is in no layer")


@EVERY_FILE
def test_imports_go_one_way(name: str) -> None:
    if name == "services/__init__.py":
        return
    own_layer, own_place = place_of(name.removesuffix(".py").replace("/", "."))
    for imported in own_imports(name):
        layer, place = place_of(imported)
        assert place == own_place or layer < own_layer, f"{name} imports {imported}"


def test_no_modules_import_each_other() -> None:
    """No circle of any length."""
    graph = {module: own_imports(name) - {module} for module, name in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"circle: {' -> '.join((*path[path.index(module) :], module))}"
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_a_module_name_stands_for_one_module() -> None:
    stems = [Path(name).stem for name in TREES if Path(name).stem not in SAME_ROLE]
    assert {stem for stem in stems if stems.count(stem) > 1} == set()


def test_a_class_name_stands_for_one_class() -> None:
    classes = [
        node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    assert {one for one in classes if classes.count(one) > 1} == set()


@EVERY_FILE
def test_libraries_stay_in_their_rooms(name: str) -> None:
    for imported in imports(TREES[name]):
        rooms = ONLY_IN.get(imported.split(".")[0])
        assert rooms is None or name.startswith(rooms), f"{imported} in {name}"


@EVERY_FILE
def test_no_module_uses_the_private_parts_of_a_library(name: str) -> None:
    for imported in imports(TREES[name]):
        if imported.split(".")[0] not in PACKAGES:
            private = [part for part in imported.split(".") if part.startswith("_") and part != "__version__"]
            assert not private, f"{imported} in {name}"


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith(PURE)])
def test_pure_modules_read_no_clock_environment_chance_or_socket(name: str) -> None:
    tree = TREES[name]
    assert not {imported.split(".")[0] for imported in imports(tree)} & IMPURE_MODULES
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            seeded = node.attr == "random" and "default_rng" in ast.unparse(tree)
            assert (node.value.id, node.attr) not in IMPURE_CALLS or seeded
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "input", "print"}


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith("workloads/applications/")])
def test_applications_can_be_named_without_loading_torch(name: str) -> None:
    heavy = {imported.split(".")[0] for imported in imports(TREES[name], top_level_only=True)}
    assert not heavy & set(HEAVY_AT_TOP)


def test_every_pure_module_is_there() -> None:
    assert all(any(name.startswith(pure) for name in TREES) for pure in PURE)


def test_nothing_else_moves_in_at_the_root() -> None:
    files = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "Procfile"}
    files |= {"coadapt.toml", "constraints.txt"}
    folders = {*PACKAGES, "docs", "tests", "logs", "build"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert files <= found
    assert {name for name in found if not name.endswith((".egg-info", "__pycache__"))} <= files | folders
