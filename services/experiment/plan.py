"""What an experiment consists of: its definition file, its runs in order, and the workload of each run."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, structs

import workloads
from analysis.compare.experiment_files import ISOLATED
from common.config import Config, Count, Fraction, Seconds
from common.lifecycle import UserError
from common.types import ApplicationSpec, Struct
from services.bench.quiet_machine import LoadBounds
from workloads.files.generate import RECIPES, generate, to_toml
from workloads.files.measured_profile import PROFILES, read_profiles
from workloads.files.toml_text import workload_text
from workloads.files.workload_file import MAX_SEED, Workload, name_problems, read_workload, single_job

EXPERIMENTS = Path(workloads.__file__).parent / "experiments"
"""The definition files of the project, which may be named without their folder."""
RECIPE_NAMES = ", ".join(sorted(RECIPES))
ISOLATED_POLICY = "pollux:adapt_replicas=false"
"""Gives a job the replicas that it requests and the batch of the largest goodput, as the model assumes."""
ISOLATED_REPLICAS = (1, 2, 4)
ISOLATED_S = 30.0
"""Assumed duration of an isolated run until one has been measured."""


class Definition(Struct, frozen=True):
    """A definition file."""

    policies: Annotated[tuple[str, ...], Meta(min_length=1)]
    sets: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Names of recipes, or paths of workload files relative to the definition file."""
    seeds: Annotated[tuple[Annotated[int, Meta(ge=0, le=1_000_000)], ...], Meta(min_length=1)]
    name: str = ""
    """Of the folder with the results; empty: the name of the file."""
    requests: Literal["tuned", "realistic"] = "tuned"
    """What the jobs of recipes request."""
    nodes: Count = 2
    slots: Count = 4
    slot_speed: Fraction = 0.125
    timeout_s: Seconds = 600.0
    """A run that takes longer has failed."""
    run_s: Seconds = 100.0
    """Assumed duration of a run until one has been measured."""
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """How often a noisy or failed run is tried before it is kept anyway."""
    memory: tuple[str, ...] = ()
    """Policies under which jobs start from what earlier jobs of their application have shown in the run."""
    profiles: str = str(PROFILES)
    """Folder of measured profiles for the recipes, relative to the definition file."""
    guard: LoadBounds = LoadBounds()


class PlannedRun(Struct, frozen=True):
    set: str
    policy: str
    seed: int
    is_isolated: bool = False
    """Whether this is an isolated run, of one job alone. It has the name of its set."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        name = self.set if self.is_isolated else f"{self.set}-{self.policy}-{self.seed}"
        return re.sub(r"^\.|[^A-Za-z0-9_.-]+", "-", name)


KEYS = f"{', '.join(Definition.__struct_fields__)} ({', '.join(LoadBounds.__struct_fields__)})"
WorkloadMaker = Callable[[str, int], tuple[Workload, str]]
"""A function from the name of a set and a seed to the workload and the text of its file. Raises UserError."""


def read_definition(path: Path) -> Definition:
    """The definition with paths that are valid from the working directory. A bare name stands for the
    project's experiment of that name. Raises UserError, which names the file, the key and what is allowed."""
    if not os.path.exists(path) and os.path.isfile(own := EXPERIMENTS / f"{path}.toml"):
        path = own
    try:
        definition = msgspec.toml.decode(path.read_bytes(), type=Definition)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}; keys: {KEYS}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error
    name = definition.name or path.stem
    problems = name_problems("name", name)
    for key in ("policies", "sets", "seeds"):
        values = getattr(definition, key)
        problems += [f"{key}: {value!r} is given twice" for value in _duplicates(values)]
    others = [policy for policy in definition.memory if policy not in definition.policies]
    problems += [f"memory: {policy!r} is not in `policies`" for policy in others]
    sets = []
    for entry in definition.sets:
        if not entry.endswith(".toml") and entry not in RECIPES:
            problems.append(
                f"sets: {entry!r}: allowed: {RECIPE_NAMES}, or the path of a workload file, *.toml"
            )
        sets.append(str(path.parent / entry) if entry.endswith(".toml") else entry)
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    profiles = str(path.parent / definition.profiles)
    definition = structs.replace(definition, name=name, sets=tuple(sets), profiles=profiles)
    if same := _duplicates([run.name for run in plan_runs(definition)]):
        raise UserError(f"{path}: two runs would have the folder {same[0]}; rename a workload file")
    return definition


def _duplicates(values: Sequence[object]) -> list[object]:
    return [value for value in dict.fromkeys(values) if values.count(value) > 1]


def set_name(entry: str) -> str:
    return Path(entry).stem if entry.endswith(".toml") else entry


def with_seeds(definition: Definition, count: int) -> Definition:
    """The definition with `count` seeds: its own in their order, then the numbers after the largest."""
    more = range(max(definition.seeds) + 1, max(definition.seeds) + 1 + count)
    return structs.replace(definition, seeds=(*definition.seeds, *more)[:count])


