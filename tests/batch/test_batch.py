"""A batch gives back what went in, whichever columns it has, and by two readers."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.batch import (
    HEADER_SIZE,
    MAX_TIME_MS,
    NO_PRODUCER,
    Batch,
    BatchError,
    Codec,
    Column,
    Header,
    Kind,
    build,
    build_control,
    check_directory,
    merge,
    mergeable,
    split,
    stamp,
    tag_bit,
    tag_hash,
    verify,
    verify_header,
)

PLACE: dict[str, Any] = {
    "index": 7,
    "term": 3,
    "prev_term": 2,
    "base_offset": 1000,
    "append_time_ms": 1_700_000_000_000,
    "committed_index": 6,
}
NO_LIMITS: dict[str, Any] = {"max_records": 2**31, "max_record_bytes": 2**31, "max_plain_bytes": 2**31}

_times = st.integers(-MAX_TIME_MS, MAX_TIME_MS)
_columns: dict[str, st.SearchStrategy[Any]] = {
    "keys": st.none() | st.binary(max_size=12),
    "timestamps": st.none() | _times,
    "tags": st.none() | st.text(max_size=5),
    "headers": st.none() | st.dictionaries(st.text(max_size=4), st.binary(max_size=8), max_size=3),
    "delivery_times": st.none() | _times,
    "trace_ids": st.none() | st.binary(min_size=16, max_size=16),
}


@st.composite
def batches(draw: st.DrawFn, *, plain: bool = False) -> dict[str, Any]:
    """Arguments of `build`: a few records, any columns, with and without holes."""
    count = draw(st.integers(1, 20))
    arguments: dict[str, Any] = {
        "values": draw(st.lists(st.binary(max_size=40), min_size=count, max_size=count))
    }
    for name, cells in _columns.items():
        if draw(st.booleans()):
            arguments[name] = draw(st.lists(cells, min_size=count, max_size=count))
    if not plain:
        arguments["codec"] = draw(st.sampled_from([Codec.NONE, Codec.ZSTD]))
    return arguments


def slow_read(frame: bytes) -> list[dict[str, Any]]:
    """The slow twin: a reader by docs/format.md, one record and one bit at a time, that checks nothing."""
    (count,) = struct.unpack_from("<I", frame, 40)
    records: list[dict[str, Any]] = [{} for _ in range(count)]
    (columns,) = struct.unpack_from("<H", frame, 128)
    for line in range(columns):
        at = 136 + 32 * line
        column, codec, flags, width, validity, offsets, position, stored, _plain, _nulls = struct.unpack(
            "<BBHIIIIIII", frame[at : at + 32]
        )
        assert codec == 0
        data = frame[position : position + stored]
        for i in range(count):
            if flags & 2 and not frame[validity + i // 8] >> (i % 8) & 1:
                continue
            if flags & 1:
                start, end = struct.unpack_from("<ii", frame, offsets + 4 * i)
                records[i][Column(column).name] = data[start:end]
            else:
                records[i][Column(column).name] = data[width * i : width * (i + 1)]
    return records


def expected_records(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What `slow_read` finds in the frame of these arguments."""
    records: list[dict[str, Any]] = [{"VALUE": value} for value in arguments["values"]]
    tagged = any(tag is not None for tag in arguments.get("tags") or [])
    for i, record in enumerate(records):
        for name, column, encode in (
            ("keys", "KEY", bytes),
            ("timestamps", "TIMESTAMP", lambda number: struct.pack("<q", number)),
            ("tags", "TAG", str.encode),
            ("delivery_times", "DELIVERY_TIME", lambda number: struct.pack("<q", number)),
            ("trace_ids", "TRACE_ID", bytes),
            ("headers", "HEADERS", msgspec.msgpack.encode),
        ):
            cell = (arguments.get(name) or [None] * len(records))[i]
            if cell is not None and not (name == "headers" and not cell):
                record[column] = encode(cell)
        if tagged:
            tag = arguments["tags"][i]
            record["TAG_HASH"] = struct.pack("<Q", 0 if tag is None else tag_hash(tag))
    return records


