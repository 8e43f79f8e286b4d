"""Encoding and decoding: msgpack bytes <-> the structs of `common/protocol.py`.

Decoding has two steps: `unpack` turns bytes into plain values and enforces the limits, `convert` makes the
struct and enforces the schema. Whatever bytes arrive, the only exception is DecodeError.
"""

from typing import Any, TypeVar, overload

import msgpack
import msgspec

from common.config import LimitsConfig
from common.types import Struct

T = TypeVar("T")
LIMITS = LimitsConfig()
MAX_ERROR_CHARS = 300
_CONTAINERS = frozenset((dict, list))


class DecodeError(ValueError):
    """The bytes are not the expected message; `str()` is one printable line for people."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


def printable(text: str, max_chars: int = MAX_ERROR_CHARS) -> str:
    """`text` as one line without control characters, shortened to `max_chars`."""
    short = text if len(text) <= max_chars else text[: max_chars - 3] + "..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)


def encode(message: Struct) -> bytes:
    """msgpack of a message. Fields keep the order of their declaration, so equal messages are equal bytes."""
    return msgspec.msgpack.encode(message)


@overload
def decode(data: bytes, kind: type[T], limits: LimitsConfig = LIMITS) -> T: ...
@overload
def decode(data: bytes, kind: Any, limits: LimitsConfig = LIMITS) -> Any: ...
def decode(data: bytes, kind: Any, limits: LimitsConfig = LIMITS) -> Any:
    """The message of type `kind`, a struct or a tagged union of structs.

    Raises DecodeError if the bytes exceed `limits`, are not msgpack, or do not match the schema. Floats may
    be infinite or NaN: the codec does not decide which fields allow that.
    """
    return convert(unpack(data, limits), kind)


def convert(value: Any, kind: Any) -> Any:
    """Make the struct `kind` of plain values. Raises DecodeError, which names the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise DecodeError(str(error)) from error
    except RecursionError as error:
        raise DecodeError("nested too deeply") from error


def unpack(data: bytes, limits: LimitsConfig = LIMITS) -> Any:
    """Plain values (dict, list, str, bytes, int, float, bool, None) from msgpack bytes.

    Raises DecodeError beyond `limits`: bytes of the whole message, keys of one map, nesting of lists and
    maps. Also refused are extension types, and maps whose keys are not strings.
    """
    if len(data) > limits.message_bytes:
        raise DecodeError(f"message of {len(data)} bytes; at most {limits.message_bytes} are allowed")
    try:
        value = msgpack.unpackb(data, strict_map_key=True, max_map_len=limits.map_keys, max_ext_len=0)
    except msgpack.StackError as error:
        raise DecodeError(f"nested too deeply; at most {limits.depth} levels are allowed") from error
    except (ValueError, msgpack.UnpackException) as error:
        raise DecodeError(f"not msgpack: {str(error) or type(error).__name__}") from error
    if _deeper_than(value, limits.depth):
        raise DecodeError(f"nested too deeply; at most {limits.depth} levels are allowed")
    return value


def _deeper_than(value: Any, depth: int) -> bool:
    """Whether lists and maps are nested more than `depth` levels deep. Without recursion: the input may be
    nested deeper than the stack allows."""
    level = [value] if type(value) in _CONTAINERS else []
    while level and depth:
        depth -= 1
        nested: list[Any] = []
        for container in level:
            children = container.values() if type(container) is dict else container
            nested += [child for child in children if type(child) in _CONTAINERS]
        level = nested
    return bool(level)
