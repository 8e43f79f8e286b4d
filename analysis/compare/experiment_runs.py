"""Read the folder of an experiment: which runs count, and which are left out and why.

    DIR/<set>-<policy>-<seed>/        a run; run.json says what it is and how it went
    DIR/lost/<run>-<attempt>/         runs that were lost to noise or a failure, and were repeated
    DIR/isolated/isolated-<application>-<n>/   runs of one job alone
    DIR/experiment.json               machine and date

A simulated run has no run.json. Its log names the set, the seed and the policy; the parameters of the policy
are in the name of its folder.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from analysis.compare.conditions import Conditions
from analysis.compare.pairing import ComparedRun, LeftOut
from analysis.log.find_logs import RUN_MARKS, NoRuns, find_logs
from analysis.log.frames import read
from analysis.log.history import RunHistory, history
from analysis.log.plain_text import plain
from analysis.run.fairness import IsolatedTime
from analysis.run.measures import RunSummary, replicas_mean
from analysis.summarize import summarize
from common.eventlog import EVENTS_FILE
from common.types import Struct

FACTS_FILE, ABOUT_FILE, WORKLOAD_FILE = "run.json", "experiment.json", "workload.toml"
LOST, ISOLATED = "lost", "isolated"

IsolatedTimeOf = Callable[[RunHistory], IsolatedTime | None]
"""Gives the isolated times of a run's jobs, for rho (`analysis.run.fairness`)."""
StepTimeOf = Callable[[RunHistory], float | None]


class RunFacts(Conditions, frozen=True, kw_only=True):
    """The part of run.json that a comparison needs."""

    set: str
    policy: str
    seed: int
    requests: str = ""
    started: str | None = None
    verified: bool = True
    audit_clean: bool = True
    noisy: bool = False
    reason: str = ""

    @property
    def fault(self) -> str:
        """Why the run does not count; empty if it counts."""
        faults = {
            "noisy": self.noisy,
            "not verified": not self.verified,
            "audit not clean": not self.audit_clean,
        }
        named = ", ".join(name for name, applies in faults.items() if applies and name not in self.reason)
        return ": ".join(text for text in (named, self.reason) if text)

    @property
    def full_set(self) -> str:
        """The set with its kind of requests: the same jobs with other requests are another set."""
        if self.requests and self.requests not in self.set.split("-"):
            return f"{self.set}-{self.requests}"
        return self.set


class IsolatedRun(Struct, frozen=True):
    """A real run of one job alone, and the completion time that the model predicts for it."""

    run: str
    application: str
    slots: float
    real_s: float
    modelled_s: float
    relative_error: float
    """modelled / real - 1."""
    step_time: float | None = None
    """As in `ComparedRun`."""


@dataclass(frozen=True)
class Experiment:
    place: Path
    runs: tuple[ComparedRun, ...]
    conditions: dict[str, Conditions]
    """By run, for those with a run.json."""
    left_out: tuple[LeftOut, ...]
    lost: tuple[LeftOut, ...]
    """Runs that were lost and repeated."""
    alone: tuple[IsolatedRun, ...]
    about: dict[str, Any]
    """The content of experiment.json; empty without one."""
    date: str | None

    @property
    def made_by(self) -> dict[str, Any]:
        """Machine, versions and the digest of the code; None if unknown."""
        about = {key: self.about.get(key) for key in ("machine", "versions")}
        return {**about, "code": self._shared("code")}

    @property
    def memory(self) -> list[str]:
        """Policies whose jobs start from what earlier jobs of their application have shown."""
        policies = self._shared("memory")
        return [str(policy) for policy in policies] if isinstance(policies, list) else []

    def _shared(self, key: str) -> Any:
        """A condition that all runs share."""
        shared = self.about.get("conditions")
        return shared.get(key) if isinstance(shared, dict) else None

    def log(self, run: ComparedRun) -> Path:
        return self.place / run.name / EVENTS_FILE

    def history(self, run: ComparedRun) -> RunHistory:
        return history(read(self.log(run)))


