"""Batches that are appended once more: each record has the time that its readers saw, and all else stays."""

from __future__ import annotations

import pytest

from laminar.batch import Batch, build
from laminar.batch.columns import Codec, Column, unfold
from laminar.batch.dated import dated
from laminar.batch.header import stamp, verify

APPENDED_MS = 1_700_000_000_000


def stamped(frame: bytearray) -> bytearray:
    stamp(frame, index=9, term=2, prev_term=1, base_offset=700, append_time_ms=APPENDED_MS, committed_index=8)
    return frame


@pytest.mark.parametrize("times", [None, [None, 5, None], [1, 2, 3]])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_each_record_has_a_time_and_nothing_else_is_another(
    times: list[int | None] | None, codec: Codec
) -> None:
    frame = stamped(
        build(
            [b"same " * 300, b"", b"c"],
            keys=[b"k", None, b""],
            timestamps=times,
            tags=["t", None, "ü"],
            headers=[None, {"h": b"\0"}, {}],
            trace_ids=[bytes(16), None, b"t" * 16],
            codec=codec,
        )
    )
    before = Batch(frame)

    found = dated(frame)

    verify(found)
    after = Batch(found)
    assert [each if each is not None else APPENDED_MS for each in times or [None] * 3] == after.timestamps
    assert after.given_timestamps == after.timestamps
    for name in ("values", "keys", "tags", "headers", "trace_ids", "delivery_times"):
        assert getattr(before, name) == getattr(after, name)
    assert (before.header.base_offset, before.header.count) == (after.header.base_offset, after.header.count)
    entry, kept = before.directory()[Column.VALUE], after.directory()[Column.VALUE]
    assert (entry.codec, entry.stored_length) == (kept.codec, kept.stored_length)
    assert bytes(unfold(frame, entry)) == bytes(unfold(found, kept))
    assert found == dated(found)