def with_cluster(config: Config, definition: Definition) -> Config:
    """The configuration of the experiment's stacks, with the cluster of the definition."""
    return structs.replace(
        config,
        agent=structs.replace(config.agent, slots=definition.slots, slot_speed=definition.slot_speed),
    )


def plan_runs(definition: Definition, among: Sequence[str] = ()) -> list[PlannedRun]:
    """Every run in order, or only those of the policies `among`.

    Runs are ordered by seed, then set. All policies of a (set, seed) follow each other, so that runs that are
    compared are close in time. The first policy rotates from set to set and from seed to seed, so that a
    machine that gets slower over time favours none."""
    policies = [policy for policy in definition.policies if not among or policy in among]
    return [
        PlannedRun(
            set=set_name(entry), policy=policies[(seed_number + set_number + turn) % len(policies)], seed=seed
        )
        for seed_number, seed in enumerate(definition.seeds)
        for set_number, entry in enumerate(definition.sets)
        for turn in range(len(policies))
    ]


def select_runs(runs: Sequence[PlannedRun], policies: Sequence[str], sets: Sequence[str]) -> list[PlannedRun]:
    """The runs of these policies and sets; an empty list selects all. Raises UserError for a name without
    runs."""
    for option, names, allowed in (
        ("--policy", policies, {run.policy: None for run in runs}),
        ("--set", sets, {run.set: None for run in runs}),
    ):
        for name in names:
            if name not in allowed:
                raise UserError(f"{option} {name!r}: allowed: {', '.join(allowed)}")
    return [run for run in runs if (not policies or run.policy in policies) and (not sets or run.set in sets)]


def workload_maker(definition: Definition, applications: Mapping[str, ApplicationSpec]) -> WorkloadMaker:
    """The function that makes the experiment's workloads. Raises UserError for profiles that cannot be
    used."""
    profiles = {}
    if any(entry in RECIPES for entry in definition.sets):
        profiles = read_profiles(Path(definition.profiles), applications)
    files = {set_name(entry): Path(entry) for entry in definition.sets if entry.endswith(".toml")}

    def workload(name: str, seed: int) -> tuple[Workload, str]:
        if name in files:
            slots = definition.nodes * definition.slots
            own = shifted(read_workload(files[name], applications, slots), seed)
            return own, workload_text(own)
        generated = generate(
            RECIPES[name], definition.requests, seed, profiles, definition.nodes, definition.slots
        )
        return generated, to_toml(generated)

    return workload


def plan_isolated_runs(
    definition: Definition, applications: Mapping[str, ApplicationSpec]
) -> tuple[list[PlannedRun], WorkloadMaker]:
    """The isolated runs, and the function that makes their workloads. There is a run of one job, with the
    defaults of its application, for each application in the sets and each number of replicas that fits.

    Raises UserError as `workloads_of` does."""
    seed, slots = definition.seeds[0], definition.nodes * definition.slots
    workloads = workload_maker(definition, applications)
    rows = [row for entry in definition.sets for row in workloads(set_name(entry), seed)[0].rows]
    single_jobs = {}
    for application in sorted({row.spec.application for row in rows}):
        spec = applications[application]
        most = min(slots, spec.max_batch_size // spec.min_atomic_batch)
        for replicas in ISOLATED_REPLICAS:
            if replicas <= most:
                name = f"{ISOLATED}-{application}-{replicas}"
                fields = {"application": application, "replicas": replicas, "seed": seed}
                single_jobs[name] = single_job(fields, name, applications, slots)
    runs = [PlannedRun(set=name, policy=ISOLATED_POLICY, seed=seed, is_isolated=True) for name in single_jobs]
    return runs, lambda name, _: (single_jobs[name], workload_text(single_jobs[name]))


def shifted(workload: Workload, seed: int) -> Workload:
    """The same jobs with other seeds. If the jobs' own seeds are consecutive, no two seeds of the experiment
    give the same seed to a job."""
    shift = seed * len(workload.rows)
    rows = tuple(
        structs.replace(row, spec=structs.replace(row.spec, seed=(row.spec.seed + shift) % (MAX_SEED + 1)))
        for row in workload.rows
    )
    return structs.replace(workload, seed=(workload.seed + seed) % (MAX_SEED + 1), rows=rows)


def expected_s(runs: Sequence[PlannedRun], walls_s: Mapping[PlannedRun, float], run_s: float) -> float:
    """Expected seconds for `runs`: the mean of the measured `walls_s` of the same set; without any, of all
    sets; without any, `run_s` each."""
    by_set: dict[str, list[float]] = {}
    for run, wall_s in walls_s.items():
        by_set.setdefault(run.set, []).append(wall_s)
    any_s = fmean(walls_s.values()) if walls_s else run_s
    return math.fsum(fmean(by_set[run.set]) if run.set in by_set else any_s for run in runs)
