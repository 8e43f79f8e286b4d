"""The workload sets of the experiment, made from recipes, a seed, and what was measured of the applications.

A recipe says how many jobs come when, and how long they are; the seed decides the rest: which application
each job has, its target, its arrival, its own seed, and what its user asks for. Two kinds of users ask for
the same jobs: those of `tuned` have found out what suits them
(`workloads.files.tuned_requests.tuned_request`), those of `realistic` ask as people do.

The load of a set is

    sum over jobs of slot_seconds(job) / (slots of the cluster x seconds of the arrival window)

where `slot_seconds` is what a job takes to its target in one slot, with the batch that takes least: its most
efficient run. A job that has more replicas, or another batch, takes more, so that at a load of 1 there is no
slot to waste. The window of a recipe is as long as makes the load of the set what the recipe says.
"""

import itertools
import math
import statistics
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import structs

from common.lifecycle import UserError
from common.types import JobSpec, Struct
from workloads.files.measured_profile import MeasuredProfile
from workloads.files.toml_text import workload_text
from workloads.files.tuned_requests import slot_seconds, tuned_request
from workloads.files.workload_file import (
    MAX_SEED,
    Arrival,
    JobFields,
    Workload,
    WorkloadError,
    check_spec,
    complete_spec,
)

REQUESTS = ("tuned", "realistic")
HABIT = {1: 0.4, 2: 0.4, 4: 0.2}
"""Replicas that users of `realistic` ask for, and how often: powers of two, small ones more often."""
DAY = (2, 4, 7, 10, 12, 12, 8, 6, 9, 12, 12, 10, 7, 5, 4, 3, 3, 2, 2, 1, 1, 1, 1, 1)
"""Arrivals by the hour, relative to each other, from 6 in the morning: a peak before noon, another one in
the afternoon, and at night next to nobody."""
TARGETS, TARGET_DECIMALS = 200, 3
"""How many targets, from an application's easiest to its hardest, jobs choose from."""
BUDGET_PART = 0.5
"""No job has a target whose median need is more than this part of its application's budget: seeds differ."""
DECLARED = (2.0, 4.0)
"""What jobs declare as their budget, over the need of their target: users know roughly how long a job takes,
and are on the safe side, for a job that has spent its budget has failed."""
MAX_SCATTER = 1.5
"""No job has a target for which the median needs of two batch sizes differ by more than this factor. They
should be equal; where the metric has all but stopped to improve, they are chance."""


class Lengths(Struct, frozen=True):
    """So many jobs whose targets need `low` to `high` times the progress that their application's own target
    needs, drawn log-uniformly."""

    jobs: int
    low: float
    high: float


class Recipe(Struct, frozen=True):
    """`pattern` is the rate of arrivals in equal parts of the window, relative to each other; each job's
    arrival is drawn by itself, as in a Poisson process of which the count is known. Without `load` all jobs
    arrive at once."""

    name: str
    lengths: tuple[Lengths, ...]
    load: float | None
    pattern: tuple[int, ...] = (1,)


MIXED = (Lengths(jobs=24, low=0.25, high=2.0),)
"""The jobs of a cluster differ by orders of magnitude in length; ours as far as targets allow: with those
that there are it comes to sevenfold."""
MOSTLY_SHORT = (Lengths(jobs=20, low=0.3, high=0.75), Lengths(jobs=4, low=1.7, high=2.0))
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="steady", lengths=MIXED, load=1.0),
        Recipe(name="burst", lengths=MIXED, load=None),
        Recipe(name="tail", lengths=MOSTLY_SHORT, load=1.0),
        Recipe(name="diurnal", lengths=MIXED, load=0.8, pattern=DAY),
    )
}


def generate(
    recipe: Recipe, requests: str, seed: int, profiles: Mapping[str, MeasuredProfile], nodes: int, slots: int
) -> Workload:
    """The set of this recipe and seed for a cluster of `nodes` x `slots`, its jobs in order of arrival.

    `requests`, one of REQUESTS, decides what jobs ask for, and nothing else. The applications are those of
    `profiles`, in numbers as equal as can be. Raises UserError where a profile has no target that can be
    used, and WorkloadError where a job would not be accepted.
    """
    jobs, times, habits, budgets = (
        np.random.default_rng([seed, zlib.crc32(recipe.name.encode()), stream]) for stream in range(4)
    )
    specs = _specs(recipe, profiles, jobs, budgets)
    work_s = sum(slot_seconds(profiles[spec.application], spec) for spec in specs)
    window_s = 0.0 if recipe.load is None else work_s / (nodes * slots * recipe.load)
    rows: list[Arrival] = []
    for at_s, spec in zip(_arrivals(recipe.pattern, len(specs), window_s, times), specs, strict=True):
        measured = profiles[spec.application]
        if requests == "tuned":
            replicas, batch = tuned_request(measured, spec, nodes, slots, habits)
        else:
            replicas = int(habits.choice(list(HABIT), p=list(HABIT.values())))
            batch = max(spec.min_batch_size, replicas * spec.min_atomic_batch)
        name = f"{spec.application}-{len(rows) + 1}"
        spec = structs.replace(spec, id=name, replicas=replicas, batch_size=batch)
        if problems := check_spec(spec, {spec.application: measured.spec}, nodes * slots):
            raise WorkloadError(f"{recipe.name}: {name}: {'; '.join(problems)}")
        rows.append(Arrival(at_s=at_s, spec=spec))
    return Workload(name=f"{recipe.name}-{requests}", seed=seed, rows=tuple(rows))


