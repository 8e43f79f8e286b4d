"""Generate the workload sets of the experiments from recipes, a seed and the measured profiles.

A recipe says how many jobs there are, how long they are, and when they arrive. The seed decides the rest: the
application, target, arrival and seed of each job, and what its user requests. Each set comes in two versions
with the same jobs: `tuned` users know what suits their job (`workloads.files.tuned_requests`), `realistic`
users ask as people do.

The load of a set is

    sum over jobs of slot_seconds(job) / (slots of the cluster x seconds of the arrival window)

where `slot_seconds` is the time of a job in one slot with its fastest batch, which is its most efficient run.
With more replicas, or another batch, a job takes more slot-seconds, so at a load of 1 there is no slot to
waste. The length of the arrival window is chosen so that the set has the load of its recipe.
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
"""How often `realistic` users request this many replicas: powers of two, mostly small ones."""
DAY = (2, 4, 7, 10, 12, 12, 8, 6, 9, 12, 12, 10, 7, 5, 4, 3, 3, 2, 2, 1, 1, 1, 1, 1)
"""Relative number of arrivals per hour, from 6 in the morning: a peak before noon, a second one in the
afternoon, and very few at night."""
TARGETS, TARGET_DECIMALS = 200, 3
"""Jobs choose from this many targets, from the easiest of the application to the hardest."""
BUDGET_PART = 0.5
"""No target needs more than this fraction of the application's progress budget (median): seeds differ."""
DECLARED = (2.0, 4.0)
"""The progress budget of a job, as a multiple of what its target needs. Users know roughly how long a job
takes and add a margin, since a job that spends its budget fails."""
MAX_SCATTER = 1.5
"""No target is used for which the median needs of two batch sizes differ by more than this factor. They
should be equal; where the metric hardly improves any more, they depend on chance."""


class Lengths(Struct, frozen=True):
    """A number of jobs whose targets need `low` to `high` times the progress of their application's own
    target, drawn log-uniformly."""

    jobs: int
    low: float
    high: float


class Recipe(Struct, frozen=True):
    """How to generate a set. `pattern` is the relative rate of arrivals in equal parts of the window.
    Arrivals are drawn independently, as in a Poisson process with a known count. Without `load`, all jobs
    arrive at once."""

    name: str
    lengths: tuple[Lengths, ...]
    load: float | None
    pattern: tuple[int, ...] = (1,)


MIXED = (Lengths(jobs=24, low=0.25, high=2.0),)
"""In real clusters the lengths of jobs differ by orders of magnitude. Ours differ as much as the targets
allow, by a factor of about seven."""
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
    """Generate a set for a cluster of `nodes` x `slots`, its jobs in order of arrival.

    `requests`, one of REQUESTS, decides only what the jobs request. The jobs are spread as evenly as possible
    over the applications of `profiles`. Raises UserError if a profile has no usable target, and WorkloadError
    if a job would not be accepted.
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
    """The targets that jobs of this application may have, and the progress that each needs (median over the
    batch sizes). Raises UserError if the application's own target is not among them.
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
            f"{spec.name}: in its profile, not all batch sizes reach the target {spec.target:g} with similar "
            f"progress and within {BUDGET_PART:g} of its budget; calibrate it again"
        )
    return needs


def target_of(needs: Mapping[float, float], wanted: float) -> float:
    """The target whose need has the smallest ratio to the wanted progress; the first one of equals."""
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
    """The jobs of a set in order of arrival, with the default requests of their applications.

    Each application gets an equal share of the jobs. The longest jobs are assigned first, to applications
    that have such long targets. If none has, a job gets the hardest target of its application."""
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
        candidates = [name for name in names if longest[name] >= length] or names
        name = candidates[random.integers(len(candidates))]
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
    """Times of arrival in seconds, in order."""
    edges = np.linspace(0.0, window_s, len(pattern) + 1)
    reached = np.concatenate([[0.0], np.cumsum(pattern)]) / sum(pattern)
    drawn = np.sort(np.interp(random.random(count), reached, edges))
    return [round(float(at_s), 2) for at_s in drawn]
