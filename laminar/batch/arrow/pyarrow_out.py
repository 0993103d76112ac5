"""Batches as pyarrow's tables and record batches. Import this module only when one is wanted.

Only this module and ``pyarrow_in`` need pyarrow. It is an extra, starts threads and takes tens of megabytes,
so no node and no plain client loads it. Nodes write the same tables with ``ipc_writer``, which needs no
pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import accumulate

import pyarrow
import pyarrow.compute

from laminar.batch.arrow.ipc_writer import COLUMNS
from laminar.batch.batch import Batch
from laminar.batch.columns import NULLS, Column, Entry

# Arrow reads numbers at addresses that are multiples of this.
_ALIGNMENT = 8
_VALUE = Column.VALUE  # looking it up takes as long as making a buffer
_VARIABLE = {"key": Column.KEY, "value": _VALUE, "tag": Column.TAG}


def schema(columns: Sequence[str] | None = None) -> pyarrow.Schema:
    """Return the schema with the `columns` named, in that order; by default all but ``headers``.

    The columns are those of `ipc_writer.FIELDS`; all are nullable. Raises ValueError for another name.
    """
    return _schema(COLUMNS if columns is None else tuple(columns))


@lru_cache(maxsize=64)
def _schema(columns: tuple[str, ...]) -> pyarrow.Schema:
    # Cached: it is needed for each batch, and takes ten times as long as all the rest of a small one.
    types = {
        "offset": pyarrow.int64(),
        "timestamp": pyarrow.timestamp("us", tz="UTC"),
        "key": pyarrow.binary(),
        "value": pyarrow.binary(),
        "tag": pyarrow.utf8(),
        "headers": pyarrow.map_(pyarrow.utf8(), pyarrow.binary()),
    }
    unknown = [name for name in columns if name not in types]
    if unknown:
        raise ValueError(f"no Arrow column {unknown[0]!r}; there are {', '.join(types)}")
    return pyarrow.schema([(name, types[name]) for name in columns])


def to_arrow(batch: Batch, columns: Sequence[str] | None = None) -> pyarrow.RecordBatch:
    """Return the batch as Arrow, over the frame's own memory wherever a column is not compressed.

    Columns, or those of them that `columns` names, in that order: ``offset`` int64, ``timestamp``
    timestamp[us, UTC], ``key`` binary, ``value`` binary, ``tag`` utf8; and ``headers``, a map of utf8 to
    binary, only if named. All batches have the same schema; what this one lacks is null, as is the value
    of a record larger than a batch. The result keeps the frame alive.
    """
    wanted = schema(columns)
    if not len(batch):
        return pyarrow.RecordBatch.from_pylist([], schema=wanted)
    joined = _Joined([batch])
    arrays = [joined.chunks(field.name, field.type)[0] for field in wanted]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=wanted)


def table(batches: Iterable[Batch], columns: Sequence[str] | None = None) -> pyarrow.Table:
    """Return one table of many batches: the rows that `to_arrow` gives for each, one after the other.

    It is much cheaper than joining the results of `to_arrow`: offsets, append times and the nulls of missing
    columns are written once for many batches. So the columns of the table are divided into different chunks.
    """
    wanted = schema(columns)
    joined = _Joined([batch for batch in batches if batch.header.count])
    chunked = [pyarrow.chunked_array(joined.chunks(field.name, field.type), field.type) for field in wanted]
    return pyarrow.Table.from_arrays(chunked, schema=wanted)


class _Joined:
    """The columns of batches that hold records, as lists of chunks; a single batch gives one chunk each."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self.directories = [batch.directory() for batch in batches]
        self.present: set[int] = set().union(*self.directories)

    def chunks(self, name: str, kind: pyarrow.DataType) -> list[pyarrow.Array]:
        if name == "offset":
            return _offsets(self.batches)
        if name == "timestamp":
            return self._timestamps(kind)
        if name == "headers":
            return [_headers(batch, kind) for batch in self.batches]
        return self._variable(_VARIABLE[name], kind)

    def _variable(self, column: Column, kind: pyarrow.DataType) -> list[pyarrow.Array]:
        """Return one chunk for each batch; adjacent batches without the column share a chunk of nulls."""

        def nulls(without: Sequence[Batch]) -> pyarrow.Array:
            return pyarrow.nulls(sum(map(len, without)), kind)

        return self._by_column(column, partial(_cells, column=column, kind=kind), nulls)

    def _timestamps(self, kind: pyarrow.DataType) -> list[pyarrow.Array]:
        """Return one chunk for each batch with given times, and one for each run of batches without any.

        Records without a given time have the append time of their batch.
        """
        given = partial(_given_times, kind=kind)
        return self._by_column(Column.TIMESTAMP, given, partial(_append_times, kind=kind))

    def _by_column(
        self,
        column: Column,
        having: Callable[[Batch, Entry], pyarrow.Array],
        lacking: Callable[[Sequence[Batch]], pyarrow.Array],
    ) -> list[pyarrow.Array]:
        """Apply `having` to each batch with the column, and `lacking` to each run of batches without it."""
        if column not in self.present:
            return [lacking(self.batches)] if self.batches else []
        chunks = []
        without: list[Batch] = []
        for batch, directory in zip(self.batches, self.directories, strict=True):
            entry = directory.get(column)
            if entry is None:
                without.append(batch)
                continue
            if without:
                chunks.append(lacking(without))
                without = []
            chunks.append(having(batch, entry))
        if without:
            chunks.append(lacking(without))
        return chunks