@given(batches())
def test_what_was_built_is_read(arguments: dict[str, Any]) -> None:
    """Every column comes back, None where there was none; a column of nothing but None is no column."""
    frame = build(**arguments)
    stamp(frame, **PLACE)
    batch = Batch(frame)
    count = len(arguments["values"])

    def given_cells(name: str) -> list[Any] | None:
        cells = arguments.get(name)
        return cells if cells and any(cell is not None for cell in cells) else None

    assert arguments["values"] == batch.values
    assert [bytes(batch.value(i)) for i in range(count)] == batch.values
    assert given_cells("keys") == batch.keys
    assert given_cells("tags") == batch.tags
    assert given_cells("timestamps") == batch.given_timestamps
    assert given_cells("delivery_times") == batch.delivery_times
    assert given_cells("trace_ids") == batch.trace_ids
    headers = [cell or {} for cell in arguments.get("headers") or []]
    assert (headers if any(headers) else None) == batch.headers
    times = arguments.get("timestamps") or [None] * count
    appended = PLACE["append_time_ms"]
    assert [appended if time is None else time for time in times] == batch.timestamps
    assert check_directory(frame, **NO_LIMITS) == batch.header


@given(batches(plain=True))
def test_the_bytes_are_those_of_the_format(arguments: dict[str, Any]) -> None:
    """A reader that only knows docs/format.md finds the same records."""
    frame = bytes(build(**arguments))

    assert expected_records(arguments) == slow_read(frame)
    assert len(frame) % 8 == 0


@given(batches())
def test_records_are_views_on_their_batch(arguments: dict[str, Any]) -> None:
    """A record's fields are its cells, its offset the batch's base plus its place."""
    frame = build(**arguments)
    stamp(frame, **PLACE)
    batch = Batch(frame)
    records = list(batch.records())

    assert list(range(1000, 1000 + len(batch))) == [record.offset for record in records]
    for i, record in enumerate(records):
        assert arguments["values"][i] == record.value
        assert (arguments.get("keys") or [None] * len(batch))[i] == record.key
        assert (arguments.get("tags") or [None] * len(batch))[i] == record.tag
        assert ((arguments.get("headers") or [None] * len(batch))[i] or {}) == record.headers
        assert batch.timestamps[i] == record.timestamp


@pytest.mark.parametrize(
    "name",
    ["values", "keys", "timestamps", "given_timestamps", "tags", "headers", "delivery_times", "trace_ids"],
)
def test_a_column_is_decoded_once(name: str) -> None:
    """Who asks for one cell at a time, as copies of single records do, asks for the column as often."""
    batch = Batch(
        build(
            [b"v"] * 3,
            keys=[b"k", None, b""],
            timestamps=[1, None, 2],
            tags=["t", None, ""],
            headers=[{"a": b"b"}, None, {}],
            delivery_times=[5, 6, None],
            trace_ids=[b"t" * 16, None, None],
        )
    )

    column = getattr(batch, name)

    assert len(column) == 3 and getattr(batch, name) is column


def test_a_record_reads_its_value_as_text_and_json() -> None:
    batch = Batch(build(['{"a": "ü"}'.encode(), b"\xff"]))
    first, second = batch

    assert first.text == '{"a": "ü"}'
    assert first.json() == {"a": "ü"}
    with pytest.raises(ValueError):
        second.json()
    assert "<Record 0 key=None value=" in repr(first)


def test_records_can_begin_and_end_inside_of_a_batch() -> None:
    """A fetch may begin inside of a batch: the reader skips by offset, not by counting."""
    frame = build([b"a", b"b", b"c"])
    stamp(frame, **PLACE)
    batch = Batch(frame)

    assert [record.offset for record in batch.records(1001)] == [1001, 1002]
    assert [record.offset for record in batch.records(stop=1001)] == [1000]
    assert [record.offset for record in batch.records(5, 5000)] == [1000, 1001, 1002]
    assert list(batch.records(1003)) == []
    assert list(batch.records(stop=900)) == []


