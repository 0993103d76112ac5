"""The wire form of messages: whole, cut short, and with trailing bytes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raft import AnyMessage, ProtocolError, decode, encode
from raft.messages import (
    NUMBER_LIMIT,
    Append,
    AppendAnswer,
    Heartbeat,
    HeartbeatAnswer,
    PreVote,
    PreVoteAnswer,
    TimeoutNow,
    Vote,
    VoteAnswer,
)

KINDS: list[type[AnyMessage]] = [
    Append,
    AppendAnswer,
    Heartbeat,
    HeartbeatAnswer,
    PreVote,
    PreVoteAnswer,
    TimeoutNow,
    Vote,
    VoteAnswer,
]
NUMBERS = st.integers(0, NUMBER_LIMIT - 1)


@st.composite
def messages(draw: st.DrawFn) -> AnyMessage:
    kind = draw(st.sampled_from(KINDS))
    fields = {
        field.name: draw(
            st.binary(min_size=16, max_size=16)
            if field.type is bytes
            else st.booleans()
            if field.type is bool
            else NUMBERS
        )
        for field in msgspec.structs.fields(kind)
    }
    make: Callable[..., AnyMessage] = kind
    return make(**fields)


@pytest.mark.parametrize("field", ["sender", "incarnation", "term", "commit", "round", "held_term"])
@pytest.mark.parametrize("number", [NUMBER_LIMIT, 2**64 - 1, -1])
def test_a_number_out_of_range_is_no_message(field: str, number: int) -> None:
    """One that is counted up from there fits neither the wire nor the disk."""
    honest = Heartbeat(b"c" * 16, b"g" * 16, 1, 2, 0, 1, 0, 1)

    with pytest.raises(ProtocolError):
        decode(encode([msgspec.structs.replace(honest, **{field: number})]))


@given(st.lists(messages(), max_size=5))
def test_what_is_encoded_is_decoded(batch: list[AnyMessage]) -> None:
    """Every field of every message survives, up to the limit of numbers."""
    assert batch == decode(encode(batch))


@given(st.lists(messages(), min_size=1, max_size=2), st.data())
def test_a_payload_cut_short_or_too_long_is_refused(batch: list[AnyMessage], data: st.DataObject) -> None:
    """No prefix is a list of messages, and nothing may follow one."""
    payload = encode(batch)
    cut = data.draw(st.integers(0, len(payload) - 1))

    with pytest.raises(ProtocolError):
        decode(payload[:cut])
    with pytest.raises(ProtocolError):
        decode(payload + b"\x00")


@given(st.binary(max_size=64))
def test_garbage_is_refused_or_is_a_list_of_messages(payload: bytes) -> None:
    """Whatever arrives, the decoder either returns messages or raises `ProtocolError`."""
    try:
        batch = decode(payload)
    except ProtocolError:
        return
    assert all(isinstance(message, tuple(KINDS)) for message in batch)


def test_a_negative_number_is_no_message() -> None:
    """Indexes and terms start at 0."""
    message = HeartbeatAnswer(b"c" * 16, b"g" * 16, 1, 2, 0, 3, -1)

    with pytest.raises(ProtocolError):
        decode(encode([message]))


def test_fields_added_by_a_later_version_are_ignored() -> None:
    """Fields are added last, so an older reader steps over them."""
    newer = msgspec.msgpack.encode([[8, b"c" * 16, b"g" * 16, 1, 2, 0, 3, 4, False, 5, "new"]])

    assert [HeartbeatAnswer(b"c" * 16, b"g" * 16, 1, 2, 0, 3, 4, False, 5)] == decode(newer)


def test_the_wire_form_is_fixed() -> None:
    """A golden vector: another version of us must read what this one writes."""
    message = AppendAnswer(b"C" * 2, b"G" * 2, 1, 2, 3, 4, 5, True, 6, 7, 8)

    header, own = "919c06" + "c4024343" + "c4024747" + "01020304", "05c3060708"
    assert encode([message]).hex() == header + own