@dataclass
class _Reader:
    """Collects the runs of an experiment and the reasons why some do not count."""

    isolated: IsolatedTimeOf | None
    step_time: StepTimeOf
    runs: list[ComparedRun] = field(default_factory=list)
    conditions: dict[str, Conditions] = field(default_factory=dict)
    starts: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    alone: list[IsolatedRun] = field(default_factory=list)

    def read_run(self, folder: Path) -> None:
        name = plain(folder.name)
        try:
            facts = _usable_facts(folder)
            run = _compared_run(folder, facts, self.isolated or (lambda _: None), self.step_time)
        except _NotUsable as reason:
            self.left_out.append(LeftOut(run=name, why=str(reason)))
            return
        self.runs.append(run)
        if facts:
            self.conditions[name] = facts
            self.starts += [facts.started] if facts.started else []

    def read_isolated_run(self, folder: Path) -> None:
        """Without isolated times there is nothing to check, and such runs are not missed."""
        if self.isolated is None:
            return
        try:
            self.alone.append(_isolated_run(folder, self.isolated, self.step_time))
        except _NotUsable as reason:
            self.left_out.append(LeftOut(run=f"{ISOLATED}/{plain(folder.name)}", why=str(reason)))

    def read_about(self, path: Path) -> dict[str, Any]:
        """The content of experiment.json; empty if there is none or it cannot be read."""
        if not path.exists():
            return {}
        try:
            about = json.loads(path.read_bytes())
            if not isinstance(about, dict):
                raise ValueError("not a table")
        except (OSError, ValueError) as error:
            why = f"cannot be read ({error}): machine, date and policies with a memory are not known"
            self.left_out.append(LeftOut(run=ABOUT_FILE, why=why))
            return {}
        return about


class _NotUsable(Exception):
    """Why a run does not count."""


def gather(
    place: Path,
    isolated: IsolatedTimeOf | None = None,
    step_time: StepTimeOf = lambda _: None,
    progress: Callable[[Sequence[Path]], Iterable[Path]] = lambda folders: folders,
) -> Experiment:
    """Read and summarize every run in `place`.

    Without `isolated`, runs of one job alone are ignored and rho comes from each run's own log. `step_time`
    gives `ComparedRun.step_time`. `progress` may show how far the reading is. Raises NoRuns.
    """
    find_logs(place)  # raises NoRuns with the reason if there are none
    if place.is_file():
        raise NoRuns(f"{place}: is a file; needed: the folder of an experiment's runs")
    if _is_run(place):
        raise NoRuns(f"{place}: is one run; needed: the folder that holds the runs")
    reader = _Reader(isolated, step_time)
    for folder in progress(_folders(place)):
        if _is_run(folder):
            reader.read_run(folder)
        elif folder.name == ISOLATED:
            for single in _folders(folder):
                reader.read_isolated_run(single)
        elif folder.name != LOST:
            reader.left_out += _runs_too_deep(place, folder)
    about = reader.read_about(place / ABOUT_FILE)
    date = about.get("date") or max(reader.starts, default=None)
    return Experiment(
        place=place,
        runs=tuple(reader.runs),
        conditions=reader.conditions,
        left_out=tuple(reader.left_out),
        lost=tuple(map(_lost_run, _folders(place / LOST))),
        alone=tuple(reader.alone),
        about=about,
        date=str(date) if date else None,
    )


def _is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in (*RUN_MARKS, FACTS_FILE))


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _facts(folder: Path) -> RunFacts | None:
    """None without a run.json. Raises _NotUsable."""
    path = folder / FACTS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunFacts) if path.exists() else None
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise _NotUsable(f"{FACTS_FILE}: {plain(str(error))}") from error


def _usable_facts(folder: Path) -> RunFacts | None:
    """Raises _NotUsable if run.json says that the run does not count."""
    facts = _facts(folder)
    if facts and facts.fault:
        raise _NotUsable(plain(facts.fault))
    return facts


