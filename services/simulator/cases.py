"""From a case to its result: policy, world and workload are made, and simulated."""

import fcntl
import gc
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from msgspec import structs

import workloads
from common.config import load_config
from common.eventlog import EventLogError, EventLogWriter
from common.lifecycle import EXIT_FAILED, UserError
from common.types import ApplicationSpec, Node, Struct
from services.metrics_collector.memory import Memory
from services.scheduler.policies.interface import Policy
from services.scheduler.policies.registry import BUILT_IN, UnknownPolicy, make_policy
from services.simulator.engine import Log, Plan, Simulation
from services.simulator.isolated_times import IsolatedTimes, rhos
from services.simulator.perturbation import Perturbation
from services.simulator.results import Result, summed_up
from services.simulator.worlds.interface import World
from workloads.applications import applications
from workloads.files.csv_table import read_table
from workloads.files.measured_profile import PROFILES, read_machine, read_profiles
from workloads.files.workload_file import Arrival, Workload, read_workload


class LogWriteError(UserError):
    """The log of a run could not be written while it was simulated: nothing that was wrong before."""

    exit_code = EXIT_FAILED


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
"""What each world has, where nothing else is said."""
WORLDS = tuple(CLUSTERS)
SETS = Path(workloads.__file__).parent / "sets"
"""The workload sets of the experiments, which may be named without their folder."""
LOCK_FILE = ".simulate.lock"
"""In a folder of runs; a byte of it is locked for each run that is being written there."""


class SimulationCase(Struct, frozen=True):
    """One run. `label` names its workload: a file, or so many `jobs` that the world makes up. Without
    `restart_s` the world's own holds; without `out` no log is kept; `traces` is what the world of osdi21 is
    made of. With `fairness` every job is also simulated alone; with `memory` jobs start from what jobs of
    their application have shown in the same run. `restart_penalty_s` is what policies of the calibrated world
    assume before a restart was measured; without it that of the configuration's defaults.

    `profiles` is what the calibrated world is made of; without it, our own. Policies are told step times that
    are wrong by up to `times_error` (a fraction), and `noise_error` times the true noise scale (errors.py).
    Arrivals are `load` times as dense. `step_factors`: by application, what a step takes over what was
    measured."""

    label: str
    workload: Path | None
    policy: str
    world: str
    traces: Path | None
    nodes: int
    slots: int
    round_s: float
    interference: float
    seed: int
    restart_s: float | None
    out: Path | None
    restart_penalty_s: float | None = None
    step_factors: tuple[tuple[str, float], ...] = ()
    jobs: int = 0
    fairness: bool = False
    memory: bool = False
    profiles: Path | None = None
    times_error: float = 0.0
    noise_error: float = 1.0
    load: float = 1.0

    @property
    def run_id(self) -> str:
        """Never the name of a hidden folder."""
        return re.sub(r"^\.|[^A-Za-z0-9_.-]+", "-", f"{self.label}-{self.policy}-{self.seed}")


def check(cases: Sequence[SimulationCase]) -> None:
    """What can be found wrong before the first of many runs. Raises UserError."""
    # os.path: a path that no file could have, too long say, is one that is not there.
    run_ids: set[str] = set()
    read: set[tuple[object, ...]] = set()
    for case in cases:
        policy = _policy(case)
        if case.workload is not None and not os.path.isfile(case.workload):
            problem = "not a regular file" if os.path.exists(case.workload) else "no such file"
            raise UserError(f"--workload {case.workload}: {problem}")
        if case.run_id in run_ids:
            raise UserError(f"{case.run_id}: two runs would have this name; rename a workload file")
        run_ids.add(case.run_id)
        source = case.workload, case.world, case.traces, case.profiles
        if case.workload is not None and source not in read:
            make_workload(case, make_world(case, policy))
            read.add(source)


@contextmanager
def claimed(out: Path | None, run_ids: Sequence[str]) -> Iterator[None]:
    """Within the block the runs of these names are this process's to write in `out`, all of them; what it has
    not completed at the end is removed, and so is what a killed process had left of them.

    Raises UserError where a run is there already, or another process has claimed it."""
    if out is None:
        yield
        return
    with ExitStack() as claims:
        try:
            out.mkdir(parents=True, exist_ok=True)
            # The system unlocks what a process held, however it ended: no claim outlives its owner.
            lock = claims.enter_context((out / LOCK_FILE).open("wb"))
            for run_id in sorted(run_ids):  # in one order, else two commands could each keep the other out
                byte = int.from_bytes(hashlib.blake2b(run_id.encode(), digest_size=7).digest())
                try:
                    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                except BlockingIOError as error:
                    raise UserError(f"--out {out}: {run_id} is being written by another command") from error
                if os.path.lexists(out / run_id):
                    raise UserError(f"--out {out}: {run_id} is there already")
                remove = partial(shutil.rmtree, _drafts(out, run_id), ignore_errors=True)
                remove()
                claims.callback(remove)
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error
        yield


