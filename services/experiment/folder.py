"""Which runs of an experiment are done, which were set aside, and what a killed command left.

`analysis.compare.experiment_files` describes the folder.
"""

import contextlib
import fcntl
import hashlib
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import psutil

from analysis.compare.experiment_files import (
    EXPERIMENT_FILE,
    ISOLATED,
    LOST,
    RUN_FILE,
    WORKLOAD_FILE,
    RunRecord,
)
from common import __version__
from common.atomic_write import write_atomically
from common.config import PREFIX, Config
from common.lifecycle import UserError
from services.bench.measure import processor
from services.experiment.plan import Definition, PlannedRun
from services.launcher.processes import processes_with, stop_processes

ROOT = Path(__file__).resolve().parents[2]
"""Where the packages of the project are, in a checkout or installed."""
LOCK_FILE = ".experiment.lock"
MEMORY_FILE = "memory.json"
FIXED_KEYS = ("requests", "nodes", "timeout_s", "memory")
"""Keys of the definition that must be the same for all runs of an experiment."""
FIXED_SECTIONS = ("scheduler", "collector", "agent", "trainer", "applications")
"""Sections of the configuration that must be the same."""
FIXED_BOUNDS = ("foreign_cpu", "steal")
"""Bounds of the guard that decide which runs are kept. Those for the wait before a run may change."""
CODE = ("common", "services", "workloads")
"""Packages whose code affects a run."""


class ExperimentFolder:
    def __init__(self, path: Path, definition: Definition) -> None:
        self.path = path.resolve()
        self.definition = definition

    def run_folder(self, run: PlannedRun) -> Path:
        return self.path / (ISOLATED if run.is_isolated else "") / run.name

    def records(self, runs: Sequence[PlannedRun]) -> dict[PlannedRun, RunRecord]:
        """The records of the runs that are done. Raises UserError for a record that cannot be read."""
        found = {}
        for run in runs:
            file = self.run_folder(run) / RUN_FILE
            try:
                found[run] = msgspec.json.decode(file.read_bytes(), type=RunRecord)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise UserError(f"{file}: cannot be read: {error.strerror}") from error
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{file}: {error}; move its folder away to repeat the run") from error
        return found

    def next_attempt(self, run: PlannedRun) -> int:
        """The number of the run's next attempt, from 1."""
        pattern = re.compile(re.escape(run.name) + r"-(\d+)")
        names = [path.name for path in (self.path / LOST).glob(f"{run.name}-*")]
        return 1 + max((int(match[1]) for name in names if (match := pattern.fullmatch(name))), default=0)

    def new_record(self, run: PlannedRun, attempt: int, **values: Any) -> RunRecord:
        """A record of a run that is not verified, unless `values` say otherwise."""
        known = {"set": run.set, "policy": run.policy, "seed": run.seed, "attempt": attempt}
        unverified = {"requests": self.definition.requests, "verified": False, "audit_clean": False}
        return RunRecord(**{**known, **unverified, **values})

    def set_aside(self, run: PlannedRun, record: RunRecord) -> Path:
        """Set a run aside in lost/, so that it can be repeated. Returns its new folder."""
        (self.path / LOST).mkdir(exist_ok=True)
        place = self.path / LOST / f"{run.name}-{record.attempt}"
        self.run_folder(run).rename(place)
        write_json(place / RUN_FILE, record)
        return place

    def set_aside_interrupted(self, runs: Sequence[PlannedRun]) -> list[str]:
        """Set the interrupted runs aside; returns their names. No other command may be using this folder."""
        names = []
        for run in runs:
            if self.run_folder(run).exists() and not (self.run_folder(run) / RUN_FILE).exists():
                self.set_aside(run, self.new_record(run, self.next_attempt(run), reason="interrupted"))
                names.append(run.name)
            # A command may have been killed after it moved the run and before it wrote the record.
            for place in (self.path / LOST).glob(f"{run.name}-*"):
                number = place.name.removeprefix(f"{run.name}-")
                if number.isdecimal() and not (place / RUN_FILE).exists():
                    write_json(place / RUN_FILE, self.new_record(run, int(number), reason="interrupted"))
        return names

    def set_aside_unclean(self, runs: Sequence[PlannedRun]) -> None:
        """Set aside the runs that were kept although they are not clean."""
        for run, record in self.records(runs).items():
            if not record.clean:
                self.set_aside(run, record)

    def check_workloads(self, runs: Sequence[PlannedRun], texts: Mapping[tuple[str, int], str]) -> None:
        """Raises UserError if an existing run had other jobs than its set has now, because policies can only
        be compared on the same jobs. `texts` are workload files by set and seed; other sets are not
        checked."""
        for run in runs:
            file, text = self.run_folder(run) / WORKLOAD_FILE, texts.get((run.set, run.seed))
            if text is not None and file.exists() and file.read_text(encoding="utf-8") != text:
                raise UserError(
                    f"{file}: the set or the profiles have changed since this run; move {self.path} away, or "
                    "give the definition another name"
                )

    def record_conditions(self, config: Config) -> None:
        """Write the conditions of the runs to experiment.json; `config` is the experiment's. Raises UserError
        if the existing runs were made under other conditions, because they could not be compared."""
        file = self.path / EXPERIMENT_FILE
        now = run_conditions(self.definition, config)
        date = datetime.now().astimezone().isoformat(timespec="seconds")
        try:
            former = msgspec.json.decode(file.read_bytes())
            differences = _differences(former["conditions"], now)
            date = former["date"]
        except FileNotFoundError:
            differences = []
        except (
            OSError,
            msgspec.DecodeError,
            UnicodeDecodeError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise UserError(f"{file}: was not written by an experiment: {error!r}") from error
        if differences:
            raise UserError(
                f"{self.path}: its runs were made under other conditions: {'; '.join(differences)}; "
                "move the folder away, or give the definition another name"
            )
        content = {
            "name": self.definition.name,
            "date": date,
            "machine": now["machine"],
            "versions": now["versions"],
            "definition": msgspec.to_builtins(self.definition),
            "conditions": now,
        }
        write_json(file, content)

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Within the block no other command can use the folder. Raises UserError if one does."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK_FILE).open("wb")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be used: {error.strerror}") from error
        with lock:
            try:  # the system releases the lock of a process however it ends: no claim outlives its owner
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"{self.path}: another command is at work on this experiment") from error
            yield

    def leftovers(self) -> list[psutil.Process]:
        """Running processes of stacks that write into this folder."""
        return processes_with(f"{PREFIX}RUN_LOGS_DIR", str(self.path), str(self.path / ISOLATED))

    def end_leftovers(self) -> int:
        """End the processes that a killed command has left running; returns their number. Raises UserError if
        some cannot be ended."""
        count = len(self.leftovers())
        stop_processes(self.leftovers)
        if left := self.leftovers():
            pids = " ".join(str(process.pid) for process in left)
            raise UserError(f"{self.path}: stacks of a killed experiment cannot be ended: kill {pids}")
        return count


