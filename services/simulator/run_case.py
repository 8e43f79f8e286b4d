"""From a case to its result: reads its workload, makes its policy and world, and simulates the run."""

import gc
import os
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from msgspec import structs

from common.config import load_config
from common.lifecycle import UserError
from common.types import ApplicationSpec
from services.metrics_collector.memory import Memory
from services.scheduler.policies.interface import Policy
from services.scheduler.policies.registry import UnknownPolicy, make_policy
from services.simulator.cases import SimulationCase, cluster, traces_in
from services.simulator.engine import Simulation, SimulationPlan
from services.simulator.isolated_times import IsolatedTimes, finish_time_fairness
from services.simulator.output_folders import open_log
from services.simulator.perturbation import Perturbation
from services.simulator.results import Result, result_of
from services.simulator.worlds.interface import World
from workloads.applications import applications
from workloads.files.csv_table import read_table
from workloads.files.measured_profile import PROFILES, read_machine, read_profiles
from workloads.files.workload_file import Arrival, Workload, read_workload


def check_cases(cases: Sequence[SimulationCase]) -> None:
    """Find what is wrong with the cases before the first of many runs. Raises UserError."""
    run_ids: set[str] = set()
    checked: set[tuple[object, ...]] = set()
    for case in cases:
        policy = _policy(case)
        # os.path: Path.is_file raises for a path that no file can have, such as one that is too long.
        if case.workload is not None and not os.path.isfile(case.workload):
            problem = "not a regular file" if os.path.exists(case.workload) else "no such file"
            raise UserError(f"--workload {case.workload}: {problem}")
        if case.run_id in run_ids:
            raise UserError(f"{case.run_id}: two runs would have this name; rename a workload file")
        run_ids.add(case.run_id)
        source = case.workload, case.world, case.traces, case.profiles
        if case.workload is not None and source not in checked:
            make_workload(case, make_world(case, policy))
            checked.add(source)


def simulate(case: SimulationCase) -> Result:
    """Simulate one run. With `out`, call it while the run is claimed (output_folders.py).

    Raises UserError for what is wrong with the case, and LogWriteError."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    policy = _policy(case)
    world = make_world(case, policy)
    workload = make_workload(case, world)
    plan = SimulationPlan(
        run_id=case.run_id,
        workload=case.label,
        arrivals=[Arrival(at_s=row.at_s / case.load, spec=world.add_job(row.spec)) for row in workload.rows],
        nodes=cluster(case),
        round_s=case.round_s,
        seed=case.seed,
    )
    gc.freeze()  # otherwise a collection may scan all modules and traces in the middle of a decision
    with open_log(case.out, case.run_id) as log:
        run = Simulation(plan, world, policy, time.thread_time, log).run()
    gc.unfreeze()
    rhos = finish_time_fairness(run.state.ended, isolated_times_for(case)) if case.fairness else None
    return result_of(run, case, rhos, wall_s=time.perf_counter() - wall_s, cpu_s=time.process_time() - cpu_s)


def is_burst(case: SimulationCase) -> bool:
    """Whether all jobs of the workload arrive at the same time."""
    workload = make_workload(case, make_world(case, _policy(case)))
    return len({row.at_s for row in workload.rows}) == 1


def make_world(case: SimulationCase, policy: Policy) -> World:
    """Raises UserError."""
    return _world_maker(case, policy)()


def make_workload(case: SimulationCase, world: World) -> Workload:
    """Raises UserError."""
    if case.workload is None:
        from services.simulator.worlds.synthetic import generate

        return generate(case.jobs, case.seed, case.nodes * case.slots)
    read = read_workload if case.workload.suffix == ".toml" else read_table
    if case.world != "calibrated":
        return read(case.workload, world.applications)
    workload = read(case.workload, _known_applications())
    for spec in (row.spec for row in workload.rows):
        if spec.application not in world.applications:
            raise UserError(
                f"{case.workload}: job {spec.id!r}: application {spec.application!r}: not in the profiles "
                f"{case.profiles or PROFILES}; `coadapt calibrate` measures it"
            )
    return workload


def isolated_times_for(case: SimulationCase) -> IsolatedTimes:
    """Times of jobs alone in the world of this case. Cases that share the world share the simulations."""
    return _isolated_times(
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
def _isolated_times(case: SimulationCase) -> IsolatedTimes:
    return IsolatedTimes(_world_maker(case, make_policy(case.policy)), cluster(case), case.round_s)


def _policy(case: SimulationCase) -> Policy:
    try:
        return make_policy(case.policy)
    except UnknownPolicy as error:
        raise UserError(str(error)) from error


def _world_maker(case: SimulationCase, policy: Policy) -> Callable[[], World]:
    """Reads the files of a world once; the returned function makes new worlds of them. Raises UserError.

    Each world is imported on demand, so that the others need not be loaded."""
    options: dict[str, Any] = {} if case.restart_s is None else {"restart_s": case.restart_s}
    if case.world == "synthetic":
        from services.simulator.worlds.synthetic import SyntheticWorld

        return partial(SyntheticWorld, seed=case.seed, slots=case.slots, **options)
    options["perturbation"] = Perturbation(times=case.times_error, noise=case.noise_error, seed=case.seed)
    options["memory"] = Memory() if case.memory else None
    if case.world == "calibrated":
        from services.simulator.worlds.calibrated import CalibratedWorld

        folder = case.profiles or PROFILES
        if case.slots > (most := read_machine(folder).slots):
            raise UserError(f"slots {case.slots}: allowed in calibrated: 1 to {most}, which were measured")
        profiles = read_profiles(folder, _known_applications(), dict(case.step_factors))
        return partial(
            CalibratedWorld, profiles, cluster(case), assumed_restart_s=case.restart_penalty_s, **options
        )
    from services.simulator.worlds.osdi21 import Osdi21World

    return partial(
        Osdi21World,
        traces_in(case.traces),
        adapts=policy.adapts_batch,
        fits_models=case.out is not None or policy.needs_profiles,
        slots=case.slots,
        interference=case.interference,
        **options,
    )


def _known_applications() -> dict[str, ApplicationSpec]:
    """All applications, measured or not."""
    return applications(load_config(os.environ).applications.modules)
