"""Build batches of records, and merge small batches into one.

A batch is the unit of append, checksum, replication, storage and fetch. Its header is written by `header`,
its body by `columns`; nothing here touches a file, a socket or a clock. Frames built here are *unstamped*:
their index, term, offset and append time are 0, until the leader of a partition writes them into the header.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TypeVar

import msgspec

from laminar.batch.batch import Batch
from laminar.batch.columns import (
    VARIABLE,
    Cells,
    Codec,
    Column,
    assemble,
    read_directory,
    tag_hash,
    tag_hashes,
    times,
    trace_ids,
    variable,
)
from laminar.batch.header import (
    HEADER_SIZE,
    NO_PRODUCER,
    BatchError,
    Buffer,
    Header,
    Kind,
    fields,
    malformed,
    seal,
)

T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()


def build(
    values: Sequence[Buffer],
    *,
    keys: Sequence[Buffer | None] | None = None,
    timestamps: Sequence[int | None] | None = None,
    tags: Sequence[str | None] | None = None,
    headers: Sequence[Mapping[str, bytes] | None] | None = None,
    delivery_times: Sequence[int | None] | None = None,
    trace_ids: Sequence[bytes | None] | None = None,
    codec: Codec = Codec.NONE,
    producer_id: bytes = NO_PRODUCER,
    producer_epoch: int = 0,
    sequence: int = 0,
    checkpoint: int = 0,
    floor: int = 0,
) -> bytearray:
    """Return the frame of a new batch of records, not yet stamped with its place in a log.

    Every sequence is as long as `values`, with None for a record that has no such cell; a sequence that is
    None, or has only None, makes no column. Times are ms since the epoch; a trace id has 16 bytes. `codec` is
    tried on values, keys and headers, and used for each of these columns where it saves bytes. `checkpoint`
    and `floor` are those of `Header`.

    Raises:
        BatchError: there are no records, a cell is out of range, or the frame would exceed 2 GiB.
    """
    raw = None
    if headers is not None:
        raw = [_ENCODER.encode(fields) if fields else None for fields in headers]
    return _build(
        values,
        keys=keys,
        timestamps=timestamps,
        tags=tags,
        headers=raw,
        delivery_times=delivery_times,
        traces=trace_ids,
        codec=codec,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        sequence=sequence,
        checkpoint=checkpoint,
        floor=floor,
    )


def _build(
    values: Sequence[Buffer],
    *,
    keys: Sequence[Buffer | None] | None,
    timestamps: Sequence[int | None] | None,
    tags: Sequence[str | None] | None,
    headers: Sequence[Buffer | None] | None,
    delivery_times: Sequence[int | None] | None,
    traces: Sequence[bytes | None] | None,
    codec: Codec = Codec.NONE,
    producer_id: bytes = NO_PRODUCER,
    producer_epoch: int = 0,
    sequence: int = 0,
    checkpoint: int = 0,
    floor: int = 0,
) -> bytearray:
    """Build a frame like `build`, from `headers` that are encoded already, as msgpack maps."""
    count = len(values)
    if count == 0:
        raise malformed("count", 0, "at least 1", "batch")
    columns = [variable(Column.VALUE, values, codec)]
    tag_mask = 0
    if keys is not None and _some(keys, count):
        columns.append(variable(Column.KEY, keys, codec))
    if timestamps is not None and _some(timestamps, count):
        columns.append(times(Column.TIMESTAMP, timestamps))
    if tags is not None and _some(tags, count):
        hashed, tag_mask = _tag_columns(tags)
        columns += hashed
    if delivery_times is not None and _some(delivery_times, count):
        columns.append(times(Column.DELIVERY_TIME, delivery_times))
    if traces is not None and _some(traces, count):
        columns.append(trace_ids(traces))
    if headers is not None and _some(headers, count):
        columns.append(variable(Column.HEADERS, headers, codec))
    return seal(
        assemble(columns),
        Kind.DATA,
        count=count,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        sequence=sequence,
        tag_mask=tag_mask,
        checkpoint=checkpoint,
        floor=floor,
    )


def _some(cells: Sequence[object], count: int) -> bool:
    """Return whether any record has a cell of this column."""
    assert len(cells) == count, f"a column of {len(cells)} cells in a batch of {count} records"
    return cells[0] is not None or any(cell is not None for cell in cells)


def _tag_columns(tags: Sequence[str | None]) -> tuple[list[Cells], int]:
    """Return the columns of the tags' hashes (0 without a tag) and texts, and the mask of their bits."""
    encoded = {tag: tag.encode() for tag in set(tags) if tag is not None}
    hashes: dict[str | None, int] = {tag: tag_hash(tag) for tag in encoded}
    mask = reduce(or_, (1 << (value & 63) for value in hashes.values()), 0)
    hashes[None] = 0
    texts = [None if tag is None else encoded[tag] for tag in tags]
    return [
        tag_hashes([hashes[tag] for tag in tags]),
        variable(Column.TAG, texts),
    ], mask


