"""What an experiment consists of: its definition file, its runs in their order, and the workload of each."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, structs

from common.config import Config, Count, Fraction, Seconds
from common.lifecycle import UserError
from common.types import ApplicationSpec, JobSpec, Struct
from services.bench.quiet_machine import LoadBounds
from workloads.files.generate import RECIPES, generate, to_toml
from workloads.files.measured_profile import PROFILES, read_profiles
from workloads.files.workload_file import MAX_SEED, Workload, name_problems, read_workload, single_job

SHOWN_SETS = ", ".join(sorted(RECIPES))
ISOLATED = "isolated"
"""Folder of the runs of one job alone, by which `coadapt compare` judges the model that rho comes from."""
ISOLATED_POLICY = "pollux:adapt_replicas=false"
"""The replicas that are asked for, and the batch of the largest goodput: as that model has a job alone."""
ISOLATED_REPLICAS = (1, 2, 4)
ISOLATED_S = 30.0
"""What a run of one job alone is taken to last before any has shown it."""


class Definition(Struct, frozen=True):
    """A definition file. `sets` are names of recipes, or paths of workload files, relative to the file."""

    policies: Annotated[tuple[str, ...], Meta(min_length=1)]
    sets: Annotated[tuple[str, ...], Meta(min_length=1)]
    seeds: Annotated[tuple[Annotated[int, Meta(ge=0, le=1_000_000)], ...], Meta(min_length=1)]
    name: str = ""
    """Of the folder of its results; empty: that of the file."""
    requests: Literal["tuned", "realistic"] = "tuned"
    """What the jobs of recipes ask for."""
    nodes: Count = 2
    slots: Count = 4
    slot_speed: Fraction = 0.125
    timeout_s: Seconds = 600.0
    """A run that is not over by then has failed."""
    run_s: Seconds = 100.0
    """What a run is taken to last before any has shown it."""
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """So often a run is tried before it is kept though it is noisy, or failed."""
    memory: tuple[str, ...] = ()
    """Policies whose jobs start from what former jobs of their application, in the same run, have shown."""
    profiles: str = str(PROFILES)
    """Folder of measured profiles for the recipes, relative to the file."""
    guard: LoadBounds = LoadBounds()


class PlannedRun(Struct, frozen=True):
    set: str
    policy: str
    seed: int
    alone: bool = False
    """Whether its set is of one job alone: then the run has the name of the set."""

    @property
    def name(self) -> str:
        """That of its folder."""
        name = self.set if self.alone else f"{self.set}-{self.policy}-{self.seed}"
        return re.sub(r"^\.|[^A-Za-z0-9_.-]+", "-", name)


KEYS = f"{', '.join(Definition.__struct_fields__)} ({', '.join(LoadBounds.__struct_fields__)})"
Workloads = Callable[[str, int], tuple[Workload, str]]
"""From the name of a set and a seed to the workload, and to the text of its file."""


def read_definition(path: Path) -> Definition:
    """Paths in it made absolute, or relative to where we are. Raises UserError naming file, key, and what
    is allowed."""
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
        problems += [f"{key}: {value!r} stands in it twice" for value in twice(values)]
    others = [policy for policy in definition.memory if policy not in definition.policies]
    problems += [f"memory: {policy!r} is none of `policies`" for policy in others]
    sets = []
    for entry in definition.sets:
        if not entry.endswith(".toml") and entry not in RECIPES:
            problems.append(f"sets: {entry!r}: allowed: {SHOWN_SETS}, or the path of a workload file, *.toml")
        sets.append(str(path.parent / entry) if entry.endswith(".toml") else entry)
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    profiles = str(path.parent / definition.profiles)
    definition = structs.replace(definition, name=name, sets=tuple(sets), profiles=profiles)
    if same := twice([run.name for run in planned(definition)]):
        raise UserError(f"{path}: two runs would have the folder {same[0]}; rename a workload file")
    return definition


def twice(values: Sequence[object]) -> list[object]:
    return [value for value in dict.fromkeys(values) if values.count(value) > 1]


def set_name(entry: str) -> str:
    return Path(entry).stem if entry.endswith(".toml") else entry


def with_seeds(definition: Definition, count: int) -> Definition:
    """So many seeds: the definition's, in their order, and then the numbers after the largest."""
    more = range(max(definition.seeds) + 1, max(definition.seeds) + 1 + count)
    return structs.replace(definition, seeds=(*definition.seeds, *more)[:count])


def configured(config: Config, definition: Definition) -> Config:
    """The configuration of the experiment's stacks: the cluster of the definition."""
    return structs.replace(
        config,
        agent=structs.replace(config.agent, slots=definition.slots, slot_speed=definition.slot_speed),
    )


