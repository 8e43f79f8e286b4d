"""Workload files: which jobs are submitted, and when.

A workload file is TOML: `name`, `seed`, and one `[[job]]` table per job. Only `application` is required. The
application provides what a job leaves out:

    name = "two-jobs"
    seed = 1

    [[job]]
    application = "digits-cnn"
    at_s = 0.0          # seconds after the start of the workload
    replicas = 2
    settings = { learning_rate = 0.1 }

Only `check_spec` decides whether a job is acceptable: clients call it before they submit a job, and the
scheduler calls it again.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common.codec import printable
from common.lifecycle import UserError
from common.types import (
    MAX_NAME_CHARS,
    NAME_PATTERN,
    ApplicationSpec,
    JobSpec,
    Struct,
    batch_config,
    can_share,
)

MAX_SEED = 2**31 - 1
MAX_PROGRESS = 1e9
MAX_TIME_S = 1e9
"""The latest arrival. Far beyond it, floating-point clocks could no longer separate one step from the
next."""
MAX_SHOWN_CHARS = 80

Table = TypeVar("Table", bound=Struct)


class WorkloadError(UserError):
    """A workload or a job cannot be used. The text is one line: where, which value, what is allowed."""


class JobFields(Struct, frozen=True):
    """The fields that a user may set, in a row of a workload file or in a request. None: the application
    decides."""

    application: str
    id: str | None = None
    at_s: float = 0.0
    seed: int | None = None
    target: float | None = None
    max_progress: float | None = None
    replicas: int = 1
    batch_size: int | None = None
    min_batch_size: int | None = None
    max_batch_size: int | None = None
    min_atomic_batch: int | None = None
    max_atomic_batch: int | None = None
    max_replicas: int | None = None
    settings: dict[str, float] = msgspec.field(default_factory=dict)


class Arrival(Struct, frozen=True):
    """A job and its time of submission, in seconds after the start of the workload."""

    at_s: float
    spec: JobSpec


class Workload(Struct, frozen=True):
    """A named list of jobs; `rows` are in order of arrival."""

    name: str
    seed: int
    rows: tuple[Arrival, ...]


class WorkloadTables(Struct, frozen=True):
    name: str | None = None
    seed: int = 0
    job: list[dict[str, Any]] = msgspec.field(default_factory=list)


def read_workload(
    path: Path, applications: Mapping[str, ApplicationSpec], slots: int | None = None
) -> Workload:
    """Read a workload file, complete and check every job. `slots` is the size of the cluster; None: unknown.

    Raises WorkloadError naming the file, the job (from 1), the field, its value and what is allowed.
    """
    file = _read_file(path)
    name = path.stem if file.name is None else file.name
    problems = name_problems("name", name) + _range_problems("seed", file.seed, 0, MAX_SEED)
    if not file.job:
        problems.append("no [[job]] in it; a workload needs at least one")
    if problems:
        raise WorkloadError(f"{path}: {'; '.join(problems)}")
    rows: list[Arrival] = []
    row_of_id: dict[str, int] = {}
    for number, row in enumerate(file.job, start=1):
        try:
            arrival = _arrival(row, number, file.seed, applications, slots)
            first = row_of_id.setdefault(arrival.spec.id, number)
            if first != number and rows[first - 1].spec != arrival.spec:
                raise WorkloadError(f"id {arrival.spec.id!r}: used by job {first} with another specification")
        except WorkloadError as error:
            raise WorkloadError(f"{path}: job {number}: {error}") from error
        rows.append(arrival)
    return Workload(name=name, seed=file.seed, rows=tuple(sorted(rows, key=lambda row: row.at_s)))


def single_job(
    fields: Mapping[str, Any],
    default_id: str,
    applications: Mapping[str, ApplicationSpec],
    slots: int | None = None,
) -> Workload:
    """A workload of one job that arrives at once; `fields` are those of JobFields. Raises WorkloadError."""
    row = {"id": default_id, **fields}
    return Workload(name=default_id, seed=0, rows=(_arrival(row, 0, 0, applications, slots),))


def complete_spec(
    fields: JobFields, applications: Mapping[str, ApplicationSpec], default_id: str, default_seed: int
) -> JobSpec:
    """The job with the defaults of its application filled in, but not checked.

    A job that requests no batch size gets M0, or the smallest batch that its replicas can share. Raises
    WorkloadError for an unknown application.
    """
    application = applications.get(fields.application)
    if application is None:
        raise WorkloadError(_unknown_application(fields.application, applications))
    given = {key: value for key, value in msgspec.structs.asdict(fields).items() if value is not None}
    del given["at_s"]
    values: dict[str, Any] = {
        "id": default_id,
        "seed": default_seed,
        "target": application.target,
        "max_progress": application.max_progress,
        "min_batch_size": application.initial_batch_size,
        "max_batch_size": application.max_batch_size,
        "min_atomic_batch": application.min_atomic_batch,
        "max_atomic_batch": application.max_atomic_batch,
        **given,
    }
    values.setdefault(
        "batch_size", max(values["min_batch_size"], fields.replicas * values["min_atomic_batch"])
    )
    values.setdefault("max_replicas", values["max_batch_size"] // max(values["min_atomic_batch"], 1))
    return JobSpec(**values)


def check_spec(
    spec: JobSpec, applications: Mapping[str, ApplicationSpec], slots: int | None = None
) -> list[str]:
    """All problems of a job, each with field, value and what is allowed. Empty: the job is acceptable.

    `slots` is the size of the cluster; None: unknown.
    """
    problems = name_problems("id", spec.id)
    application = applications.get(spec.application)
    if application is None:
        return [*problems, _unknown_application(spec.application, applications)]
    problems += _range_problems("seed", spec.seed, 0, MAX_SEED)
    problems += _range_problems("target", spec.target, application.target_min, application.target_max)
    if not 0 < spec.max_progress <= MAX_PROGRESS:
        problems.append(f"max_progress {spec.max_progress}: allowed: above 0, at most {MAX_PROGRESS:g}")
    problems += _settings_problems(spec.settings, application)
    bounds = _bounds_problems(spec, application)
    return problems + (bounds or _request_problems(spec, slots))


def shown(value: object) -> str:
    """The value in a form that a user can search for: quoted, without control characters, shortened."""
    return printable(repr(value), MAX_SHOWN_CHARS)


def _read_file(path: Path) -> WorkloadTables:
    try:
        table = msgspec.toml.decode(path.read_bytes())
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WorkloadError(f"{path}: not valid TOML: {error}") from error
    try:
        return _convert(table, WorkloadTables)
    except WorkloadError as error:
        raise WorkloadError(f"{path}: {error}") from error


def _convert(table: dict[str, Any], kind: type[Table]) -> Table:
    """Convert a table to a struct field by field, so that an error can name the field and the value."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    values = {}
    for key, value in table.items():
        if key not in fields:
            raise WorkloadError(f"{shown(key)}: no such key; allowed: {', '.join(fields)}")
        try:
            values[key] = msgspec.convert(value, fields[key].type)
        except msgspec.ValidationError as error:
            raise WorkloadError(f"{key} {shown(value)}: {error}") from error
    for field in fields.values():
        if field.required and field.name not in values:
            raise WorkloadError(f"{field.name}: missing; it is required")
    return kind(**values)


