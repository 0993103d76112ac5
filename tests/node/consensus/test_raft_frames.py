"""Frames of Raft messages: what was sent is what arrives; what does not add up is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.node.consensus.raft_frames import bulk_frame, control_frame, read_frame
from raft.messages import Append, Heartbeat

IDENTITY = {"cluster": b"c" * 16, "group": b"g" * 16, "sender": 1, "receiver": 2, "incarnation": 1, "term": 3}


def append(entries: int) -> Append:
    return Append(**IDENTITY, prev_index=4, prev_term=2, commit=3, entry_count=entries)  # type: ignore[arg-type]


def joined(parts: list[bytes | bytearray | memoryview]) -> memoryview:
    return memoryview(b"".join(parts))


def test_control_messages_arrive_as_sent() -> None:
    """Small messages travel as one list."""
    beats = [Heartbeat(**IDENTITY, commit=n, round=n) for n in range(3)]  # type: ignore[arg-type]

    assert [(beat, []) for beat in beats] == read_frame(joined(control_frame(beats)))


@given(st.lists(st.lists(st.binary(max_size=300), max_size=4), min_size=1, max_size=4))
def test_batches_arrive_with_their_message(batches: list[list[bytes]]) -> None:
    """Each append has its own frames behind it, byte for byte."""
    sent = [(append(len(frames)), frames) for frames in batches]

    received = read_frame(joined(bulk_frame(sent)))

    assert sent == [(message, [bytes(frame) for frame in frames]) for message, frames in received]


@pytest.mark.parametrize("cut", [1, 7, 40, 299, 301, 330, 360, 10_000])
def test_a_frame_that_was_cut_is_an_error(cut: int) -> None:
    """Nothing is guessed from a part of a frame."""
    whole = joined(bulk_frame([(append(1), [b"x" * 300])]))

    with pytest.raises(ValueError, match=r".+"):
        read_frame(whole[: max(0, len(whole) - cut)])


def test_bytes_behind_a_frame_are_an_error() -> None:
    """A frame says how long it is."""
    with pytest.raises(ValueError, match="says it has"):
        read_frame(memoryview(bytes(joined(bulk_frame([(append(1), [b"x"])]))) + b"!"))
