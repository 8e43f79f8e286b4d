from typing import get_args

import msgspec

from analysis.log.schemas import PARTS, TABLES
from common.protocol import Event, RoundDecided
from common.types import GradientStatistics, JobConfig, JobSpec, Node, ThroughputParameters


def test_every_type_of_event_has_one_table() -> None:
    types = [kind for table in TABLES.values() for kind in table.types]
    assert len(types) == len(set(types))
    assert set(types) == set(get_args(Event))


def test_every_field_of_every_event_has_a_column() -> None:
    nested = {
        "node": Node,
        "spec": JobSpec,
        "config": JobConfig,
        "parameters": ThroughputParameters,
        "statistics": GradientStatistics,
    }
    for table in TABLES.values():
        paths = {column.path or name for name, column in table.columns.items()}
        heads = {path.partition(".")[0] for path in paths}
        for kind in table.types:
            names = {field.name for field in msgspec.structs.fields(kind)}
            if kind is RoundDecided:
                names -= {"allocations", "configs", "reasons"}
                assert {"replicas", "atomic_batch", "reason"} <= set(PARTS["decisions"].columns)
            assert names <= heads, kind
    for head, struct in nested.items():
        columns = [
            name
            for table in TABLES.values()
            for name, column in table.columns.items()
            if (column.path or name).partition(".")[0] == head
        ]
        named = {"name": "node", "id": "job_id"}
        fields = {named.get(field.name, field.name) for field in msgspec.structs.fields(struct)}
        assert fields <= set(columns), head


def test_every_column_has_a_meaning() -> None:
    assert all(column.meaning for table in (TABLES | PARTS).values() for column in table.columns.values())
