"""The one writer of TOML: workload files, and the machine's file next to measured profiles.

Libraries that write TOML choose their own layout (tomli-w puts short tables on one line); workload files keep
theirs, because the published sets are compared byte for byte.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from msgspec import structs

from common.types import JobSpec
from workloads.files.workload_file import Workload

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def workload_text(workload: Workload, fields: Sequence[str] = ("at_s", *JobSpec.__struct_fields__)) -> str:
    """A workload file with these fields of every job. With all of them, it reads back as the same workload
    whatever the jobs set for themselves."""
    rows = [{"at_s": row.at_s, **structs.asdict(row.spec)} for row in workload.rows]
    jobs = [{field: row[field] for field in fields} for row in rows]
    return toml_text({"name": workload.name, "seed": workload.seed, "job": jobs})


def toml_text(document: Mapping[str, Any]) -> str:
    """The TOML text of a document: mappings become tables, sequences of mappings become arrays of tables.

    A mapping within an array's table is written inline. Values are strings, numbers, booleans, and mappings
    of these. In each table plain values come first, because TOML needs them there."""
    return "\n".join(_table("", document)) + "\n"


def _table(path: str, table: Mapping[str, Any]) -> Iterator[str]:
    plain = {
        key: value
        for key, value in table.items()
        if not isinstance(value, Mapping) and not _is_array_of_tables(value)
    }
    if path and plain:
        yield from ("", f"[{path}]")
    yield from map(_assignment, plain, plain.values())
    for key, value in table.items():
        inner_path = f"{path}.{_key(key)}" if path else _key(key)
        if isinstance(value, Mapping):
            yield from _table(inner_path, value)
        elif _is_array_of_tables(value):
            for row in value:
                yield from ("", f"[[{inner_path}]]", *map(_assignment, row, row.values()))


def _is_array_of_tables(value: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _assignment(key: str, value: Any) -> str:
    return f"{_key(key)} = {_value(value)}"


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(map(_assignment, value, value.values()))} }}" if value else "{}"
    if isinstance(value, float):
        return repr(value)  # TOML has "inf" and "nan", which JSON lacks
    return json.dumps(value, ensure_ascii=False)  # strings and booleans as JSON writes them
