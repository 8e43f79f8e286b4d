"""Which runs can be paired: those of the same (set, seed), with the same jobs. Pure."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from analysis.run.measures import RunSummary
from common.types import Struct

ORDER = ("fixed", "tiresias", "srtf", "optimus", "dynamic", "throughput", "pollux", "coadapt")
"""Baselines first: of two policies people are shown the later one against the earlier one."""


class ComparedRun(Struct, frozen=True):
    """A run that counts. `name` is that of its folder, `requests` are those of its run.json; `jobs` is equal
    for runs whose jobs came at the same times and asked for the same. `step_time` is what its steps took over
    what was measured of them (`analysis.run.step_times`), None where nothing was."""

    name: str
    set: str
    policy: str
    seed: int
    summary: RunSummary
    requests: str = ""
    jobs: str = ""
    step_time: float | None = None


class LeftOut(Struct, frozen=True):
    run: str
    why: str


def rank(policy: str) -> tuple[int, str]:
    """Variants, as in `pollux-batch-only` and `pollux:power=0`, stand after what they vary."""
    of = [number for number, name in enumerate(ORDER) if policy.startswith(name)]
    return (max(of, default=len(ORDER)), policy)


def _key(run: ComparedRun) -> tuple[str, int]:
    return run.set, run.seed


def blocks_of(runs: Iterable[ComparedRun]) -> list[dict[str, ComparedRun]]:
    """By (set, seed), the runs by policy."""
    ordered = sorted(runs, key=lambda run: (*_key(run), rank(run.policy)))
    return [{run.policy: run for run in group} for _, group in groupby(ordered, key=_key)]


def of_same_jobs(runs: Sequence[ComparedRun]) -> tuple[list[ComparedRun], list[LeftOut]]:
    """Without those whose jobs are not those of most runs of their (set, seed), and second runs of one."""
    kept: list[ComparedRun] = []
    out: list[LeftOut] = []
    ordered = sorted(runs, key=lambda run: (*_key(run), run.name))
    for _, group in groupby(ordered, key=_key):
        block = list(group)
        kinds = [(_jobs(run), run.requests, run.jobs) for run in block]
        usual = block[kinds.index(max(kinds, key=kinds.count))]
        seen: dict[str, str] = {}
        for run in block:
            if why := _other_jobs(run, usual):
                out.append(LeftOut(run=run.name, why=why))
            elif run.policy in seen:
                why = f"set, policy and seed are those of {seen[run.policy]}"
                out.append(LeftOut(run=run.name, why=why))
            else:
                seen[run.policy] = run.name
                kept.append(run)
    return kept, out


def _jobs(run: ComparedRun) -> frozenset[tuple[str, str, float]]:
    return frozenset((job.id, job.application, job.target) for job in run.summary.per_job)


def _other_jobs(run: ComparedRun, usual: ComparedRun) -> str:
    """In what its jobs differ from the usual ones; empty where they do not."""
    if _jobs(run) != _jobs(usual):
        return f"its jobs are not those of {usual.name}"
    if run.requests != usual.requests:
        own, others = (one.requests or "not told" for one in (run, usual))
        return f"its requests are {own}, those of {usual.name} {others}"
    if run.jobs != usual.jobs:
        return f"its jobs ask for something else, or come at other times, than those of {usual.name}"
    return ""


def lacking_in(runs: Sequence[ComparedRun], policies: Sequence[str], known: set[str]) -> Iterable[LeftOut]:
    for block in blocks_of(runs):
        one = next(iter(block.values()))
        for policy in policies:
            name = _named(policy, one)
            if policy not in block and name not in known:
                partners = ", ".join(run.name for run in block.values())
                yield LeftOut(run=name, why=f"there is no such run; unpaired with it: {partners}")


def _named(policy: str, partner: ComparedRun) -> str:
    """The folder that a run of this policy has beside its partner's. Policies may carry parameters, which
    folders spell otherwise."""
    own, other = (
        re.sub(r"[^A-Za-z0-9_.-]+", "-", f"-{name}-{partner.seed}") for name in (policy, partner.policy)
    )
    return (partner.name.removesuffix(other) if partner.name.endswith(other) else partner.set) + own