def _offsets(batches: Sequence[Batch]) -> list[pyarrow.Array]:
    """Return the column of offsets, one chunk for each run of batches whose offsets follow each other."""
    chunks = []
    first = following = batches[0].base_offset if batches else 0
    for header in [batch.header for batch in batches]:
        if header.base_offset != following:
            chunks.append(pyarrow.arange(first, following))
            first = header.base_offset
        following = header.base_offset + header.count
    chunks.append(pyarrow.arange(first, following))
    return chunks


def _headers(batch: Batch, kind: pyarrow.DataType) -> pyarrow.Array:
    cells = batch.headers or [{}] * len(batch)
    return pyarrow.array([list(one.items()) if one else None for one in cells], kind)


def _cells(batch: Batch, entry: Entry, *, column: Column, kind: pyarrow.DataType) -> pyarrow.Array:
    count = batch.header.count
    if column is _VALUE and batch.is_large:
        return pyarrow.nulls(count, kind)
    frame = pyarrow.py_buffer(batch.frame)
    if frame.address % _ALIGNMENT == 0 and not entry.codec:
        offsets = frame.slice(entry.offsets_position, 4 * (count + 1))
        plain = frame.slice(entry.position, entry.stored_length)
    else:
        offsets = _buffer(batch, entry.offsets_position, 4 * (count + 1))
        plain = pyarrow.py_buffer(batch.plain(column))
    validity = _validity(batch, entry) if entry.flags & NULLS else None
    array = pyarrow.Array.from_buffers(kind, count, [validity, offsets, plain], entry.null_count)
    try:
        # pyarrow does not check by itself that offsets rise and text is UTF-8. `validate` checks both, faster
        # than Python could.
        array.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        raise batch.bad(error) from error
    return array


def _append_times(batches: Sequence[Batch], *, kind: pyarrow.DataType) -> pyarrow.Array:
    times = [batch.header.append_time_ms for batch in batches]
    milliseconds = pyarrow.array(times, pyarrow.timestamp("ms", tz="UTC"))
    if len(batches) == 1:
        return pyarrow.repeat(milliseconds.cast(kind)[0], len(batches[0]))
    ends = pyarrow.array(accumulate(map(len, batches)), pyarrow.int64())
    runs = pyarrow.RunEndEncodedArray.from_arrays(ends, milliseconds.cast(kind))
    return pyarrow.compute.run_end_decode(runs)


def _given_times(batch: Batch, entry: Entry, *, kind: pyarrow.DataType) -> pyarrow.Array:
    milliseconds = pyarrow.timestamp("ms", tz="UTC")
    appended = pyarrow.scalar(batch.header.append_time_ms, milliseconds)
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
    """Return bytes of the frame as an Arrow buffer; copied only where they are not aligned in memory."""
    view = memoryview(batch.frame)[position : position + size]
    buffer = pyarrow.py_buffer(view)
    return buffer if buffer.address % _ALIGNMENT == 0 else pyarrow.py_buffer(bytes(view))