_MERGEABLE = frozenset(Column)


def mergeable(frame: Buffer) -> bool:
    """Return whether `merge` accepts this verified frame: records, no producer id, only known columns.

    Raises:
        BatchError: the frame's directory is wrong.
    """
    header = Header.unpack(frame)
    if header.kind is not Kind.DATA or header.producer_id != NO_PRODUCER:
        return False
    return read_directory(frame, header).keys() <= _MERGEABLE


def merge(frames: Iterable[Buffer]) -> bytearray:
    """Return one frame with the records of all `frames`, in order, without compression.

    The frames must be verified. If only some of them have a column, the records of the others are null in it.
    The result is not stamped: index, term, offset and append time are 0, as in frames from clients.

    Raises:
        BatchError: a frame is not `mergeable`, or its directory or offsets are wrong.
    """
    frames = list(frames)
    singles = [_single_value(frame) for frame in frames]
    if None not in singles:
        return build([value for value in singles if value is not None])
    for frame, value in zip(frames, singles, strict=True):
        if value is None and not mergeable(frame):
            raise BatchError("unsupported", "merge: not a batch of records without a producer", field="frame")
    batches = [Batch(frame, verified=True) for frame in frames]
    values: list[Buffer] = []
    columns: set[int] = set()
    for batch in batches:
        values += batch.values
        columns |= batch.columns
    if columns == {Column.VALUE}:
        return build(values)

    def joined(column: Column, read: Callable[[Batch], Sequence[T] | None]) -> Sequence[T | None] | None:
        if column not in columns:
            return None
        cells: list[T | None] = []
        for batch in batches:
            cells += read(batch) or [None] * len(batch)
        return cells

    return _build(
        values,
        keys=joined(Column.KEY, lambda batch: batch.keys),
        timestamps=joined(Column.TIMESTAMP, lambda batch: batch.given_timestamps),
        tags=joined(Column.TAG, lambda batch: batch.tags),
        headers=joined(Column.HEADERS, lambda batch: batch.stored_headers),
        delivery_times=joined(Column.DELIVERY_TIME, lambda batch: batch.delivery_times),
        traces=joined(Column.TRACE_ID, lambda batch: batch.trace_ids),
    )


# The directory of a batch of one plain value: count of columns to position of the data.
_SINGLE = struct.Struct("<HHIBBHIIII")
_SINGLE_DIRECTORY = (1, 0, 40, Column.VALUE, Codec.NONE, VARIABLE, 0, 0, 192, 200)
_SINGLE_LENGTHS = struct.Struct("<III")  # stored, plain, nulls
_HEADER_FIELDS = fields("count", "body_length", "producer_id")
_SINGLE_ENDS = struct.Struct("<ii")


def _single_value(frame: Buffer) -> memoryview | None:
    """Return the value of a batch that holds one value and nothing else; None for any other batch.

    A node merges hundreds of such batches in a turn of its loop. Their layout is fixed, so this takes 1 µs;
    the general way takes 6, and raises an error if a batch is wrong.
    """
    header_count, body_length, producer_id = _HEADER_FIELDS.unpack_from(frame)
    if header_count != 1 or body_length < 72 or _SINGLE.unpack_from(frame, HEADER_SIZE) != _SINGLE_DIRECTORY:
        return None
    stored_length, plain_length, nulls = _SINGLE_LENGTHS.unpack_from(frame, 156)
    end = 200 + plain_length
    if nulls or stored_length != plain_length or end + -end % 8 != HEADER_SIZE + body_length:
        return None
    if _SINGLE_ENDS.unpack_from(frame, 192) != (0, plain_length) or producer_id != NO_PRODUCER:
        return None
    return memoryview(frame)[200:end]
