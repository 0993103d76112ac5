"""Buffers that are not zeroed: as long as asked for, and usable as any other bytearray."""

from __future__ import annotations

import pytest

from laminar.unzeroed import new_bytearray


@pytest.mark.parametrize("size", [0, 1, (32 << 10) - 1, 32 << 10, 5 << 20])
def test_a_buffer_has_the_size_and_keeps_what_is_written(size: int) -> None:
    made = new_bytearray(size)
    view = memoryview(made)
    view[:] = b"x" * size

    assert (type(made), bytes(made)) == (bytearray, b"x" * size)
    assert view.readonly is False


def test_two_buffers_share_no_memory() -> None:
    """Also if the first was released before: each belongs to who made it."""
    first, second = new_bytearray(1 << 20), new_bytearray(1 << 20)
    first[:] = b"a" * (1 << 20)
    second[:] = b"b" * (1 << 20)

    assert bytes(first) == b"a" * (1 << 20)