def planned(definition: Definition, among: Sequence[str] = ()) -> list[PlannedRun]:
    """Every run, or those of the policies `among` them, in order: seed by seed, set by set, all policies of a
    (set, seed) one after the other, so that those that are compared are near in time. Who is first goes round
    from set to set and from seed to seed: a machine that slowly gets slower favours nobody."""
    policies = [policy for policy in definition.policies if not among or policy in among]
    return [
        PlannedRun(
            set=set_name(entry), policy=policies[(seed_number + set_number + turn) % len(policies)], seed=seed
        )
        for seed_number, seed in enumerate(definition.seeds)
        for set_number, entry in enumerate(definition.sets)
        for turn in range(len(policies))
    ]


def only(runs: Sequence[PlannedRun], policies: Sequence[str], sets: Sequence[str]) -> list[PlannedRun]:
    """The runs of these policies and sets, all where none is named. Raises UserError for one without runs."""
    for option, wanted, there in (
        ("--policy", policies, {run.policy: None for run in runs}),
        ("--set", sets, {run.set: None for run in runs}),
    ):
        for name in wanted:
            if name not in there:
                raise UserError(f"{option} {name!r}: allowed: {', '.join(there)}")
    return [run for run in runs if (not policies or run.policy in policies) and (not sets or run.set in sets)]


def workloads_of(definition: Definition, applications: Mapping[str, ApplicationSpec]) -> Workloads:
    """Raises UserError for profiles that cannot be used, and so does what it returns for a workload."""
    profiles = {}
    if any(entry in RECIPES for entry in definition.sets):
        profiles = read_profiles(Path(definition.profiles), applications)
    files = {set_name(entry): Path(entry) for entry in definition.sets if entry.endswith(".toml")}

    def workload(name: str, seed: int) -> tuple[Workload, str]:
        if name in files:
            slots = definition.nodes * definition.slots
            own = shifted(read_workload(files[name], applications, slots), seed)
            return own, whole_toml(own)
        made = generate(
            RECIPES[name], definition.requests, seed, profiles, definition.nodes, definition.slots
        )
        return made, to_toml(made)

    return workload


def isolated(
    definition: Definition, applications: Mapping[str, ApplicationSpec]
) -> tuple[list[PlannedRun], Workloads]:
    """A run for each application of the sets' jobs and each number of replicas that it and the cluster can
    have: one job alone, all else as its application has it. Raises UserError as `workloads_of` does."""
    seed, slots = definition.seeds[0], definition.nodes * definition.slots
    workloads = workloads_of(definition, applications)
    rows = [row for entry in definition.sets for row in workloads(set_name(entry), seed)[0].rows]
    found = {}
    for application in sorted({row.spec.application for row in rows}):
        spec = applications[application]
        most = min(slots, spec.max_batch_size // spec.min_atomic_batch)
        for replicas in ISOLATED_REPLICAS:
            if replicas <= most:
                name = f"{ISOLATED}-{application}-{replicas}"
                fields = {"application": application, "replicas": replicas, "seed": seed}
                found[name] = single_job(fields, name, applications, slots)
    runs = [PlannedRun(set=name, policy=ISOLATED_POLICY, seed=seed, alone=True) for name in found]
    return runs, lambda name, seed: (found[name], whole_toml(found[name]))


def shifted(workload: Workload, seed: int) -> Workload:
    """The same jobs with other seeds; where theirs follow each other, no other seed of the experiment gives a
    job one of these again."""
    shift = seed * len(workload.rows)
    rows = tuple(
        structs.replace(row, spec=structs.replace(row.spec, seed=(row.spec.seed + shift) % (MAX_SEED + 1)))
        for row in workload.rows
    )
    return structs.replace(workload, seed=(workload.seed + seed) % (MAX_SEED + 1), rows=rows)


def whole_toml(workload: Workload) -> str:
    """A file that is read as this workload, whatever its jobs have of their own."""
    lines = [f'name = "{workload.name}"', f"seed = {workload.seed}"]
    for row in workload.rows:
        lines += ["", "[[job]]", f"at_s = {row.at_s}"]
        lines += [f"{key} = {_toml(getattr(row.spec, key))}" for key in JobSpec.__struct_fields__]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """Numbers and texts are written as JSON has them."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def expected_s(runs: Sequence[PlannedRun], walls_s: Mapping[PlannedRun, float], run_s: float) -> float:
    """What these runs will take: each as long as those of its set, of any, or `run_s`, in this order."""
    by_set: dict[str, list[float]] = {}
    for run, wall_s in walls_s.items():
        by_set.setdefault(run.set, []).append(wall_s)
    any_s = mean(list(walls_s.values())) if walls_s else run_s
    return math.fsum(mean(by_set[run.set]) if run.set in by_set else any_s for run in runs)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