def _drafts(out: Path, run_id: str) -> Path:
    """Where a run is written until it is complete: hidden, and nothing that `summarize` takes for a run."""
    return out / f".{run_id}"


def simulate(case: SimulationCase) -> Result:
    """With `out`, to be called while the run is claimed. Raises UserError for what the user of the case got
    wrong."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    policy = _policy(case)
    world = make_world(case, policy)
    workload = make_workload(case, world)
    plan = Plan(
        run_id=case.run_id,
        workload=case.label,
        arrivals=[Arrival(at_s=row.at_s / case.load, spec=world.complete(row.spec)) for row in workload.rows],
        nodes=cluster(case),
        round_s=case.round_s,
        seed=case.seed,
    )
    gc.freeze()  # else a collection goes through all modules and traces, in the middle of a decision
    with _log(case) as log:
        run = Simulation(plan, world, policy, time.thread_time, log).run()
    gc.unfreeze()
    return summed_up(
        run,
        run_id=case.run_id,
        workload=str(case.workload or case.label),
        label=case.label,
        policy=case.policy,
        world=case.world,
        seed=case.seed,
        rhos=rhos(run.state.ended, alone_in(case)) if case.fairness else None,
        wall_s=time.perf_counter() - wall_s,
        cpu_s=time.process_time() - cpu_s,
    )


def _policy(case: SimulationCase) -> Policy:
    try:
        return make_policy(case.policy)
    except UnknownPolicy as error:
        raise UserError(str(error)) from error


def make_world(case: SimulationCase, policy: Policy) -> World:
    """Raises UserError."""
    return _world_maker(case, policy)()


def _world_maker(case: SimulationCase, policy: Policy) -> Callable[[], World]:
    """Makes new worlds of what is read once. Raises UserError. A world is imported here so that the others
    need not be loaded."""
    given: dict[str, Any] = {} if case.restart_s is None else {"restart_s": case.restart_s}
    errors = Perturbation(times=case.times_error, noise=case.noise_error, seed=case.seed)
    memory = Memory() if case.memory else None
    if case.world == "synthetic":
        from services.simulator.worlds.synthetic import SyntheticWorld

        return partial(SyntheticWorld, seed=case.seed, slots=case.slots, **given)
    if case.world == "calibrated":
        from services.simulator.worlds.calibrated import CalibratedWorld

        folder = case.profiles or PROFILES
        if case.slots > (most := read_machine(folder).slots):
            raise UserError(f"slots {case.slots}: allowed in calibrated: 1 to {most}, as were measured")
        profiles = read_profiles(folder, _known(), dict(case.step_factors))
        its_nodes = cluster(case)

        def calibrated() -> World:
            world = CalibratedWorld(profiles, its_nodes, errors=errors, memory=memory, **given)
            if case.restart_penalty_s is not None:
                world.restart_s = case.restart_penalty_s
            return world

        return calibrated
    from services.simulator.worlds.osdi21 import Osdi21World

    return partial(
        Osdi21World,
        traces_in(case.traces),
        adapts=policy.adapts_batch,
        models=case.out is not None or policy.needs_profiles,
        slots=case.slots,
        interference=case.interference,
        errors=errors,
        memory=memory,
        **given,
    )


def is_burst(case: SimulationCase) -> bool:
    """Whether its jobs all come at once."""
    workload = make_workload(case, make_world(case, _policy(case)))
    return len({row.at_s for row in workload.rows}) == 1


def make_workload(case: SimulationCase, world: World) -> Workload:
    """Raises UserError."""
    if case.workload is None:
        from services.simulator.worlds.synthetic import generate

        return generate(case.jobs, case.seed, case.nodes * case.slots)
    read = read_workload if case.workload.suffix == ".toml" else read_table
    if case.world != "calibrated":
        return read(case.workload, world.applications)
    workload = read(case.workload, _known())
    for spec in (row.spec for row in workload.rows):
        if spec.application not in world.applications:
            raise UserError(
                f"{case.workload}: job {spec.id!r}: application {spec.application!r}: not in the profiles "
                f"{case.profiles or PROFILES}; `coadapt calibrate` measures it"
            )
    return workload


def _known() -> dict[str, ApplicationSpec]:
    """All applications, whether they were measured or not."""
    return applications(load_config(os.environ).applications.modules)


def alone_in(case: SimulationCase) -> IsolatedTimes:
    """What jobs take alone in the world of this case; what it has found serves other cases of that world."""
    return _alone_in(
        structs.replace(
            case,
            label="",
            workload=None,
            policy="pollux",
            out=None,
            restart_penalty_s=None,
            jobs=0,
            memory=False,
            times_error=0.0,
            noise_error=1.0,
            load=1.0,
        )
    )


@lru_cache(maxsize=4)
def _alone_in(case: SimulationCase) -> IsolatedTimes:
    return IsolatedTimes(_world_maker(case, make_policy(case.policy)), cluster(case), case.round_s)


def cluster(case: SimulationCase) -> list[Node]:
    """Its nodes; in the calibrated world of slots as fast as those that were measured on."""
    speed = read_machine(case.profiles or PROFILES).slot_speed if case.world == "calibrated" else 1.0
    return nodes(case.nodes, case.slots, speed)


def nodes(count: int, slots: int, slot_speed: float = 1.0) -> list[Node]:
    """Named so that the order of names is that of their numbers."""
    width = len(str(count))
    return [
        Node(name=f"node-{number:0{width}}", slots=slots, slot_speed=slot_speed)
        for number in range(1, count + 1)
    ]


def traces_in(given: Path | None) -> Path:
    """The artifact's folder `traces`."""
    place = given or (Path(os.environ["COADAPT_OSDI21"]) if os.environ.get("COADAPT_OSDI21") else None)
    if place is None:
        raise UserError(
            "--traces DIR: the world osdi21 needs it: the folder of the Pollux artifact with `traces` in it "
            "(COADAPT_OSDI21 may name it too)"
        )
    if not os.path.isdir(place / "traces"):
        raise UserError(f"--traces {place}: no folder `traces` in it")
    return place / "traces"


