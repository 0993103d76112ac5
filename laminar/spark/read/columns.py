"""Convert Laminar's batches to the record batches that Spark takes, without touching single records.

Only the columns that the query selects are built, over the received frame's memory where it is not
compressed. Spark is strict about Arrow: a query fails unless types, order and nullability are those of
Spark's own translation of the schema, so `RecordBatchBuilder` starts from that translation. Batches of 1 to
4 MB pass Spark's socket fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Final

import pyarrow
import pyarrow.compute

from laminar.batch import Batch, Column
from laminar.batch.arrow.pyarrow_out import to_arrow
from laminar.batch.large_record import CRC_HEADER, SIZE_HEADER
from laminar.spark.read.options import COLUMNS
from laminar.spark.read.plan import EVERY_ROW, RowFilter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

LEAST_BYTES: Final = 1 << 20
MOST_BYTES: Final = 4 << 20
# For narrow columns: a batch of offsets alone would otherwise span a hundred frames.
MOST_ROWS: Final = 1 << 16

# `timestampType` as in Kafka: the producer's time, or that of the append.
PRODUCER_TIME: Final = 0
APPEND_TIME: Final = 1

# Columns that `to_arrow` builds from a batch.
_FROM_FRAME: Final = ("key", "value", "offset", "timestamp", "tag", "headers")
# Columns whose name in a fetch's parameter `fields` differs.
_FIELDS: Final = {"timestampType": "timestamp", "traceId": "trace_id"}
# Columns with one value for all rows of a range.
_CONSTANT: Final = ("topic", "partition")


def check_schema(schema: StructType) -> list[str]:
    """Return the names of a schema's columns, spelt as in `COLUMNS`: Spark ignores case.

    Raises:
        ValueError: for a column or a type that the source does not have.
    """
    by_lower = {name.lower(): name for name in COLUMNS}
    names = []
    for field in schema.fields:
        name = by_lower.get(field.name.lower())
        if name is None:
            raise ValueError(f"there is no column {field.name}; there are {', '.join(COLUMNS)}")
        given = field.dataType.simpleString()
        if given != COLUMNS[name]:
            raise ValueError(f"column {name} must be {COLUMNS[name]}, not {given}")
        names.append(name)
    return names


class RecordBatchBuilder:
    """A builder of Arrow record batches with the columns of `schema`, from batches of one partition.

    It leaves out the records that do not match the filter `rows`. `large` returns the value of a record that
    is larger than a batch, given its stub. It is called only if the query selects values; where it returns
    None, the row's value is null.
    """

    def __init__(
        self,
        schema: StructType,
        *,
        topic: str,
        partition: int,
        rows: RowFilter = EVERY_ROW,
        large: Callable[[Batch], bytes | None] = lambda stub: None,
    ) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        self._names = check_schema(schema)
        self._rows = rows
        self._large = large
        # Columns that the row filter needs, whether the query selects them or not.
        timed = rows.since_us is not None or rows.until_us is not None
        self._deciding = (["tag"] if rows.tag is not None else []) + (["timestamp"] if timed else [])
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._frame_names = [name for name in dict.fromkeys(self._names) if name in _FROM_FRAME]
        self._constants = {
            "topic": pyarrow.scalar(topic, pyarrow.utf8()),
            "partition": pyarrow.scalar(partition, pyarrow.int32()),
        }
        self._repeated: dict[str, pyarrow.Array] = {}

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The ``fields`` parameter of a fetch; None, for all, if values are selected: the rest is small."""
        if "value" in self._names:
            return None
        wanted = {_FIELDS.get(name, name) for name in self._names if name not in _CONSTANT}
        return tuple(sorted(wanted | {"offset"} | set(self._deciding)))

    def record_batches(self, pieces: Iterable[tuple[Batch, int, int]]) -> Iterator[pyarrow.RecordBatch]:
        """Yield Arrow record batches of rows `first` to `stop - 1` of each (batch, first, stop), in order.

        Small pieces are joined and large ones are cut, to `LEAST_BYTES` to `MOST_BYTES` where possible.
        """
        held: list[dict[str, pyarrow.Array]] = []
        held_bytes = held_rows = 0
        for batch, first, stop in pieces:
            columns, rows = self._columns(batch, first, stop)
            if not rows:
                continue
            size = sum(column.nbytes for column in columns.values())
            if held and (held_bytes + size > MOST_BYTES or held_rows + rows > MOST_ROWS):
                yield self._joined(held, held_rows)
                held, held_bytes, held_rows = [], 0, 0
            if size > MOST_BYTES or rows > MOST_ROWS:
                yield from self._cut(columns, rows, size)
                continue
            held.append(columns)
            held_bytes += size
            held_rows += rows
            if held_bytes >= LEAST_BYTES or held_rows == MOST_ROWS:
                yield self._joined(held, held_rows)
                held, held_bytes, held_rows = [], 0, 0
        if held:
            yield self._joined(held, held_rows)

    def _columns(self, batch: Batch, first: int, stop: int) -> tuple[dict[str, pyarrow.Array], int]:
        """Return the columns that come from the frame, by name, and the number of rows.

        Columns with one value for all rows are added when batches are joined.
        """
        found = to_arrow(batch, self._frame_names)
        columns = dict(zip(self._frame_names, found.columns, strict=True))
        if "timestampType" in self._names:
            columns["timestampType"] = _whose_time(batch)
        if "traceId" in self._names:
            columns["traceId"] = _trace_ids(batch)
        if first or stop < len(batch):
            columns = {name: column.slice(first, stop - first) for name, column in columns.items()}
        rows = stop - first
        if self._deciding:
            mask = self._mask(to_arrow(batch, self._deciding).slice(first, rows))
            rows = mask.true_count
            columns = {name: column.filter(mask) for name, column in columns.items()} if rows else {}
        if rows and batch.is_large and "value" in columns:
            self._put_large(columns, batch)
        return columns, rows

    def _put_large(self, columns: dict[str, pyarrow.Array], stub: Batch) -> None:
        """Replace the stub's value by its record's, and remove the headers that only a stub has.

        Do nothing where `large` returns None.
        """
        value = self._large(stub)
        if value is None:
            return
        columns["value"] = pyarrow.array([value], pyarrow.binary())
        if "headers" in columns:
            [cell] = columns["headers"].to_pylist()
            own = [each for each in cell or () if each[0] not in (SIZE_HEADER, CRC_HEADER)]
            columns["headers"] = pyarrow.array([own or None], columns["headers"].type)

    def _mask(self, rows: pyarrow.RecordBatch) -> pyarrow.Array:
        """Return a mask that is true for each row that matches; a row without a tag matches no tag."""
        compute = pyarrow.compute
        asked = self._rows
        checks = []
        if asked.tag is not None:
            checks.append(compute.equal(rows["tag"], asked.tag))
        if asked.since_us is not None:
            checks.append(compute.greater_equal(rows["timestamp"], _time(asked.since_us)))
        if asked.until_us is not None:
            checks.append(compute.less(rows["timestamp"], _time(asked.until_us)))
        return reduce(compute.and_, checks)

    def _cut(self, columns: dict[str, pyarrow.Array], rows: int, size: int) -> Iterator[pyarrow.RecordBatch]:
        """Yield a large batch in slices, which copy nothing. A record over `MOST_BYTES` is one slice."""
        at_once = max(1, min(MOST_ROWS, rows * MOST_BYTES // max(1, size)))
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            part = {name: column.slice(first, count) for name, column in columns.items()}
            yield self._joined([part], count)

    def _joined(self, held: Sequence[dict[str, pyarrow.Array]], rows: int) -> pyarrow.RecordBatch:
        arrays = []
        for name, field in zip(self._names, self._schema, strict=True):
            if name in _CONSTANT:
                arrays.append(self._constant(name, rows))
                continue
            parts = [columns[name] for columns in held]
            array = parts[0] if len(parts) == 1 else pyarrow.concat_arrays(parts)
            arrays.append(_as_structs(array, field.type) if name == "headers" else array)
        return pyarrow.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _constant(self, name: str, rows: int) -> pyarrow.Array:
        """Return the column `topic` or `partition` with `rows` rows: a slice of the longest made so far."""
        known = self._repeated.get(name)
        if known is None or len(known) < rows:
            known = self._repeated[name] = pyarrow.repeat(self._constants[name], rows)
        return known.slice(0, rows)


def _time(at_us: int) -> pyarrow.Scalar:
    return pyarrow.scalar(at_us, pyarrow.timestamp("us", tz="UTC"))


def _whose_time(batch: Batch) -> pyarrow.Array:
    """Return for each row `PRODUCER_TIME` or `APPEND_TIME`: the producer may have given a time or not."""
    kind = pyarrow.int32()
    if batch.entry(Column.TIMESTAMP) is None:
        return pyarrow.repeat(pyarrow.scalar(APPEND_TIME, kind), len(batch))
    given = batch.given_timestamps
    assert given is not None, "a batch with a column of times has no times"
    return pyarrow.array([APPEND_TIME if time is None else PRODUCER_TIME for time in given], kind)


def _trace_ids(batch: Batch) -> pyarrow.Array:
    """Return each row's trace id of 16 bytes, or null."""
    entry = batch.entry(Column.TRACE_ID)
    if entry is None:
        return pyarrow.nulls(len(batch), pyarrow.binary())
    return pyarrow.array(batch.trace_ids, pyarrow.binary())


def _as_structs(headers: pyarrow.Array, kind: pyarrow.DataType) -> pyarrow.Array:
    """Return Arrow's map as Spark's ``array<struct<key, value>>``, over the same buffers."""
    structs = pyarrow.StructArray.from_arrays(
        [headers.keys, headers.items], fields=list(kind.value_type.fields)
    )
    validity, ends = headers.buffers()[:2]
    return pyarrow.Array.from_buffers(
        kind, len(headers), [validity, ends], offset=headers.offset, children=[structs]
    )