def _usable_log(folder: Path, isolated: IsolatedTimeOf) -> tuple[RunHistory, RunSummary]:
    """The log has the last word on whether a run counts. Raises _NotUsable."""
    run, summary = summarize(read(folder / EVENTS_FILE), isolated)
    findings, counts = summary.audit.findings, summary.jobs
    if not summary.audit.ok:
        more = f", and {len(findings) - 1} more" if len(findings) > 1 else ""
        raise _NotUsable(plain(f"audit not clean: {findings[0]}{more}"))
    if summary.policy is None or summary.workload is None or summary.seed is None:
        raise _NotUsable("its log does not name its policy, workload and seed")
    if not counts.submitted:
        raise _NotUsable("no job was submitted")
    if counts.verified < counts.submitted:
        raise _NotUsable(f"{counts.submitted - counts.verified} of {counts.submitted} jobs not verified")
    return run, summary


def _compared_run(
    folder: Path, facts: RunFacts | None, isolated: IsolatedTimeOf, step_time: StepTimeOf
) -> ComparedRun:
    """Raises _NotUsable."""
    if not facts and (folder.parent / ABOUT_FILE).exists():
        raise _NotUsable(f"no {FACTS_FILE}: it was interrupted or is still running")
    history, summary = _usable_log(folder, isolated)
    name = plain(folder.name)
    if facts:
        of, policy, seed, requests = facts.full_set, facts.policy, facts.seed, facts.requests
    else:
        of, seed, requests = str(summary.workload), int(summary.seed or 0), ""
        policy = name.removeprefix(f"{of}-").removesuffix(f"-{seed}")
        if not policy or name != f"{of}-{policy}-{seed}":
            policy = str(summary.policy)
    jobs = _jobs(folder / WORKLOAD_FILE, history)
    return ComparedRun(name, of, policy, seed, summary, requests, jobs, step_time(history))


def _jobs(workload: Path, history: RunHistory) -> str:
    """A text that is equal for equal jobs: from the workload file, otherwise from the submissions in the log.
    Raises _NotUsable."""
    if not workload.exists():
        return repr(sorted((job.spec for job in history.jobs.values()), key=lambda spec: spec.id))
    try:
        content = msgspec.toml.decode(workload.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise _NotUsable(f"{WORKLOAD_FILE}: {plain(str(error))}") from error
    content.pop("name", None)
    return json.dumps(content, sort_keys=True, default=str)


def _isolated_run(folder: Path, isolated: IsolatedTimeOf, step_time: StepTimeOf) -> IsolatedRun:
    """Raises _NotUsable."""
    _usable_facts(folder)
    models: list[IsolatedTime] = []

    def remember(run: RunHistory) -> IsolatedTime | None:
        model = isolated(run)
        models.extend([model] if model else [])
        return model

    history, _ = _usable_log(folder, remember)
    if len(history.jobs) != 1:
        raise _NotUsable(f"{len(history.jobs)} jobs: none of them was alone")
    (job,) = history.jobs.values()
    slots, real_s = replicas_mean(job, history.last_s), job.jct_s
    modelled_s = models[0](job, slots) if models and slots else None
    if not slots or not real_s or not modelled_s:
        raise _NotUsable("there is no modelled time to compare it with")
    return IsolatedRun(
        run=f"{ISOLATED}/{plain(folder.name)}",
        application=job.spec.application,
        slots=slots,
        real_s=real_s,
        modelled_s=modelled_s,
        relative_error=modelled_s / real_s - 1,
        step_time=step_time(history),
    )


def _lost_run(folder: Path) -> LeftOut:
    try:
        facts = _facts(folder)
        why = (facts.fault if facts else "") or "no reason given"
    except _NotUsable as reason:
        why = str(reason)
    return LeftOut(run=f"{LOST}/{plain(folder.name)}", why=f"lost: {plain(why)}")


def _runs_too_deep(place: Path, folder: Path) -> list[LeftOut]:
    try:
        logs = find_logs(folder)
    except NoRuns:
        return []
    names = [plain(str(log.parent.relative_to(place))) for log in logs]
    return [LeftOut(run=name, why="is deeper in the folder than the experiment's runs") for name in names]
