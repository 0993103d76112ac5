"""Batches from pyarrow's columns: the inverse of `pyarrow_out`, without a Python object for each record.

A frame has Arrow's own layout, so values, keys and tags are copied into the frame once, unchanged. Only
headers, which are maps, are written record by record. All rows are used: the caller selects them before.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import msgspec
import pyarrow
import pyarrow.compute

from laminar.batch.columns import Cells, Codec, Column, assemble, tag_hash, variable
from laminar.batch.header import Kind, malformed, seal

_ENCODER = msgspec.msgpack.Encoder()
_OFFSET_BYTES = 4
_NUMBER_BYTES = 8
_TRACE_BYTES = 16


def frame(
    values: pyarrow.Array,
    *,
    keys: pyarrow.Array | None = None,
    tags: pyarrow.Array | None = None,
    timestamps: pyarrow.Array | None = None,
    trace_ids: pyarrow.Array | None = None,
    headers: list[dict[str, bytes] | None] | None = None,
) -> bytearray:
    """Return the frame that `laminar.batch.build` would build from the same cells, byte for byte.

    `values` and `keys` are binary, `tags` text, `timestamps` in milliseconds, `trace_ids` binary of 16 bytes;
    all have one length.

    Raises:
        BatchError: there are no records, a value is null, or the frame would exceed 2 GiB.
    """
    count = len(values)
    if count == 0:
        raise malformed("count", 0, "at least 1", "batch")
    if values.null_count:
        raise malformed("null_count", values.null_count, 0, "column value")
    columns = [_variable(Column.VALUE, values)]
    tag_mask = 0
    if keys is not None and _some(keys, count):
        columns.append(_variable(Column.KEY, keys))
    if timestamps is not None and _some(timestamps, count):
        columns.append(_numbers(Column.TIMESTAMP, timestamps.cast(pyarrow.int64())))
    if tags is not None and _some(tags, count):
        hashes, tag_mask = _hashes(tags)
        columns += [hashes, _variable(Column.TAG, tags)]
    if trace_ids is not None and _some(trace_ids, count):
        fixed = trace_ids.cast(pyarrow.binary(_TRACE_BYTES))
        columns.append(_fixed(Column.TRACE_ID, fixed, _TRACE_BYTES, missing=bytes(_TRACE_BYTES)))
    if headers is not None and any(headers):
        assert count == len(headers), f"{len(headers)} headers of {count} records"
        columns.append(
            variable(Column.HEADERS, [_ENCODER.encode(fields) if fields else None for fields in headers])
        )
    return seal(assemble(columns), Kind.DATA, count=count, tag_mask=tag_mask)


def _some(cells: pyarrow.Array, count: int) -> bool:
    """Return whether any record has a cell of this column."""
    assert len(cells) == count, f"a column of {len(cells)} cells in a batch of {count} records"
    return bool(cells.null_count < count)


def _variable(column: Column, cells: pyarrow.Array) -> Cells:
    validity, nulls = _validity(cells), cells.null_count
    if nulls:
        # In Arrow a null cell may have bytes; in a frame it has none.
        cells = pyarrow.compute.fill_null(cells, "" if pyarrow.types.is_string(cells.type) else b"")
    _, ends_buffer, data = cells.buffers()
    ends = pyarrow.Array.from_buffers(
        pyarrow.int32(), len(cells) + 1, [None, ends_buffer], offset=cells.offset
    )
    first, last = ends[0].as_py(), ends[-1].as_py()
    if first:
        ends = pyarrow.compute.subtract(ends, pyarrow.scalar(first, pyarrow.int32()))
    size = last - first
    part = memoryview(data)[first:last] if size else b""
    offsets = _bytes(ends, _OFFSET_BYTES)
    return Cells(column, Codec.NONE, 0, validity, offsets, (part,), size, size, nulls)


def _numbers(column: Column, cells: pyarrow.Array) -> Cells:
    return _fixed(column, cells, _NUMBER_BYTES, missing=0)


def _fixed(column: Column, cells: pyarrow.Array, width: int, *, missing: int | bytes) -> Cells:
    """Return a column whose cells have `width` bytes each; a null cell is stored as `missing`."""
    validity, nulls = _validity(cells), cells.null_count
    data = _bytes(pyarrow.compute.fill_null(cells, missing) if nulls else cells, width)
    return Cells(column, Codec.NONE, width, validity, b"", (data,), len(data), len(data), nulls)


def _hashes(tags: pyarrow.Array) -> tuple[Cells, int]:
    """Return the column of the tags' hashes, 0 where a record has none, and the mask of their bits."""
    coded = tags.dictionary_encode()
    known = [tag_hash(tag) for tag in coded.dictionary.to_pylist()]
    mask = reduce(or_, (1 << (value & 63) for value in known), 0)
    every = pyarrow.array(known, pyarrow.uint64()).take(coded.indices)
    return _numbers(Column.TAG_HASH, every)._replace(validity=b"", null_count=0), mask


def _validity(cells: pyarrow.Array) -> bytes:
    """Return one bit for each record, 1 where there is a cell; empty if every record has one."""
    if not cells.null_count:
        return b""
    count = len(cells)
    bits = pyarrow.compute.is_valid(cells).buffers()[1]
    size = (count + 7) // 8
    found = int.from_bytes(memoryview(bits)[:size], "little") & ((1 << count) - 1)
    return found.to_bytes(size, "little")


def _bytes(cells: pyarrow.Array, width: int) -> bytes:
    """Return the numbers of an array as they are in memory."""
    return bytes(memoryview(cells.buffers()[1])[cells.offset * width : (cells.offset + len(cells)) * width])
