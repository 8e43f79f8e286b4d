"""Which runs can be paired: runs of the same (set, seed) with the same jobs. Pure."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from analysis.run.measures import RunSummary
from common.types import Struct

POLICY_ORDER = ("fixed", "tiresias", "srtf", "optimus", "dynamic", "throughput", "pollux", "coadapt")
"""Baselines first: reports compare the later policy with the earlier one."""


class ComparedRun(Struct, frozen=True):
    """A usable run. `name` is the name of its folder."""

    name: str
    set: str
    policy: str
    seed: int
    summary: RunSummary
    requests: str = ""
    """The kind of requests, from run.json; empty if unknown."""
    jobs: str = ""
    """Equal for runs whose jobs arrived at the same times and made the same requests."""
    step_time: float | None = None
    """Measured step time / step time of the profiles (`analysis.run.step_times`); None without a profile."""


class LeftOut(Struct, frozen=True):
    """A run that the report does not use, and the reason."""

    run: str
    why: str


def rank(policy: str) -> tuple[int, str]:
    """Sort key of a policy. Variants such as `pollux-batch-only` and `pollux:power=0` follow their policy."""
    places = [place for place, name in enumerate(POLICY_ORDER) if policy.startswith(name)]
    return max(places, default=len(POLICY_ORDER)), policy


def runs_of_same_jobs(runs: Sequence[ComparedRun]) -> tuple[list[ComparedRun], list[LeftOut]]:
    """The runs that can be paired, sorted by set, seed and name, and those that cannot: a run whose jobs
    differ from those of most runs of its (set, seed), and a second run of one policy."""
    kept: list[ComparedRun] = []
    left_out: list[LeftOut] = []
    ordered = sorted(runs, key=lambda run: (*_block(run), run.name))
    for _, group in groupby(ordered, key=_block):
        block = list(group)
        kinds = [(_job_targets(run), run.requests, run.jobs) for run in block]
        usual = block[kinds.index(max(kinds, key=kinds.count))]
        first_of: dict[str, str] = {}
        for run in block:
            why = _difference_of_jobs(run, usual)
            if not why and run.policy in first_of:
                why = f"same set, policy and seed as {first_of[run.policy]}"
            if why:
                left_out.append(LeftOut(run=run.name, why=why))
            else:
                first_of[run.policy] = run.name
                kept.append(run)
    return kept, left_out


def missing_runs(runs: Sequence[ComparedRun], policies: Sequence[str], known: set[str]) -> Iterable[LeftOut]:
    """The runs that each (set, seed) lacks, unless `known` already names them."""
    ordered = sorted(runs, key=lambda run: (*_block(run), rank(run.policy)))
    for _, group in groupby(ordered, key=_block):
        block = {run.policy: run for run in group}
        partners = ", ".join(run.name for run in block.values())
        for policy in policies:
            name = _folder_name(policy, next(iter(block.values())))
            if policy not in block and name not in known:
                yield LeftOut(run=name, why=f"no such run; without this partner: {partners}")


def _block(run: ComparedRun) -> tuple[str, int]:
    return run.set, run.seed


def _job_targets(run: ComparedRun) -> frozenset[tuple[str, str, float]]:
    return frozenset((job.id, job.application, job.target) for job in run.summary.per_job)


def _difference_of_jobs(run: ComparedRun, usual: ComparedRun) -> str:
    """How its jobs differ from the usual ones; empty if they do not."""
    if _job_targets(run) != _job_targets(usual):
        return f"its jobs differ from those of {usual.name}"
    if run.requests != usual.requests:
        own, others = (one.requests or "unknown" for one in (run, usual))
        return f"its requests are {own}; those of {usual.name} are {others}"
    if run.jobs != usual.jobs:
        return f"its jobs make other requests or arrive at other times than those of {usual.name}"
    return ""


def _folder_name(policy: str, partner: ComparedRun) -> str:
    """The folder name of this policy's run, derived from its partner's. Folder names replace characters that
    a policy with parameters may contain."""
    own, other = (
        re.sub(r"[^A-Za-z0-9_.-]+", "-", f"-{name}-{partner.seed}") for name in (policy, partner.policy)
    )
    return (partner.name.removesuffix(other) if partner.name.endswith(other) else partner.set) + own
