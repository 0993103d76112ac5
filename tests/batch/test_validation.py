"""What a leader takes from outside, every reader can read: cells are checked before they are acknowledged."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import (
    HEADER_SIZE,
    BatchError,
    CellLimits,
    Codec,
    Column,
    build,
    check_batch,
    takes_long,
    verify,
)
from laminar.batch.batch import Batch
from laminar.batch.projection import project
from laminar.http.api.append_body import records_of
from laminar.http.api.fetch_body import FetchFormat, encode_fetch
from tests.batch.test_batch_damage import full_frame, read_everything, resealed

LIMITS: dict[str, Any] = {"max_records": 100, "max_record_bytes": 1000, "max_plain_bytes": 10_000}
CELLS = CellLimits(max_key_bytes=20, max_tag_bytes=10, max_headers_bytes=30)


def refusal(frame: bytearray, **changed: int) -> tuple[str, str | None, object]:
    with pytest.raises(BatchError) as caught:
        check_batch(frame, CELLS, **{**LIMITS, **changed})
    return caught.value.code, caught.value.field, caught.value.limit


def swapped(frame: bytearray, old: bytes, new: bytes) -> bytearray:
    """The frame with some bytes of its body replaced, under right checksums."""
    assert len(old) == len(new) and frame.count(old, HEADER_SIZE) == 1, f"{old!r} is not there once"
    at = frame.index(old, HEADER_SIZE)
    frame[at : at + len(old)] = new
    return resealed(frame)


def folded() -> bytearray:
    """Every column that may be compressed is."""
    return build(
        [b"value" * 30, b"x" * 50],
        keys=[b"key-" * 5, b"key-" * 5],
        headers=[{"name": b"h" * 26}, {"name": b"h" * 26}],
        codec=Codec.ZSTD,
    )


def test_an_honest_batch_passes_and_its_plain_bytes_are_told() -> None:
    assert all(Batch(folded()).entry(column).codec for column in (Column.VALUE, Column.KEY))  # type: ignore[union-attr]
    assert 200 + 40 == check_batch(
        build([b"x" * 200], keys=[b"k" * 40]),
        CellLimits(max_key_bytes=40, max_tag_bytes=1, max_headers_bytes=1),
        **LIMITS,
    )

    check_batch(full_frame(), CELLS, **LIMITS)
    check_batch(folded(), CELLS, **LIMITS)


@pytest.mark.parametrize("column", [Column.VALUE, Column.KEY, Column.HEADERS])
def test_what_does_not_unfold_is_refused(column: Column) -> None:
    """Checksums and directory are right: only who unfolds it can tell."""
    frame = folded()
    entry = Batch(frame).entry(column)
    assert entry is not None and entry.codec, f"{column!r} is not compressed"
    frame[entry.position + 6] ^= 0xFF

    assert "malformed" == refusal(resealed(frame))[0]


def test_a_tag_is_utf_8() -> None:
    frame = build([b"a", b"b"], tags=["red", "blue"])

    assert ("malformed", "records[1].tag", "UTF-8") == refusal(swapped(frame, b"blue", b"bl\xffe"))


def test_a_tags_hash_and_bit_are_those_of_the_tag() -> None:
    """A filter reads only what these name: another hash hides the record from it, for ever."""
    frame = build([b"a", b"b"], tags=["red", None])
    assert ("malformed", "records[0].tag") == refusal(swapped(frame, b"red", b"rad"))[:2]

    frame = build([b"a", b"b"], tags=["red", None])
    struct.pack_into("<Q", frame, 96, 1 << 63)
    assert ("malformed", "tag_mask") == refusal(resealed(frame))[:2]


@pytest.mark.parametrize("junk", [b"\xc1", b"\x90", b"\x81\xa1\xff", b"\x81\xa1n\xc0"], ids=repr)
def test_headers_are_a_map_of_text_to_bytes(junk: bytes) -> None:
    """Also a name that is not UTF-8, of which the decoder says so in another way."""
    frame = build([b"a"], headers=[{"n": b"v"}])

    honest = b"\x81\xa1n\xc4\x01v"
    assert ("malformed", "records[0].headers") == refusal(swapped(frame, honest, junk + honest[len(junk) :]))[
        :2
    ]


def test_keys_tags_and_headers_have_limits() -> None:
    """As they have in every other form of append; the record is named."""
    many = [b"k"] * 80
    assert ("too_large", "records[70].key", 20) == refusal(
        build([b""] * 80, keys=[*many[:70], b"k" * 21, *many[71:]])
    )
    check_batch(build([b""] * 80, keys=[b"k" * 20] * 80), CELLS, **LIMITS)
    assert ("too_large", "records[1].tag", 10) == refusal(build([b"", b""], tags=["é" * 5, "é" * 6]))
    assert ("too_large", "records[0].headers", 30) == refusal(build([b""], headers=[{"n": b"v" * 30}]))
    check_batch(build([b""], headers=[{"n": b"v" * 29}]), CELLS, **LIMITS)


def long(*frames: bytes | bytearray) -> bool:
    """Whether these batches together take long."""
    return takes_long((frame, None) for frame in frames)


def test_what_takes_long_is_known_by_its_directory() -> None:
    """Megabytes in a few bytes, and many cells that are decoded one by one; nothing is unfolded to know."""
    assert not long(build([b"x" * 100] * 5000))
    assert not long(build([bytes(60_000)], codec=Codec.ZSTD))
    assert long(build([bytes(70_000)], codec=Codec.ZSTD))
    assert long(build([b""] * 3000, tags=["t"] * 3000))
    assert [False, True] == [long(build([b""], headers=[{"n": bytes(size)}])) for size in (60_000, 70_000)]
    assert not long(bytes(200))


def test_batches_that_take_long_together_take_long() -> None:
    """Each is small, and a body may have tens of them; one that is refused at once counts for nothing."""
    for small in (build([bytes(30_000)], codec=Codec.ZSTD), build([b""] * 1000, tags=["t"] * 1000)):
        assert [False, True] == [long(*[small] * count) for count in (2, 3)]
        assert [False, True] == [long(bytes(200), *[small] * count) for count in (2, 3)]


def read_as_served(frame: bytearray) -> None:
    """Everything that anybody makes of a batch that is stored."""
    read_everything(frame)
    records_of([memoryview(frame)])
    project(frame, {Column.KEY, Column.TAG})
    header = verify(frame)
    for format_ in FetchFormat:
        for tag in (None, "red", "ü"):
            encode_fetch(
                format_, [frame], offset=header.base_offset, to=2**53, limit=100, tag=tag, wanted=None
            )
    encode_fetch(
        FetchFormat.ARROW,
        [frame],
        offset=header.base_offset,
        to=2**53,
        limit=100,
        tag=None,
        wanted="key,headers,tag,value,timestamp",
    )


HONEST = [bytes(full_frame()), bytes(folded()), bytes(build([b"one"], tags=["ü"]))]


@given(st.data())
def test_what_is_taken_is_read_by_every_reader(data: st.DataObject) -> None:
    """Mutants under right checksums: a batch is refused, or no reader fails on it."""
    frame = bytearray(data.draw(st.sampled_from(HONEST)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(HEADER_SIZE, len(frame) - 1))
        frame[at] = data.draw(st.integers(0, 255))
    frame = resealed(frame)

    try:
        check_batch(frame, CELLS, **LIMITS)
    except BatchError:
        return
    read_as_served(frame)
