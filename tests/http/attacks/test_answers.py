"""Small batches that are long answers: what is made of them at a time is bounded."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from laminar.batch import Codec, build, stamp
from laminar.http.api.fetch_body import FetchFormat, encode_fetch

MIB = 1 << 20


def stored(values: list[bytes], *, base_offset: int = 0) -> bytes:
    """A compressed batch as a log has it."""
    built = build(values, codec=Codec.ZSTD)
    stamp(
        built,
        index=base_offset + 1,
        term=1,
        prev_term=1,
        base_offset=base_offset,
        append_time_ms=0,
        committed_index=0,
    )
    return bytes(built)


def test_one_record_of_a_large_batch_unfolds_no_others_into_text() -> None:
    """`limit=1` of a batch of two records of 8 MiB, each six times as long in JSON: 8 KB stored."""
    frame = stored([b"\0" * (8 * MIB)] * 2)
    assert len(frame) < 16_384

    tracemalloc.start()
    found = encode_fetch(FetchFormat.JSON, [frame], offset=0, to=2, limit=1, tag=None, wanted="offset")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert 1 == found.next_offset
    assert {"records": [{"offset": 0}], "next_offset": 1} == json.loads(b"".join(map(bytes, found.body)))
    assert peak < 64 * MIB


@pytest.mark.parametrize("format_", [FetchFormat.JSON, FetchFormat.NDJSON, FetchFormat.ARROW])
def test_many_batches_are_answered_in_pieces(format_: FetchFormat) -> None:
    """Batches of 500 bytes, each a megabyte unfolded: a piece at a time, and none is left out."""
    frames = [stored([b"\0" * (MIB // 4)] * 4, base_offset=4 * place) for place in range(24)]
    assert sum(map(len, frames)) < 100_000
    offset, pieces = 0, 0

    tracemalloc.start()
    while offset < 96:
        found = encode_fetch(
            format_, frames, offset=offset, to=96, limit=1000, tag=None, wanted=None, most_bytes=4 * MIB
        )
        size = sum(map(len, found.body))
        if format_ is FetchFormat.JSON:
            shown = json.loads(b"".join(map(bytes, found.body)))
            assert [*range(offset, found.next_offset)] == [each["offset"] for each in shown["records"]]
        assert offset < found.next_offset
        assert size <= 4 * MIB + 6 * MIB // 4 + 65_536
        offset, pieces = found.next_offset, pieces + 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert pieces >= 5
    assert peak < 64 * MIB
