"""Bytes from outside become a message or a DecodeError, nothing else."""

from contextlib import suppress

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.codec import DecodeError, decode, encode, printable, unpack
from common.config import LimitsConfig
from common.protocol import (
    Event,
    EventRecord,
    GetJobs,
    JobCancelled,
    JobRaised,
    ReplicaMessage,
    Request,
    RequestFrame,
    SubmitJob,
    TrainingSample,
)
from common.types import JobConfig
from tests.fixtures.specifications import make_job

SPEC = make_job(settings={"rate": 0.1})
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def nested(levels: int) -> bytes:
    return b"\x91" * (levels - 1) + b"\x90"


def test_a_message_comes_back_equal():
    frame = RequestFrame(id="x-1", request=SubmitJob(spec=SPEC))
    assert decode(encode(frame), RequestFrame) == frame


def test_a_message_comes_back_from_a_union():
    assert decode(encode(GetJobs()), Request) == GetJobs()
    raised = JobRaised(job_id="a", generation=1, reason="NaN")
    assert decode(encode(raised), ReplicaMessage) == raised


def test_equal_messages_are_equal_bytes():
    assert encode(SPEC) == encode(msgspec.structs.replace(SPEC))


def test_floats_that_are_not_finite_survive():
    sample = decode(encode(sample_with_loss(float("nan"))), Event)
    assert isinstance(sample, TrainingSample)
    assert sample.loss != sample.loss


def test_more_bytes_than_allowed_are_refused_before_they_are_read():
    with pytest.raises(DecodeError, match="11 bytes; at most 10"):
        unpack(b"\xc1" * 11, LimitsConfig(message_bytes=10))


def test_nesting_is_allowed_up_to_the_limit_and_refused_beyond():
    limits = LimitsConfig(depth=5)
    assert unpack(nested(5), limits) == [[[[[]]]]]
    with pytest.raises(DecodeError, match="at most 5 levels"):
        unpack(nested(6), limits)


def test_nesting_that_would_exhaust_a_stack_is_refused():
    with pytest.raises(DecodeError, match="nested too deeply"):
        unpack(nested(500_000))


def test_a_map_with_more_keys_than_allowed_is_refused():
    data = msgpack.packb({str(i): i for i in range(11)})
    with pytest.raises(DecodeError, match="10"):
        unpack(data, LimitsConfig(map_keys=10))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x92\x01",
        b"\x01\x02",
        b"\xa1\xff",
        b"\x81\x90\x01",
        b"\x81\x01\x01",
        b"\xc1",
        b"\xd6\xff\x00\x00\x00\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
    ],
    ids=[
        "empty",
        "cut short",
        "two values",
        "text that is not UTF-8",
        "list as key",
        "number as key",
        "reserved byte",
        "extension type",
        "map that claims 4 billion keys",
        "list that claims 4 billion items",
    ],
)
def test_bytes_that_are_not_plain_msgpack_are_refused(data):
    with pytest.raises(DecodeError):
        unpack(data)


def test_an_error_names_the_field_and_its_place():
    data = msgspec.msgpack.encode({"id": "x", "request": {"type": "CancelJob", "job_id": 7}})
    with pytest.raises(DecodeError, match=r"Expected `str`, got `int` - at `\$\.request\.job_id`"):
        decode(data, RequestFrame)


def test_an_error_is_one_short_printable_line_whatever_the_bytes_say():
    data = msgspec.msgpack.encode({"type": "a\n\x1b[31m" + "x" * 10_000})
    with pytest.raises(DecodeError) as caught:
        decode(data, Request)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_printable_keeps_letters_and_spells_control_characters():
    assert printable("größe\n") == "größe\\n"
    assert printable("x" * 20, max_chars=10) == "xxxxxxx..."


@given(st.binary(max_size=200))
def test_random_bytes_become_a_message_or_a_decode_error(data):
    for kind in (RequestFrame, EventRecord, Request, Event):
        with suppress(DecodeError):
            decode(data, kind)


@given(PLAIN)
def test_random_values_become_a_message_or_a_decode_error(value):
    for kind in (RequestFrame, EventRecord, Request, Event):
        with pytest.raises(DecodeError):
            decode(msgpack.packb(value), kind)


@given(st.data())
def test_a_message_with_one_byte_changed_becomes_a_message_or_a_decode_error(data):
    original = encode(RequestFrame(id="x-1", request=SubmitJob(spec=SPEC)))
    at = data.draw(st.integers(0, len(original) - 1))
    changed = original[:at] + bytes([data.draw(st.integers(0, 255))]) + original[at + 1 :]
    with suppress(DecodeError):
        assert isinstance(decode(changed, RequestFrame), RequestFrame)


@given(PLAIN, st.integers(1, 6))
def test_the_depth_limit_agrees_with_a_recursive_count(value, limit):
    def depth(part: object) -> int:
        children = part.values() if isinstance(part, dict) else part if isinstance(part, list) else None
        return 0 if children is None else 1 + max(map(depth, children), default=0)

    data = msgpack.packb(value)
    if depth(value) > limit:
        with pytest.raises(DecodeError):
            unpack(data, LimitsConfig(depth=limit))
    else:
        unpack(data, LimitsConfig(depth=limit))


def sample_with_loss(loss: float) -> TrainingSample:
    return TrainingSample(
        job_id="a",
        generation=1,
        nodes=1,
        replicas=1,
        config=JobConfig(atomic_batch=16),
        window_s=0.5,
        steps=5,
        timed_steps=5,
        accumulation_s=0.0,
        step_s=0.1,
        sync_s=0.0,
        total_steps=5,
        total_examples=80,
        progress=5.0,
        epoch=0,
        loss=loss,
        gain=1.0,
    )


def test_encoding_leaves_no_type_out_that_decoding_needs():
    assert msgpack.unpackb(encode(JobCancelled(job_id="a"))) == {"type": "JobCancelled", "job_id": "a"}
