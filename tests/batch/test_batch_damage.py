"""Damage and lies: no flipped byte passes, no directory is believed, nothing unfolds past its word."""

from __future__ import annotations

import itertools
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.batch import (
    HEADER_SIZE,
    Batch,
    BatchError,
    Codec,
    Column,
    Kind,
    build,
    build_control,
    check_directory,
    merge,
    stamp,
    verify,
)
from laminar.batch.arrow.pyarrow_out import to_arrow
from laminar.batch.header import seal

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LIMITS: dict[str, Any] = {"max_records": 100, "max_record_bytes": 1000, "max_plain_bytes": 10_000}
FIELDS = {
    "column": ("<B", 0),
    "codec": ("<B", 1),
    "flags": ("<H", 2),
    "width": ("<I", 4),
    "validity_position": ("<I", 8),
    "offsets_position": ("<I", 12),
    "position": ("<I", 16),
    "stored_length": ("<I", 20),
    "plain_length": ("<I", 24),
    "null_count": ("<I", 28),
}


def full_frame() -> bytearray:
    """A small frame with every column and every kind of hole."""
    frame = build(
        [b"one", b"", b"three"],
        keys=[b"k", None, b""],
        timestamps=[5, None, -5],
        tags=["red", None, "ü"],
        headers=[{"h": b"v"}, None, None],
        delivery_times=[None, 9, None],
        trace_ids=[None, None, b"t" * 16],
    )
    stamp(
        frame,
        index=7,
        term=3,
        prev_term=2,
        base_offset=40,
        append_time_ms=1_700_000_000_000,
        committed_index=6,
        opens_segment=True,
    )
    return frame


def resealed(frame: bytearray) -> bytearray:
    """The frame with right checksums over whatever it says now: a client that lies on purpose."""
    (count,) = struct.unpack_from("<I", frame, 40)
    (tag_mask,) = struct.unpack_from("<Q", frame, 96)
    return seal(bytearray(frame), Kind.DATA, count=count, tag_mask=tag_mask)


def lie(line: int, field: str, value: int) -> bytearray:
    """The full frame with one field of one line of its directory changed."""
    frame = full_frame()
    form, at = FIELDS[field]
    struct.pack_into(form, frame, HEADER_SIZE + 8 + 32 * line + at, value)
    return resealed(frame)


def read_everything(frame: bytearray) -> None:
    batch = Batch(frame)
    for name in ("values", "keys", "tags", "headers", "timestamps", "delivery_times", "trace_ids"):
        getattr(batch, name)
    batch.tagged("red")
    to_arrow(batch)


def test_every_changed_byte_is_noticed() -> None:
    """Each byte of a frame, changed in each way, fails its checksum or is refused."""
    frame = full_frame()
    for position in range(len(frame)):
        original = frame[position]
        for change in range(1, 256):
            frame[position] = original ^ change
            with pytest.raises(BatchError):
                verify(frame)
        frame[position] = original
    verify(frame)


def test_every_changed_byte_of_a_control_frame_is_noticed() -> None:
    frame = build_control(Kind.COMMAND, b"payload")
    for position in range(len(frame)):
        frame[position] ^= 0x10
        with pytest.raises(BatchError):
            verify(frame)
        frame[position] ^= 0x10


@pytest.mark.parametrize(
    ("position", "form", "value", "code", "field"),
    [
        (0, "<4s", b"LMNX", "malformed", "magic"),
        (4, "<B", 2, "unsupported", "version"),
        (5, "<B", 200, "unsupported", "kind"),
        (5, "<B", 1, "malformed", "count"),
        (6, "<H", 16, "unsupported", "flags"),
        (6, "<H", 8, "malformed", "flags"),
        (44, "<I", 2**31, "bad_checksum", "header_crc"),
        (84, "<I", 1, "unsupported", "reserved"),
        (104, "<B", 1, "bad_checksum", "header_crc"),
        (120, "<I", 1, "bad_checksum", "header_crc"),
        (124, "<I", 1, "bad_checksum", "header_crc"),
        (200, "<B", 1, "bad_checksum", "body_crc"),
    ],
)
def test_an_error_says_what_is_wrong(position: int, form: str, value: Any, code: str, field: str) -> None:
    frame = full_frame()
    struct.pack_into(form, frame, position, value)

    with pytest.raises(BatchError) as caught:
        verify(frame)
    assert (code, field) == (caught.value.code, caught.value.field)


