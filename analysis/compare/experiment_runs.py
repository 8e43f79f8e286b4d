"""Read the runs of an experiment: which count, and which are left out and why.

    DIR/<set>-<policy>-<seed>/        a run; run.json says what it is and how it went, where there is one
    DIR/lost/<run>-<attempt>/         runs that were lost to noise or a failure, and repeated
    DIR/isolated/isolated-<application>-<n>/   runs of one job alone
    DIR/experiment.json               machine and date

A simulated run has no run.json: its log says the set, the seed and the policy, but for the policy's numbers,
which stand in the name of its folder.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from analysis.compare.conditions import Conditions
from analysis.compare.pairing import ComparedRun, LeftOut
from analysis.log.find_logs import RUN_MARKS, NoRuns, find_logs
from analysis.log.frames import read
from analysis.log.history import RunHistory
from analysis.log.plain_text import plain
from analysis.run.fairness import IsolatedTime
from analysis.run.measures import RunSummary, replicas_mean
from analysis.summarize import summarize
from common.eventlog import EVENTS_FILE
from common.types import Struct

FACTS_FILE, ABOUT_FILE, WORKLOAD_FILE = "run.json", "experiment.json", "workload.toml"
LOST, ISOLATED = "lost", "isolated"


class RunFacts(Conditions, frozen=True, kw_only=True):
    """What compare needs of a run.json."""

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
        """Why its run does not count; empty where it does."""
        found = {
            "noisy": self.noisy,
            "not verified": not self.verified,
            "audit not clean": not self.audit_clean,
        }
        named = ", ".join(name for name, is_so in found.items() if is_so and name not in self.reason)
        return ": ".join(text for text in (named, self.reason) if text)


class IsolatedRun(Struct, frozen=True):
    """A real run of one job alone, and what the model says of it; `relative_error`: modelled / real - 1.
    `step_time` is that of a run (`analysis.compare.pairing`)."""

    run: str
    application: str
    slots: float
    real_s: float
    modelled_s: float
    relative_error: float
    step_time: float | None = None


@dataclass(frozen=True)
class Experiment:
    """`conditions`: by run, of those with a run.json. `lost`: what was repeated. `about`: experiment.json,
    empty without one."""

    place: Path
    runs: tuple[ComparedRun, ...]
    conditions: dict[str, Conditions]
    left_out: tuple[LeftOut, ...]
    lost: tuple[LeftOut, ...]
    alone: tuple[IsolatedRun, ...]
    about: dict[str, Any]
    date: str | None

    @property
    def made_by(self) -> dict[str, Any]:
        """Machine, versions and the digest of the code, as far as they are known."""
        about = {key: self.about.get(key) for key in ("machine", "versions")}
        return {**about, "code": self._shared("code")}

    @property
    def memory(self) -> list[str]:
        """Policies whose jobs start from what former jobs of their application have shown."""
        named = self._shared("memory")
        return [str(policy) for policy in named] if isinstance(named, list) else []

    def _shared(self, key: str) -> Any:
        """Of what all runs share, by experiment.json."""
        shared = self.about.get("conditions")
        return shared.get(key) if isinstance(shared, dict) else None

    def log(self, run: ComparedRun) -> Path:
        return self.place / run.name / EVENTS_FILE


def gather(
    place: Path,
    isolated: Callable[[RunHistory], IsolatedTime | None] | None = None,
    step_time: Callable[[RunHistory], float | None] = lambda _: None,
    shown: Callable[[Sequence[Path]], Iterable[Path]] = lambda folders: folders,
) -> Experiment:
    """Sum up every run in `place`, as `summarize` does; `isolated` gives the isolated times for rho
    (`analysis.run.fairness`), without it runs of one job alone are of no use; `step_time` that of a run; `shown`
    may follow how the reading goes on. Raises NoRuns."""
    find_logs(place)  # says what is wrong with a place without runs
    if place.is_file():
        raise NoRuns(f"{place}: is a file; needed: the folder of an experiment's runs")
    if is_run(place):
        raise NoRuns(f"{place}: is one run; needed: the folder of runs that it lies in")
    runs: list[ComparedRun] = []
    conditions: dict[str, Conditions] = {}
    out: list[LeftOut] = []
    starts: list[str] = []
    singles: list[IsolatedRun] = []
    folders = _folders(place)
    for folder in shown(folders):
        if is_run(folder):
            facts, judged = _judge(folder, isolated or (lambda _: None), step_time)
            if isinstance(judged, ComparedRun):
                runs.append(judged)
                conditions |= {judged.name: facts} if facts else {}
                starts += [facts.started] if facts and facts.started else []
            else:
                out.append(judged)
        elif folder.name == ISOLATED:
            for single in _folders(folder):
                if isolated is None:
                    break
                found = _alone(single, isolated, step_time)
                (singles if isinstance(found, IsolatedRun) else out).append(found)  # type: ignore[arg-type]
        elif folder.name != LOST:
            out += _too_deep(place, folder)
    about = _about(place, out)
    date = about.get("date") or max(starts, default=None)
    return Experiment(
        place=place,
        runs=tuple(runs),
        conditions=conditions,
        left_out=tuple(out),
        lost=tuple(_lost(place / LOST)),
        alone=tuple(singles),
        about=about,
        date=str(date) if date else None,
    )


def is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in (*RUN_MARKS, FACTS_FILE))


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _judge(
    folder: Path,
    isolated: Callable[[RunHistory], IsolatedTime | None],
    step_time: Callable[[RunHistory], float | None],
) -> tuple[RunFacts | None, ComparedRun | LeftOut]:
    """The run, or why it does not count: its own log has the last word."""
    name = plain(folder.name)
    try:
        facts = _facts(folder)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        return None, LeftOut(run=name, why=f"{FACTS_FILE}: {plain(str(error))}")
    if facts and facts.fault:
        return facts, LeftOut(run=name, why=plain(facts.fault))
    if not facts and (folder.parent / ABOUT_FILE).exists():
        return None, LeftOut(run=name, why=f"no {FACTS_FILE}: it was interrupted, or goes on")
    history, summary = summarize(read(folder / EVENTS_FILE), isolated)
    if why := _fault(summary):
        return facts, LeftOut(run=name, why=why)
    try:
        jobs = _jobs(folder / WORKLOAD_FILE, history)
    except (OSError, ValueError) as error:
        return facts, LeftOut(run=name, why=f"{WORKLOAD_FILE}: {plain(str(error))}")
    if facts:
        run = ComparedRun(
            name=name,
            set=_set(facts),
            policy=facts.policy,
            seed=facts.seed,
            summary=summary,
            requests=facts.requests,
            jobs=jobs,
            step_time=step_time(history),
        )
        return facts, run
    assert summary.workload is not None, "a log with a verified job names its run"
    assert summary.policy is not None
    assert summary.seed is not None
    policy = summary.policy
    if name.startswith(f"{summary.workload}-") and name.endswith(f"-{summary.seed}"):
        policy = name[len(summary.workload) + 1 : -len(f"-{summary.seed}")] or policy
    run = ComparedRun(
        name=name,
        set=summary.workload,
        policy=policy,
        seed=summary.seed,
        summary=summary,
        jobs=jobs,
        step_time=step_time(history),
    )
    return None, run


def _jobs(workload: Path, history: RunHistory) -> str:
    """Equal for equal jobs: those of the workload file, without one what the log says that was submitted.
    Raises OSError, ValueError."""
    if not workload.exists():
        return repr(sorted((job.spec for job in history.jobs.values()), key=lambda spec: spec.id))
    content = msgspec.toml.decode(workload.read_bytes(), type=dict[str, Any])
    content.pop("name", None)
    return json.dumps(content, sort_keys=True, default=str)


def _facts(folder: Path) -> RunFacts | None:
    path = folder / FACTS_FILE
    return msgspec.json.decode(path.read_bytes(), type=RunFacts) if path.exists() else None


def _set(facts: RunFacts) -> str:
    """The two kinds of requests of a set are two sets."""
    if facts.requests and facts.requests not in facts.set.split("-"):
        return f"{facts.set}-{facts.requests}"
    return facts.set


def _fault(summary: RunSummary) -> str:
    if not summary.audit.ok:
        more = len(summary.audit.findings) - 1
        return plain(f"audit not clean: {summary.audit.findings[0]}{f', and {more} more' if more else ''}")
    if summary.policy is None or summary.workload is None or summary.seed is None:
        return "its log does not say which policy, workload and seed it is of"
    counts = summary.jobs
    if not counts.submitted:
        return "no job was submitted"
    if counts.verified < counts.submitted:
        return f"{counts.submitted - counts.verified} of {counts.submitted} jobs not verified"
    return ""


def _alone(
    folder: Path,
    isolated: Callable[[RunHistory], IsolatedTime | None],
    step_time: Callable[[RunHistory], float | None],
) -> IsolatedRun | LeftOut:
    name = f"{ISOLATED}/{plain(folder.name)}"
    try:
        facts = _facts(folder)
    except (OSError, ValueError) as error:
        return LeftOut(run=name, why=f"{FACTS_FILE}: {plain(str(error))}")
    if facts and facts.fault:
        return LeftOut(run=name, why=plain(facts.fault))
    times: list[IsolatedTime] = []

    def keep(run: RunHistory) -> IsolatedTime | None:
        found = isolated(run)
        times.extend([found] if found else [])
        return found

    run, summary = summarize(read(folder / EVENTS_FILE), keep)
    if why := _fault(summary):
        return LeftOut(run=name, why=why)
    if len(run.jobs) != 1:
        return LeftOut(run=name, why=f"{len(run.jobs)} jobs: none of them was alone")
    job = next(iter(run.jobs.values()))
    slots, real_s = replicas_mean(job, run.last_s), job.jct_s
    modelled_s = times[0](job, slots) if times and slots else None
    if not slots or not real_s or not modelled_s:
        return LeftOut(run=name, why="there is no modelled time to compare it with")
    return IsolatedRun(
        run=name,
        application=job.spec.application,
        slots=slots,
        real_s=real_s,
        modelled_s=modelled_s,
        relative_error=modelled_s / real_s - 1,
        step_time=step_time(run),
    )


def _lost(folder: Path) -> Iterable[LeftOut]:
    for run in _folders(folder):
        try:
            facts = _facts(run)
            why = (facts.fault if facts else "") or "no reason given"
        except (OSError, ValueError) as error:
            why = f"{FACTS_FILE}: {plain(str(error))}"
        yield LeftOut(run=f"{LOST}/{plain(run.name)}", why=f"lost: {plain(why)}")


def _too_deep(place: Path, folder: Path) -> list[LeftOut]:
    try:
        logs = find_logs(folder)
    except NoRuns:
        return []
    names = [plain(str(log.parent.relative_to(place))) for log in logs]
    return [LeftOut(run=name, why="lies deeper than the experiment's runs") for name in names]


def _about(place: Path, out: list[LeftOut]) -> dict[str, Any]:
    """Empty where there is none; what cannot be read is said in `out`."""
    if not (place / ABOUT_FILE).exists():
        return {}
    try:
        about = json.loads((place / ABOUT_FILE).read_bytes())
        if not isinstance(about, dict):
            raise ValueError("no table")
    except (OSError, ValueError) as error:
        why = f"cannot be read ({error}): machine, date and who had a memory are not known"
        out.append(LeftOut(run=ABOUT_FILE, why=why))
        return {}
    return about
