"""golden_messages.json has the bytes of every message, so that a change of the protocol shows there.

After a change that is meant (a new message, a new field with a default), write the file anew with

    python -m tests.common.test_protocol

and review its difference: a line that changed without being meant breaks older logs and peers.
"""

import enum
import inspect
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from common import protocol
from common.codec import DecodeError, decode, encode
from common.types import Struct

GOLDEN_FILE = Path(__file__).with_name("golden_messages.json")
UNIONS = {
    "Fact": protocol.Fact,
    "Event": protocol.Event,
    "Request": protocol.Request,
    "Reply": protocol.Reply,
    "ReplicaMessage": protocol.ReplicaMessage,
    "CoreInput": protocol.CoreInput,
}


def declared() -> dict[str, type[Struct]]:
    """Every struct that protocol.py declares, except the tagged base."""
    return {
        name: kind
        for name, kind in vars(protocol).items()
        if inspect.isclass(kind)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == protocol.__name__
        and kind is not protocol.Message
    }


def example(kind: Any, name: str) -> Any:
    """A value of the type, derived only from the declaration; no field keeps its default."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        value = example(arguments[0], name)
        limits = [meta.le for meta in arguments[1:] if meta.le is not None]
        return type(value)(min(value, *limits)) if limits else value
    if origin is Literal:
        return arguments[0]
    if origin is types.UnionType or origin is typing.Union:
        return example(arguments[0], name)
    if origin is tuple:
        return (example(arguments[0], name),)
    if origin is dict:
        return {name: example(arguments[1], name)}
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        return kind(**{field.name: example(field.type, field.name) for field in msgspec.structs.fields(kind)})
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    return {str: name, bool: True, int: len(name), float: len(name) + 0.25}[kind]


def examples() -> dict[str, Struct]:
    return {name: example(kind, name) for name, kind in sorted(declared().items())}


def golden() -> dict[str, str]:
    return json.loads(GOLDEN_FILE.read_text())


def test_every_struct_of_the_protocol_has_golden_bytes():
    assert sorted(golden()) == sorted(declared())


def test_every_message_is_in_a_union_or_listed_as_sent_alone():
    members = {kind.__name__ for union in UNIONS.values() for kind in typing.get_args(union)}
    frames = {"EventRecord", "RequestFrame", "ReplyFrame", "JournalEntry"}
    pipe = {"ReplicaStart", "VerifyStart", "ReplicaOrder"}
    parts = {"JobOrder", "VerifyOrder", "JobRow"}
    assert set(declared()) == members | frames | pipe | parts


@pytest.mark.parametrize("name", sorted(declared()))
def test_a_message_has_its_golden_bytes_and_comes_back_from_them(name):
    message, data = examples()[name], bytes.fromhex(golden()[name])
    assert encode(message) == data
    assert decode(data, declared()[name]) == message


@pytest.mark.parametrize("union", sorted(UNIONS))
def test_a_union_knows_its_members_by_their_bytes(union):
    for kind in typing.get_args(UNIONS[union]):
        message = examples()[kind.__name__]
        assert decode(encode(message), UNIONS[union]) == message


def test_an_undeclared_field_is_refused():
    data = msgspec.msgpack.encode({"type": "JobCancelled", "job_id": "a", "colour": "red"})
    with pytest.raises(DecodeError, match="colour"):
        decode(data, protocol.Event)


def test_a_message_of_another_direction_is_refused():
    with pytest.raises(DecodeError, match="JobCancelled"):
        decode(encode(protocol.JobCancelled(job_id="a")), protocol.Request)


if __name__ == "__main__":
    GOLDEN_FILE.write_text(json.dumps({n: encode(m).hex() for n, m in examples().items()}, indent=1) + "\n")