def test_an_honest_directory_passes() -> None:
    check_directory(full_frame(), **LIMITS)
    read_everything(full_frame())


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_of_a_directory_may_lie(field: str) -> None:
    """Whatever a line says other than the truth is refused, by the leader and by a reader.

    Two lies are not the leader's to find: plain bytes said to be compressed, as he unfolds nothing, which a
    reader notices; and a column that calls itself one of the future, which is nobody's to know.
    """
    form, at = FIELDS[field]
    told = 0
    believed = []
    for line, by in itertools.product(range(8), (1, -1, 8, 64, 2**31)):
        place = HEADER_SIZE + 8 + 32 * line + at
        original = struct.unpack_from(form, full_frame(), place)[0]
        value = (original + by) % 2 ** (8 * struct.calcsize(form))
        if value == original or (field == "column" and value > max(Column)):
            continue
        told += 1
        frame = lie(line, field, value)
        looks = (read_everything, *([] if field == "codec" else [of_the_leader]))
        believed += [(look.__name__, line, by) for look in looks if not refuses(look, frame)]

    assert told >= 10
    assert [] == believed


def of_the_leader(frame: bytearray) -> None:
    check_directory(frame, **LIMITS)


def refuses(look: Callable[[bytearray], object], frame: bytearray) -> bool:
    try:
        look(frame)
    except BatchError:
        return True
    return False


@given(st.integers(128, 128 + 8 + 8 * 32 - 1), st.integers(1, 255))
@settings(max_examples=300)
def test_a_mangled_directory_raises_nothing_but_batch_errors(position: int, change: int) -> None:
    frame = full_frame()
    frame[position] ^= change
    frame = resealed(frame)

    for look in (lambda: check_directory(frame, **LIMITS), lambda: read_everything(frame)):
        try:
            look()
        except BatchError as error:
            assert error.code in {"malformed", "unsupported", "too_large"}