def run_conditions(definition: Definition, config: Config) -> dict[str, Any]:
    """What all runs of an experiment must have in common, as plain JSON values."""
    sections, defined = (msgspec.json.decode(msgspec.json.encode(part)) for part in (config, definition))
    for section, key in (("scheduler", "policy"), ("collector", "memory"), ("collector", "memory_file")):
        del sections[section][key]  # each run has its own
    return {
        **{key: defined[key] for key in FIXED_KEYS},
        **{section: sections[section] for section in FIXED_SECTIONS},
        "guard": {key: getattr(definition.guard, key) for key in FIXED_BOUNDS},
        "machine": _machine(),
        "code": code_digest(),
        "versions": {
            "coadapt": __version__,
            "python": platform.python_version(),
            "torch": version("torch"),
        },
    }


def code_digest(root: Path = ROOT) -> str:
    """A digest of the names and contents of the code files: it distinguishes programs of the same version."""
    digest = hashlib.sha256()
    files = (path for package in CODE for path in (root / package).rglob("*.py") if path.is_file())
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return f"sha256:{digest.hexdigest()[:16]}"


def _machine() -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _differences(former: dict[str, Any], now: dict[str, Any], where: str = "") -> list[str]:
    found = []
    for key in dict.fromkeys([*former, *now]):
        old, new = former.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{where}{key}.")
        elif old != new:
            found.append(f"{where}{key} was {old}, is {new}")
    return found


def write_json(file: Path, value: object) -> None:
    write_atomically(file, msgspec.json.format(msgspec.json.encode(value)) + b"\n")