def test_a_value_is_a_view_on_the_frame() -> None:
    """Looking at one value copies none."""
    frame = build([b"first", b"second"])
    batch = Batch(frame)
    view = batch.value(1)

    position = bytes(frame).index(b"second")
    assert bytes(view) == b"second"
    frame[position] = ord("S")
    assert bytes(view) == b"Second"
    with pytest.raises(IndexError):
        batch.value(2)
    with pytest.raises(IndexError):
        batch.value(-1)


def test_the_header_holds_what_was_stamped() -> None:
    frame = build([b"a", b"b"], producer_id=bytes(range(16)), producer_epoch=4, sequence=99)
    unstamped = verify(frame)
    stamp(frame, **PLACE, opens_segment=True)
    header = verify(frame)

    assert (
        unstamped.index,
        unstamped.term,
        unstamped.prev_term,
        unstamped.base_offset,
        unstamped.append_time_ms,
        unstamped.committed_index,
        unstamped.opens_segment,
    ) == (0, 0, 0, 0, 0, 0, False)
    assert {name: getattr(header, name) for name in PLACE} == PLACE
    assert (header.kind, header.count, header.opens_segment) == (Kind.DATA, 2, True)
    assert (bytes(range(16)), 4, 99) == (header.producer_id, header.producer_epoch, header.sequence)
    assert header.next_offset == 1002
    assert len(frame) == header.frame_size
    assert unstamped.body_crc == header.body_crc, "the body's checksum is the producer's"


def test_a_stamp_forgets_the_stamp_before() -> None:
    """A client may append a frame that it fetched: nothing of its old place remains."""
    frame = build([b"a"])
    stamp(frame, **PLACE, opens_segment=True)
    again = bytearray(frame)
    stamp(memoryview(again), **dict[str, Any](dict.fromkeys(PLACE, 0)))

    assert build([b"a"]) == again


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.DATA])
def test_control_kinds_hold_a_payload_and_no_records(kind: Kind) -> None:
    frame = build_control(kind, b"anything")
    stamp(frame, **PLACE)
    batch = Batch(frame)

    assert kind is verify(frame).kind
    assert frame[HEADER_SIZE:] == b"anything"
    assert (len(batch), batch.next_offset, batch.values, list(batch), batch.keys) == (0, 1000, [], [], None)
    assert len(build_control(kind)) == HEADER_SIZE
    with pytest.raises(BatchError, match="kind"):
        check_directory(frame, **NO_LIMITS)


def test_a_batch_has_records() -> None:
    with pytest.raises(BatchError) as caught:
        build([])
    assert (caught.value.code, caught.value.field) == ("malformed", "count")


def test_columns_are_as_long_as_the_values() -> None:
    """A column that is too short is our own mistake, not a client's."""
    with pytest.raises(AssertionError, match="2 cells in a batch of 1"):
        build([b"a"], keys=[b"k", b"l"])


def test_numbers_out_of_range_are_refused() -> None:
    """A time is one that a reader can write in microseconds; a trace id has 16 bytes."""
    late, early = MAX_TIME_MS + 1, -MAX_TIME_MS - 1
    for arguments in ({"timestamps": [late]}, {"delivery_times": [early]}, {"trace_ids": [b"short"]}):
        with pytest.raises(BatchError) as caught:
            build([b"a"], **arguments)
        assert caught.value.code == "malformed"


def test_compression_is_kept_only_where_it_saves() -> None:
    """Each column for itself; bytes that do not shrink are stored as they are."""
    noise = random.Random(1).randbytes(64)
    batch = Batch(build([b"x" * 1000, b"x" * 1000], keys=[noise[:32], noise[32:]], codec=Codec.ZSTD))
    value, key = batch.entry(Column.VALUE), batch.entry(Column.KEY)

    assert value is not None and key is not None
    assert value.codec == Codec.ZSTD and value.stored_length < 100 and value.plain_length == 2000
    assert key.codec == Codec.NONE
    assert batch.values == [b"x" * 1000] * 2
    with pytest.raises(BatchError, match="codec"):
        build([b"a"], codec=Codec.LZ4)