def _arrival(
    row: dict[str, Any],
    number: int,
    workload_seed: int,
    applications: Mapping[str, ApplicationSpec],
    slots: int | None,
) -> Arrival:
    fields = _convert(row, JobFields)
    spec = complete_spec(
        fields,
        applications,
        default_id=f"{fields.application}-{number}",
        default_seed=(workload_seed + number) % (MAX_SEED + 1),
    )
    problems = check_spec(spec, applications, slots)
    problems += _range_problems("at_s", fields.at_s, 0, MAX_TIME_S)
    if problems:
        raise WorkloadError("; ".join(problems))
    return Arrival(at_s=fields.at_s, spec=spec)


def name_problems(field: str, name: str) -> list[str]:
    if len(name) <= MAX_NAME_CHARS and NAME_PATTERN.fullmatch(name) and ".." not in name:
        return []
    return [
        f"{field} {shown(name)}: allowed: 1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 _ . -, "
        "a letter or digit first and last, no '..'"
    ]


def _range_problems(field: str, value: float, low: float, high: float) -> list[str]:
    """The problem of a value outside low..high, if any. NaN is outside."""
    return [] if low <= value <= high else [f"{field} {shown(value)}: allowed: {_range(low, high)}"]


def _range(low: float, high: float) -> str:
    return f"{low:.12g}" if low == high else f"{low:.12g} to {high:.12g}"