@contextmanager
def _log(case: SimulationCase) -> Iterator[Log | None]:
    """Where the events of the run go. Its folder appears at the end, when all of them are in it."""
    if case.out is None:
        yield None
        return
    # A draft for each process: one that outlived a killed command cannot touch that of the next command.
    draft = _drafts(case.out, case.run_id) / str(os.getpid())
    try:
        writer = EventLogWriter(draft)
        try:
            yield writer.append
        finally:
            writer.close()
        draft.rename(case.out / case.run_id)
    except OSError as error:
        raise LogWriteError(f"--out {case.out}: cannot be written: {error.strerror}") from error
    except EventLogError as error:
        raise LogWriteError(f"--out {case.out}: {error}") from error


def every_policy(given: Sequence[str]) -> list[str]:
    """Each policy once, with "all" for all of our own."""
    return list(dict.fromkeys(name for text in given for name in (BUILT_IN if text == "all" else (text,))))


def labels(workloads: Sequence[Path]) -> dict[Path | None, str]:
    """A name for each file: its own, and with its folder's before it where two files have the same one. A
    folder stands for the CSV and TOML files in it, a name for the set of that name.

    Raises UserError for a file that is given twice, and for a folder without any."""
    named: dict[Path | None, str] = {}
    paths = [path for given in workloads for path in _files(given)]
    stems = [path.stem for path in paths]
    for path in paths:
        label = path.stem if stems.count(path.stem) == 1 else f"{path.resolve().parent.name}-{path.stem}"
        if path in named or label in named.values():
            raise UserError(f"--workload {path}: given twice, or another file of the same folder and name")
        named[path] = label
    return named


def _files(given: Path) -> list[Path]:
    if not os.path.isdir(given):
        named = SETS / f"{given}.toml"
        return [named if not os.path.exists(given) and os.path.isfile(named) else given]
    found = [path for path in given.iterdir() if path.suffix in (".csv", ".toml")]
    if not found:
        raise UserError(f"--workload {given}: a folder without CSV or TOML files")
    return sorted(found, key=lambda path: (len(path.name), path.name))
