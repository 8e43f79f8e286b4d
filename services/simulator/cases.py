"""The description of a simulated run: workload, policy, world and cluster."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import workloads
from common.lifecycle import UserError
from common.types import Node, Struct
from services.scheduler.policies.registry import BUILT_IN
from workloads.files.measured_profile import PROFILES, read_machine

SETS = Path(workloads.__file__).parent / "sets"
"""The workload files of the project, which may be named without their folder."""


class ClusterSize(Struct, frozen=True):
    nodes: int
    slots: int
    """Of each node."""
    round_s: float


CLUSTERS = {
    "osdi21": ClusterSize(nodes=16, slots=4, round_s=60.0),
    "calibrated": ClusterSize(nodes=2, slots=4, round_s=2.0),
    "synthetic": ClusterSize(nodes=16, slots=4, round_s=60.0),
}
"""The default cluster of each world."""
WORLDS = tuple(CLUSTERS)


class SimulationCase(Struct, frozen=True, kw_only=True):
    """One run to simulate. `label` is a short name of its workload: a file, or in the synthetic world `jobs`
    generated jobs.

    Options of every world: `out` is the folder that gets the event log. With `fairness` every job is also
    simulated alone. With `memory` jobs start from what earlier jobs of their application have shown.
    `restart_s` is what a resize costs instead of what the world says. `load` is a factor on the rate of
    arrivals.

    The world osdi21 reads `traces`, the folder of the artifact; `interference` is the fraction of speed lost
    by jobs that span nodes and share one. The calibrated world reads `profiles` (None: those of the project)
    and multiplies their step times by `step_factors`, by application; `restart_penalty_s` is what policies
    assume of a restart until one has been measured (None: the default of the configuration).

    What policies see is perturbed (perturbation.py): step times by a relative error of up to `times_error`,
    the noise scale by the factor `noise_error`."""

    label: str
    workload: Path | None = None
    jobs: int = 0
    policy: str
    world: str
    nodes: int
    slots: int
    """Of each node."""
    round_s: float
    seed: int = 0
    out: Path | None = None
    fairness: bool = False
    memory: bool = False
    restart_s: float | None = None
    load: float = 1.0
    traces: Path | None = None
    interference: float = 0.0
    profiles: Path | None = None
    step_factors: tuple[tuple[str, float], ...] = ()
    restart_penalty_s: float | None = None
    times_error: float = 0.0
    noise_error: float = 1.0

    @property
    def run_id(self) -> str:
        """Name of the run's folder, which is never a hidden one."""
        return re.sub(r"^\.|[^A-Za-z0-9_.-]+", "-", f"{self.label}-{self.policy}-{self.seed}")


def cluster(case: SimulationCase) -> list[Node]:
    """The nodes of a case. In the calibrated world they have the slot speed of its profiles."""
    calibrated = case.world == "calibrated"
    speed = read_machine(case.profiles or PROFILES).slot_speed if calibrated else 1.0
    return make_nodes(case.nodes, case.slots, speed)


def make_nodes(count: int, slots: int, slot_speed: float = 1.0) -> list[Node]:
    """Nodes whose names sort in the order of their numbers."""
    width = len(str(count))
    return [
        Node(name=f"node-{number:0{width}}", slots=slots, slot_speed=slot_speed)
        for number in range(1, count + 1)
    ]


def traces_in(artifact: Path | None) -> Path:
    """The folder `traces` of the osdi21 artifact; without a folder, COADAPT_OSDI21 names it. Raises
    UserError."""
    given = artifact or os.environ.get("COADAPT_OSDI21")
    if not given:
        raise UserError(
            "--traces DIR: the world osdi21 needs it: the folder of the Pollux artifact with `traces` in it "
            "(COADAPT_OSDI21 may name it too)"
        )
    place = Path(given)
    if not os.path.isdir(place / "traces"):
        raise UserError(f"--traces {place}: no folder `traces` in it")
    return place / "traces"


def every_policy(names: Sequence[str]) -> list[str]:
    """Each policy once; "all" stands for all policies of the project."""
    return list(
        dict.fromkeys(policy for name in names for policy in (BUILT_IN if name == "all" else (name,)))
    )


def labels(workloads: Sequence[Path]) -> dict[Path | None, str]:
    """A label for each workload file: its name, preceded by its folder's name if two files share theirs. A
    folder stands for the CSV and TOML files in it, a bare name for the project's set of that name.

    Raises UserError for a file that is given twice, and for a folder without files."""
    named: dict[Path | None, str] = {}
    paths = [path for given in workloads for path in _files(given)]
    stems = [path.stem for path in paths]
    for path in paths:
        label = path.stem if stems.count(path.stem) == 1 else f"{path.resolve().parent.name}-{path.stem}"
        if path in named or label in named.values():
            raise UserError(f"--workload {path}: given twice, or another file has the same folder and name")
        named[path] = label
    return named


def _files(given: Path) -> list[Path]:
    # os.path: Path.is_dir raises for a path that no file can have, such as one that is too long.
    if not os.path.isdir(given):
        own_set = SETS / f"{given}.toml"
        return [own_set if not os.path.exists(given) and os.path.isfile(own_set) else given]
    found = [path for path in given.iterdir() if path.suffix in (".csv", ".toml")]
    if not found:
        raise UserError(f"--workload {given}: a folder without CSV or TOML files")
    return sorted(found, key=lambda path: (len(path.name), path.name))