def needs_of(measured: MeasuredProfile) -> dict[float, float]:
    """The targets that jobs of this application may have, and the progress that each needs: the median over
    the batch sizes. Raises UserError where there is none, or the application's own target is never reached.
    """
    spec = measured.spec
    spread = np.linspace(spec.target_min, spec.target_max, TARGETS).round(TARGET_DECIMALS).tolist()
    targets = [target for target in spread if spec.target_min <= target <= spec.target_max]
    needs = {}
    for target in (spec.target, *targets):
        of_batches = [measured.needed_progress(batch, target) for batch in measured.batches]
        need = statistics.median(of_batches)
        alike = max(of_batches) <= max(MAX_SCATTER * min(of_batches), min(of_batches) + spec.evaluate_every)
        if alike and 0 < need <= BUDGET_PART * spec.max_progress:
            needs[target] = need
    if spec.target not in needs:
        raise UserError(
            f"{spec.name}: by its profile not all batch sizes reach its target {spec.target:g} alike, and "
            f"within {BUDGET_PART:g} of its budget; calibrate it again"
        )
    return needs


def target_of(needs: Mapping[float, float], wanted: float) -> float:
    """The target whose need is nearest to what is wanted, by ratio; of equally near ones the first."""
    return min(needs, key=lambda target: abs(math.log(needs[target] / wanted)))


def to_toml(workload: Workload, options: str = "") -> str:
    """The text of a workload file that `read_workload` reads back as `workload`, which `generate` made.

    A row has what a job does not take from its application. The first line is the command that makes the
    file; `options` are further options of that command, each after a space."""
    recipe, _, requests = workload.name.rpartition("-")
    made_by = f"coadapt workload generate --set {recipe} --requests {requests} --seed {workload.seed}"
    fields = ("application", "at_s", "seed", "target", "max_progress", "replicas", "batch_size")
    return f"# Made by `{made_by}{options}`\n" + workload_text(workload, fields)


def _specs(
    recipe: Recipe,
    profiles: Mapping[str, MeasuredProfile],
    random: np.random.Generator,
    budgets: np.random.Generator,
) -> list[JobSpec]:
    """Of the jobs of a set, in order of arrival, with the requests that applications have by default.

    Each application gets its share of the jobs; the longest are dealt first, to those of the applications
    that have such long targets, for not all do. Where none has, one of them gets the hardest that it has."""
    lengths = [
        math.exp(random.uniform(math.log(kind.low), math.log(kind.high)))
        for kind in recipe.lengths
        for _ in range(kind.jobs)
    ]
    needs = {name: needs_of(measured) for name, measured in sorted(profiles.items())}
    longest = {name: max(needs[name].values()) / needs[name][profiles[name].spec.target] for name in needs}
    names = [name for _, name in zip(lengths, itertools.cycle(needs), strict=False)]
    applications = {name: measured.spec for name, measured in profiles.items()}
    specs = []
    for length in sorted(lengths, reverse=True):
        able = [name for name in names if longest[name] >= length] or names
        name = able[random.integers(len(able))]
        names.remove(name)
        target = target_of(needs[name], length * needs[name][applications[name].target])
        budget = float(round(needs[name][target] * budgets.uniform(*DECLARED)))
        fields = JobFields(application=name, target=target, max_progress=budget)
        specs.append(complete_spec(fields, applications, name, int(random.integers(MAX_SEED))))
    random.shuffle(specs)
    return specs


def _arrivals(
    pattern: Sequence[int], count: int, window_s: float, random: np.random.Generator
) -> list[float]:
    """In order, in seconds."""
    edges = np.linspace(0.0, window_s, len(pattern) + 1)
    reached = np.concatenate([[0.0], np.cumsum(pattern)]) / sum(pattern)
    drawn = np.sort(np.interp(random.random(count), reached, edges))
    return [round(float(at_s), 2) for at_s in drawn]
