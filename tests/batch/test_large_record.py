"""What stands for a record larger than a batch, and the checksum of bytes from those of their parts."""

from __future__ import annotations

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import Batch, BatchError, Header, Kind, as_large, build, build_control, build_part, stamp
from laminar.batch.header import Flag, verify
from laminar.batch.large_record import build_stub, checksum_of, combine, size_of


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_a_checksum_is_had_from_those_of_the_parts(parts: list[bytes]) -> None:
    """As if all bytes had been read; parts of no bytes change nothing."""
    whole = 0
    for part in parts:
        often = combine(whole, crc32c(part), len(part), often=True)
        whole = combine(whole, crc32c(part), len(part))
        assert often == whole

    assert crc32c(b"".join(parts)) == whole


def test_a_checksum_of_long_parts_is_had_without_their_bytes() -> None:
    """Known of a gigabyte of zeros: the same when it is put together from halves, and from odd parts."""
    mib = crc32c(bytes(1 << 20))
    for doublings in range(10):
        mib = combine(mib, mib, (1 << 20) << doublings)
    odd = 0
    for length in (1, 12_345, (1 << 20) - 12_346):
        odd = combine(odd, crc32c(bytes(length)), length)
    whole = 0
    for _ in range(1024):
        whole = combine(whole, odd, 1 << 20)

    assert crc32c(bytes(1 << 20)) == odd
    assert whole == mib


def stub(**more: object) -> bytearray:
    given = {"key": b"k", "tag": "t", "headers": {"h": b"x"}, "timestamp_ms": 7} | more
    return build_stub(**given, size_bytes=5 << 30, crc32c=0xABC)  # type: ignore[arg-type]


def test_a_stub_is_a_batch_of_one_record_without_a_value() -> None:
    """With all else that the record has; it says how long the value is, and is told from an empty one."""
    publish = Header.unpack(_stamped(build_control(Kind.PUBLISH)))
    frame = as_large(stub(), publish=publish)
    batch = Batch(frame)
    (record,) = batch.records()

    assert batch.is_large
    assert not Batch(build([b""])).is_large
    assert (9, b"", b"k", "t", 7) == (
        record.offset,
        record.value,
        record.key,
        record.tag,
        record.timestamp,
    )
    assert {"h": b"x", "laminar-large": b"5368709120", "laminar-crc32c": b"00000abc"} == record.headers
    assert (5 << 30, 0xABC) == (size_of(batch), checksum_of(batch))
    assert (3, 2, 1_000) == (batch.header.index, batch.header.term, batch.header.append_time_ms)


def test_a_batch_that_says_large_and_not_how_large_is_refused_where_it_is_read() -> None:
    """Nobody takes it for an empty value."""
    frame = as_large(build([b""], headers=[{"laminar-large": b"much"}]), publish=Header.unpack(stub()))

    for read in (size_of, checksum_of):
        with pytest.raises(BatchError):
            read(Batch(frame))


def test_a_part_is_bytes_and_no_records() -> None:
    """Verified as any frame; its number and its upload are in the head."""
    header = verify(build_part(b"some bytes", upload=b"u" * 16, number=3))

    assert (Kind.STAGED, 0, 3, 0, b"u" * 16) == (
        header.kind,
        header.count,
        header.checkpoint,
        header.floor,
        header.producer_id,
    )
    assert (crc32c(b"some bytes"), 10) == (header.body_crc, header.body_length)


def test_a_leader_takes_the_mark_off_a_batch_that_it_stamps() -> None:
    """No client makes a stub by its flag."""
    frame = as_large(stub(), publish=Header.unpack(stub()))

    assert not Header.unpack(_stamped(frame)).flags & Flag.LARGE


def _stamped(frame: bytearray) -> bytearray:
    stamp(frame, index=3, term=2, prev_term=2, base_offset=9, append_time_ms=1_000, committed_index=1)
    return frame
