"""Read the folder of an experiment: which runs count, and which are left out and why.

A simulated run has no run.json. Its log names the set, the seed and the policy; the parameters of the policy
are in the name of its folder.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from analysis.compare.experiment_files import (
    EXPERIMENT_FILE,
    ISOLATED,
    LOST,
    RUN_FILE,
    WORKLOAD_FILE,
    RunRecord,
)
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

IsolatedTimeOf = Callable[[RunHistory], IsolatedTime | None]
"""Gives the isolated times of a run's jobs, for rho (`analysis.run.fairness`)."""
StepTimeOf = Callable[[RunHistory], float | None]


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
    records: dict[str, RunRecord]
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
    records: dict[str, RunRecord] = field(default_factory=dict)
    starts: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    alone: list[IsolatedRun] = field(default_factory=list)

    def read_run(self, folder: Path) -> None:
        name = plain(folder.name)
        try:
            record = _usable_record(folder)
            run = _compared_run(folder, record, self.isolated or (lambda _: None), self.step_time)
        except _NotUsable as reason:
            self.left_out.append(LeftOut(run=name, why=str(reason)))
            return
        self.runs.append(run)
        if record:
            self.records[name] = record
            self.starts += [record.started] if record.started else []

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
            self.left_out.append(LeftOut(run=EXPERIMENT_FILE, why=why))
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
    about = reader.read_about(place / EXPERIMENT_FILE)
    date = about.get("date") or max(reader.starts, default=None)
    return Experiment(
        place=place,
        runs=tuple(reader.runs),
        records=reader.records,
        left_out=tuple(reader.left_out),
        lost=tuple(map(_lost_run, _folders(place / LOST))),
        alone=tuple(reader.alone),
        about=about,
        date=str(date) if date else None,
    )


def _is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in (*RUN_MARKS, RUN_FILE))


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _record(folder: Path) -> RunRecord | None:
    """None without a run.json. Raises _NotUsable."""
    path = folder / RUN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRecord) if path.exists() else None
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise _NotUsable(f"{RUN_FILE}: {plain(str(error))}") from error


def _usable_record(folder: Path) -> RunRecord | None:
    """Raises _NotUsable if run.json says that the run does not count."""
    record = _record(folder)
    if record and record.fault:
        raise _NotUsable(plain(record.fault))
    return record


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
    folder: Path, record: RunRecord | None, isolated: IsolatedTimeOf, step_time: StepTimeOf
) -> ComparedRun:
    """Raises _NotUsable."""
    if not record and (folder.parent / EXPERIMENT_FILE).exists():
        raise _NotUsable(f"no {RUN_FILE}: it was interrupted or is still running")
    history, summary = _usable_log(folder, isolated)
    name = plain(folder.name)
    if record:
        of, policy, seed, requests = record.full_set, record.policy, record.seed, record.requests
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
    _usable_record(folder)
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
        record = _record(folder)
        why = (record.fault if record else "") or "no reason given"
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