def _unknown_application(name: str, applications: Mapping[str, ApplicationSpec]) -> str:
    return f"application {shown(name)}: no such application; allowed: {', '.join(sorted(applications))}"


def _settings_problems(settings: Mapping[str, float], application: ApplicationSpec) -> list[str]:
    problems = []
    for key, value in settings.items():
        if key not in application.settings:
            allowed = ", ".join(sorted(application.settings)) or "none"
            problems.append(
                f"settings: {shown(key)}: no such setting of {application.name}; allowed: {allowed}"
            )
        elif not math.isfinite(value):
            problems.append(f"settings: {key} {value}: allowed: finite numbers")
    return problems


def _bounds_problems(spec: JobSpec, application: ApplicationSpec) -> list[str]:
    """Problems of the bounds within which a policy may choose."""
    problems = _range_problems(
        "min_batch_size", spec.min_batch_size, application.initial_batch_size, application.max_batch_size
    )
    problems += _range_problems(
        "max_batch_size", spec.max_batch_size, spec.min_batch_size, application.max_batch_size
    )
    problems += _range_problems(
        "min_atomic_batch", spec.min_atomic_batch, application.min_atomic_batch, application.max_atomic_batch
    )
    problems += _range_problems(
        "max_atomic_batch", spec.max_atomic_batch, spec.min_atomic_batch, application.max_atomic_batch
    )
    if not problems and not can_share(1, spec):
        problems.append(
            f"min_batch_size {spec.min_batch_size} to max_batch_size {spec.max_batch_size}: no number of "
            f"replicas meets this with {spec.min_atomic_batch} to {spec.max_atomic_batch} examples a pass"
        )
    return problems


def _request_problems(spec: JobSpec, slots: int | None) -> list[str]:
    """Problems of the requested replicas and batch size, given valid bounds."""
    problems = _range_problems(
        "max_replicas", spec.max_replicas, 1, spec.max_batch_size // spec.min_atomic_batch
    )
    problems += _range_problems("replicas", spec.replicas, 1, max(spec.max_replicas, 1))
    if slots is not None and spec.replicas > slots:
        problems.append(f"replicas {spec.replicas}: allowed: at most {slots}, the slots of the cluster")
    problems += _range_problems("batch_size", spec.batch_size, spec.min_batch_size, spec.max_batch_size)
    if problems:
        return problems
    if not can_share(spec.replicas, spec) or not _fits_request(spec):
        problems.append(
            f"batch_size {spec.batch_size}: {spec.replicas} replicas cannot share it with "
            f"{spec.min_atomic_batch} to {spec.max_atomic_batch} examples a pass and a total of "
            f"{spec.min_batch_size} to {spec.max_batch_size}"
        )
    return problems


def _fits_request(spec: JobSpec) -> bool:
    """Whether the requested replicas can train with the requested batch, except for rounding to equal
    passes."""
    config = batch_config(spec.batch_size, spec.replicas, spec)
    rounding = spec.replicas * (config.accumulation + 1)
    return abs(config.total_batch(spec.replicas) - spec.batch_size) < rounding