@given(st.data())
@settings(max_examples=300)
def test_a_mangled_body_raises_nothing_but_batch_errors(data: st.DataObject) -> None:
    """Also with right checksums, any bytes anywhere: no crash, no other exception, nothing read outside."""
    frame = full_frame()
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(HEADER_SIZE, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = resealed(frame)

    for look in (lambda: check_directory(frame, **LIMITS), lambda: read_everything(frame)):
        try:
            look()
        except BatchError as error:
            assert error.code in {"malformed", "unsupported", "too_large"}


@pytest.mark.parametrize("count", [0, 2, 4, 2**32 - 1])
def test_pitfall_47_a_lying_count_is_refused(count: int) -> None:
    frame = full_frame()
    struct.pack_into("<I", frame, 40, count)
    frame = resealed(frame)

    with pytest.raises(BatchError):
        check_directory(frame, **LIMITS)
    with pytest.raises(BatchError):
        Batch(frame).entry(Column.VALUE)


@pytest.mark.parametrize("ends", [(1, 1, 5), (0, 6, 5), (0, -1, 5), (0, 2, 6), (0, 2, 4), (-2, 0, 5)])
def test_offsets_that_go_back_or_do_not_fit_are_refused(ends: tuple[int, ...]) -> None:
    """By the leader; and by a reader, who learns which offsets he cannot read and where to go on."""
    frame = build([b"ab", b"cde"])
    stamp(frame, index=1, term=1, prev_term=0, base_offset=40, append_time_ms=0, committed_index=0)
    struct.pack_into("<3i", frame, 192, *ends)
    # Sealed by hand: `resealed` would forget the place.
    (stamped,) = struct.unpack_from("<Q", frame, 32)
    frame = resealed(frame)
    stamp(frame, index=1, term=1, prev_term=0, base_offset=stamped, append_time_ms=0, committed_index=0)

    with pytest.raises(BatchError, match="offsets"):
        check_directory(frame, **LIMITS)
    with pytest.raises(BatchError, match="records 40 to 41") as caught:
        _ = Batch(frame).values
    assert caught.value.offsets == (40, 42)


def test_a_time_that_no_reader_can_write_is_refused() -> None:
    """Else one client's nonsense would stop every reader that wants microseconds."""
    frame = build([b"a"], timestamps=[1])
    entry = Batch(frame).entry(Column.TIMESTAMP)
    assert entry is not None
    struct.pack_into("<q", frame, entry.position, 2**62)
    frame = resealed(frame)

    with pytest.raises(BatchError, match="time"):
        check_directory(frame, **LIMITS)
    with pytest.raises(BatchError, match="records 0 to 0"):
        read_everything(frame)
    assert Batch(frame).values == [b"a"]


def test_limits_are_named() -> None:
    def refusal(frame: bytearray, **changed: int) -> tuple[str, str | None, object, object]:
        with pytest.raises(BatchError) as caught:
            check_directory(frame, **{**LIMITS, **changed})
        return caught.value.code, caught.value.field, caught.value.value, caught.value.limit

    assert refusal(full_frame(), max_records=2) == ("too_large", "records", 3, 2)
    assert refusal(build([b"x" * 30]), max_plain_bytes=29) == ("too_large", "plain_bytes", 30, 29)
    # A record's size is that of its value, key, tag and headers together.
    keyed = build([b"x" * 4, b"y" * 5], keys=[b"k" * 8, b"k"])
    assert refusal(keyed, max_record_bytes=11) == ("too_large", "record_bytes", 12, 11)
    check_directory(keyed, max_records=2, max_record_bytes=12, max_plain_bytes=18)
    with pytest.raises(BatchError, match="records"):
        check_directory(full_frame(), max_records=2, max_record_bytes=1, max_plain_bytes=1)


def test_pitfall_47_a_bomb_is_seen_by_its_word_and_held_to_it() -> None:
    """1 MB of zeros in a few bytes: refused where it says so, and not unfolded further where it does not."""
    bomb = build([bytes(1_000_000)], codec=Codec.ZSTD)
    assert len(bomb) < 400

    with pytest.raises(BatchError) as caught:
        check_directory(bomb, max_records=1, max_record_bytes=2_000_000, max_plain_bytes=999_999)
    assert (caught.value.code, caught.value.field) == ("too_large", "plain_bytes")
    # The same stored bytes, said to be 1,000 plain ones.
    struct.pack_into("<I", bomb, HEADER_SIZE + 8 + 24, 1000)
    struct.pack_into("<ii", bomb, 192, 0, 1000)
    liar = resealed(bomb)
    check_directory(liar, max_records=1, max_record_bytes=1000, max_plain_bytes=1000)
    with pytest.raises(BatchError, match="1001 bytes or more, not 1000") as caught:
        _ = Batch(liar).values
    assert caught.value.code == "malformed"


@pytest.mark.parametrize("stored", ["random", "cut", "doubled", "unfinished"])
def test_stored_bytes_are_one_whole_zstd_frame(stored: str) -> None:
    honest = build([b"x" * 1000], codec=Codec.ZSTD)
    (length,) = struct.unpack_from("<I", honest, HEADER_SIZE + 8 + 20)
    body = bytes(honest[200 : 200 + length])
    changed = {
        "random": random.Random(1).randbytes(length),
        "cut": body[:-1],
        "doubled": body + body,
        # All its bytes come out, but not its end: the checksum that zstd itself may carry is cut off.
        "unfinished": zstd.compress(b"x" * 1000, options={zstd.CompressionParameter.checksum_flag: 1})[:-4],
    }[stored]
    frame = bytearray(honest[:200]) + changed + bytes(-len(changed) % 8)
    struct.pack_into("<I", frame, HEADER_SIZE + 8 + 20, len(changed))
    frame = resealed(frame)

    with pytest.raises(BatchError) as caught:
        _ = Batch(frame).values
    assert caught.value.code == "malformed"


def test_a_validity_bitmap_says_what_the_directory_says() -> None:
    """As many zeros as missing cells, and none behind the last record."""
    frame = build([b"a", b"b"], keys=[b"k", None])
    key = Batch(frame).entry(Column.KEY)
    assert key is not None
    for bits in (0b11, 0b00, 0b101, 0b100):
        frame[key.validity_position] = bits
        with pytest.raises(BatchError, match="validity"):
            check_directory(resealed(frame), **LIMITS)
    frame[key.validity_position] = 0b10
    check_directory(resealed(frame), **LIMITS)


def test_a_reserved_number_is_not_read_over() -> None:
    frame = full_frame()
    frame[HEADER_SIZE + 2] = 1
    with pytest.raises(BatchError, match="reserved") as caught:
        check_directory(resealed(frame), **LIMITS)
    assert caught.value.code == "unsupported"


def test_a_frame_that_lost_its_end_is_malformed_also_unverified() -> None:
    """Who skips the checksums still reads nothing outside of the frame."""
    frame = full_frame()
    for size in range(HEADER_SIZE, len(frame)):
        with pytest.raises(BatchError) as caught:
            _ = Batch(frame[:size], verified=True).values
        assert caught.value.field == "length"
        with pytest.raises(BatchError):
            check_directory(frame[:size], **LIMITS)


@pytest.mark.parametrize(
    ("position", "value"), [(164, 1), (156, 4), (160, 4), (192, 1), (196, 4), (152, 201)]
)
def test_a_merge_believes_a_single_value_no_more_than_others(position: int, value: int) -> None:
    """The short way for one plain value checks what the long way checks."""
    frame = build([b"hello"])
    frame[position] = value
    with pytest.raises(BatchError):
        merge([resealed(frame), build([b"b"])])


def test_a_codec_that_is_not_known_is_unsupported() -> None:
    frame = lie(0, "codec", Codec.LZ4)
    for look in (lambda: check_directory(frame, **LIMITS), lambda: read_everything(frame)):
        with pytest.raises(BatchError) as caught:
            look()
        assert caught.value.code == "unsupported"


def test_an_unknown_column_is_skipped() -> None:
    """A column from a newer program: the leader checks its arithmetic, a reader reads the others."""
    frame = build([b"ab", b"c"], trace_ids=[b"t" * 16, b"u" * 16])
    frame[HEADER_SIZE + 8 + 32] = 77
    frame = resealed(frame)
    batch = Batch(frame)

    check_directory(frame, **LIMITS)
    assert batch.values == [b"ab", b"c"]
    assert {Column.VALUE, 77} == batch.columns
    assert batch.trace_ids is None


def test_a_tag_mask_without_tags_is_refused() -> None:
    """A batch is skipped or read by its mask, so mask and tag columns come together or not at all."""
    frame = seal(build([b"a"]), Kind.DATA, count=1, tag_mask=1)
    with pytest.raises(BatchError, match="tag_mask"):
        check_directory(frame, **LIMITS)
    frame = seal(build([b"a"], tags=["t"]), Kind.DATA, count=1)
    with pytest.raises(BatchError, match="tag_mask"):
        check_directory(frame, **LIMITS)


def test_text_and_headers_that_are_none_are_a_bad_batch() -> None:
    """Cells are looked at by the reader who asks for them, and by nobody before; other columns are read."""
    frame = build([b"a"], tags=["ü"], headers=[{"h": b"v"}])
    tag, headers = Batch(frame).entry(Column.TAG), Batch(frame).entry(Column.HEADERS)
    assert tag is not None and headers is not None
    frame[tag.position] = 0xFF
    frame[headers.position] = 0xC1
    batch = Batch(resealed(frame))

    assert batch.values == [b"a"]
    for look in (lambda: batch.tags, lambda: batch.headers, lambda: to_arrow(batch)):
        with pytest.raises(BatchError, match="records 0 to 0 cannot be read"):
            look()
