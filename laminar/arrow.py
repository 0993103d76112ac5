"""Batches as pyarrow's objects: the only place that imports pyarrow, and only when it is asked to.

pyarrow is an extra, starts threads and costs tens of megabytes, so no node and no plain client loads it.
Servers write the same tables with ``arrow_ipc``, which needs none.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from laminar.arrow_ipc import COLUMNS
from laminar.columns import NULLS, Column, Entry
from laminar.view import Batch

if TYPE_CHECKING:
    import pyarrow

_VARIABLE = {"key": Column.KEY, "value": Column.VALUE, "tag": Column.TAG}


def schema(columns: Sequence[str] | None = None) -> pyarrow.Schema:
    """The schema of every batch, or of the `columns` named, in that order; all fields are nullable.

    The columns are those of `arrow_ipc.FIELDS`; ``headers``, a map, only if named.
    """
    import pyarrow

    types = {
        "offset": pyarrow.int64(),
        "timestamp": pyarrow.timestamp("us", tz="UTC"),
        "key": pyarrow.binary(),
        "value": pyarrow.binary(),
        "tag": pyarrow.utf8(),
        "headers": pyarrow.map_(pyarrow.utf8(), pyarrow.binary()),
    }
    chosen = COLUMNS if columns is None else columns
    unknown = [name for name in chosen if name not in types]
    if unknown:
        raise ValueError(f"no Arrow column {unknown[0]!r}; there are {', '.join(types)}")
    return pyarrow.schema([(name, types[name]) for name in chosen])


def record_batch(batch: Batch, columns: Sequence[str] | None = None) -> pyarrow.RecordBatch:
    """`Batch.to_arrow`. What is not compressed stays in the frame's memory, which it keeps alive."""
    import pyarrow

    wanted = schema(columns)
    arrays = []
    for field in wanted:
        if field.name == "offset":
            offsets = array("q", range(batch.base_offset, batch.next_offset))
            arrays.append(
                pyarrow.Array.from_buffers(field.type, len(batch), [None, pyarrow.py_buffer(offsets)])
            )
        elif field.name == "timestamp":
            arrays.append(_timestamps(batch, field.type))
        elif field.name == "headers":
            cells = batch.headers or [{}] * len(batch)
            arrays.append(pyarrow.array([list(one.items()) if one else None for one in cells], field.type))
        else:
            arrays.append(_variable(batch, _VARIABLE[field.name], field.type))
    return pyarrow.RecordBatch.from_arrays(arrays, schema=wanted)


def _variable(batch: Batch, column: Column, kind: pyarrow.DataType) -> pyarrow.Array:
    import pyarrow

    entry, plain = batch.entry(column), batch.plain(column)
    if entry is None or plain is None:
        return pyarrow.nulls(len(batch), kind)
    offsets = _buffer(batch, entry.offsets_position, 4 * (len(batch) + 1))
    array = pyarrow.Array.from_buffers(
        kind,
        len(batch),
        [_validity(batch, entry), offsets, pyarrow.py_buffer(plain)],
        null_count=entry.null_count,
    )
    try:
        # Arrow believes offsets, and text to be UTF-8; here they are looked at, faster than we could.
        array.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        raise batch.bad(error) from error
    return array


def _timestamps(batch: Batch, kind: pyarrow.DataType) -> pyarrow.Array:
    import pyarrow
    import pyarrow.compute

    milliseconds = pyarrow.timestamp("ms", tz="UTC")
    appended = pyarrow.scalar(batch.header.append_time_ms, milliseconds)
    entry = batch.entry(Column.TIMESTAMP)
    if entry is None:
        return pyarrow.repeat(appended.cast(kind), len(batch))
    times = pyarrow.Array.from_buffers(
        milliseconds,
        len(batch),
        [_validity(batch, entry), _buffer(batch, entry.position, 8 * len(batch))],
        null_count=entry.null_count,
    )
    try:
        return pyarrow.compute.fill_null(times, appended).cast(kind)
    except pyarrow.ArrowInvalid as error:
        raise batch.bad(error) from error


def _validity(batch: Batch, entry: Entry) -> pyarrow.Buffer | None:
    if not entry.flags & NULLS:
        return None
    return _buffer(batch, entry.validity_position, (len(batch) + 7) // 8)


def _buffer(batch: Batch, position: int, size: int) -> pyarrow.Buffer:
    """Bytes of the frame as Arrow wants them: where the frame lies askew in memory, a small copy."""
    import pyarrow

    view = memoryview(batch.frame)[position : position + size]
    buffer = pyarrow.py_buffer(view)
    return buffer if buffer.address % 8 == 0 else pyarrow.py_buffer(bytes(view))