def test_tags_are_found_by_bit_by_hash_and_by_text() -> None:
    """The mask may promise too much, the hash may collide, the text decides."""
    frame = build([b"1", b"2", b"3"], tags=["red", None, "blue"])
    batch = Batch(frame)

    assert tag_bit("red") | tag_bit("blue") == batch.header.tag_mask
    assert tag_bit("red") == 1 << tag_hash("red") % 64
    assert batch.tagged("red") == [0]
    assert batch.tagged("blue") == [2]
    assert batch.tagged("green") == []
    assert Batch(build([b"1"])).tagged("red") == []
    assert verify(build([b"1"])).tag_mask == 0
    # A record without a tag has hash 0; a hash that collides with it must not make it match.
    hashes = batch.entry(Column.TAG_HASH)
    assert hashes is not None
    forged = bytearray(frame)
    struct.pack_into("<Q", forged, hashes.position + 8, tag_hash("red"))
    assert Batch(forged, verified=True).tagged("red") == [0]


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=6))
def test_split_cuts_where_frames_end(values: list[bytes]) -> None:
    """Whole frames come back; cut anywhere else, or with a byte behind, nothing does."""
    frames = [bytes(build([value])) for value in values]
    joined = b"".join(frames)
    ends = {sum(map(len, frames[:i])) for i in range(len(frames) + 1)}

    assert frames == [bytes(frame) for frame in split(joined)]
    assert split(b"") == []
    for cut in range(0, len(joined), 7):
        if cut not in ends:
            with pytest.raises(BatchError):
                split(joined[:cut])
    with pytest.raises(BatchError):
        split(joined + b"\0")


def test_a_frame_is_whole_or_refused() -> None:
    """Every shorter piece of a frame and a frame with a byte behind are `malformed`."""
    frame = bytes(build([b"hello"], keys=[b"k"]))
    for size in range(len(frame)):
        with pytest.raises(BatchError) as caught:
            verify(frame[:size])
        assert caught.value.code == "malformed"
    with pytest.raises(BatchError):
        verify(frame + b"\0")
    assert verify(frame) == verify_header(frame[:HEADER_SIZE]) == Header.unpack(b"xx" + frame, 2)


@given(st.lists(batches(plain=True), min_size=1, max_size=5))
@settings(max_examples=50)
def test_a_merge_is_one_batch_of_all_records(many: list[dict[str, Any]]) -> None:
    """In order, each record with its own cells, and null where its frame had no such column."""
    merged = merge([build(**arguments) for arguments in many])

    assert all(mergeable(build(**arguments)) for arguments in many)
    everything: dict[str, Any] = {"values": [value for one in many for value in one["values"]]}
    for name in _columns:
        everything[name] = [cell for one in many for cell in one.get(name) or [None] * len(one["values"])]
    assert build(**everything) == merged


def test_single_values_merge_the_short_way_to_the_same_bytes() -> None:
    values = [b"", b"a", b"x" * 100]
    frames = [build([value]) for value in values]

    assert build(values) == merge(frames)
    assert build(values) == merge(map(memoryview, frames))


def test_compressed_batches_merge_to_a_plain_one() -> None:
    compressed = build([b"a" * 1000, b"b"], codec=Codec.ZSTD)

    assert build([b"a" * 1000, b"b", b"a" * 1000, b"b"]) == merge([compressed, compressed])


def test_a_merge_refuses_what_it_would_lose() -> None:
    """A producer's sequence and control kinds are not for joining."""
    producer = build([b"a"], producer_id=b"p" * 16)
    control = build_control(Kind.NOOP, b"x")

    for frame in (producer, control):
        assert not mergeable(frame)
        with pytest.raises(BatchError, match="merge"):
            merge([frame, build([b"b"])])
    assert verify(build([b"b"])).producer_id == NO_PRODUCER
