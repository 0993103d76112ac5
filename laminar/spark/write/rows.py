"""Split a task's rows by topic and partition, and build frames (encoded batches) of them.

1. Records of one key keep their order: rows are gathered by partition in the order in which they arrive.
2. No Python object is made of a record, except of its headers and of each distinct key.
3. Rows that were gathered and not yielded have at most `OPEN_BYTES`, plus one Arrow record batch.

Nothing here does I/O, except what the caller's `partitioner_of` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pyarrow
import pyarrow.compute

from laminar.batch.arrow.pyarrow_in import frame
from laminar.client.policy.record_accumulator import MAX_RECORD_BYTES
from laminar.client.trace_id import TRACE_ID_BYTES
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route, logical_of_key

# The largest stage. Each stage is an entry in its partition's log; `bench_state` measures what smaller ones
# cost.
STAGE_BYTES: Final = 1 << 20
STAGE_RECORDS: Final = 65_536
# A task that holds more than this yields all its rows, also in small stages.
OPEN_BYTES: Final = 32 << 20


class Partitioner:
    """The choice of a partition for each row of one topic, as the client's producers choose it.

    `route` is the topic's. Rows without a key go to one partition for each Arrow record batch, in turn; the
    first is the partition at index ``first % len(route.numbers)`` of the route.
    """

    def __init__(self, route: Route, *, first: int) -> None:
        self.route = route
        # All rows without a key of one Arrow record batch go to this partition, those of the next record
        # batch to the next partition.
        self._sticky = route.numbers[first % len(route)]
        self._partition_of = [number for number, logicals in route.ranges().items() for _ in logicals]
        assert len(self._partition_of) == LOGICAL_PARTITIONS, "a route covers all logical partitions"

    def of(self, keys: pyarrow.Array | None, given: pyarrow.Array | None, rows: int) -> pyarrow.Array | int:
        """Return the partition of each of `rows` rows: the given one, else its key's, else the sticky one.

        `keys` and `given` may be None, or have nulls. The result is an array, or a single number that stands
        for all rows. Each call is for one Arrow record batch: it moves the sticky partition on by one.

        Raises:
            ValueError: for a given partition that does not exist.
        """
        sticky = self._sticky
        self._sticky = self.route.after(sticky)
        if given is not None and given.null_count == rows:
            given = None
        if given is not None:
            self._check(given)
        if keys is None or keys.null_count == rows or len(self.route) == 1:
            found: pyarrow.Array | int = sticky
        else:
            coded = keys.dictionary_encode()
            table = [self._partition_of[logical_of_key(key)] for key in coded.dictionary.to_pylist()]
            by_key = pyarrow.array(table, pyarrow.int32()).take(coded.indices)
            found = pyarrow.compute.fill_null(by_key, sticky) if keys.null_count else by_key
        if given is None:
            return found
        return pyarrow.compute.coalesce(
            given, pyarrow.scalar(found, pyarrow.int32()) if isinstance(found, int) else found
        )

    def _check(self, given: pyarrow.Array) -> None:
        for number in pyarrow.compute.unique(given).to_pylist():
            if number is not None and number not in self.route:
                raise ValueError(
                    f"column partition: there is no partition {number}; the topic has {len(self.route)}"
                )


# What one request stages: topic, partition, frame, number of records.
Stage = tuple[str, int, bytearray, int]


class StageBuffer:
    """A buffer that groups the rows of one task by partition, and yields them as stages.

    `positions` has the position of each column by name. `topic` is the option: with None each row names its
    own. `partitioner_of` returns the partitioner of a topic; it may ask the cluster.
    """

    def __init__(
        self, positions: Mapping[str, int], *, topic: str | None, partitioner_of: Callable[[str], Partitioner]
    ) -> None:
        self._positions = positions
        self._topic = topic
        self._partitioner_of = partitioner_of
        self._known: dict[str, Partitioner] = {}
        self._open: dict[tuple[str, int], list[pyarrow.RecordBatch]] = {}
        self._sizes: dict[tuple[str, int], int] = {}

    def put(self, batch: pyarrow.RecordBatch) -> Iterator[Stage]:
        """Gather the rows of an Arrow record batch; yield the stages that are full.

        Raises:
            ValueError: for a row that cannot be written; it names the column.
        """
        if not batch.num_rows:
            return
        columns = {name: _plain(name, batch.column(at)) for name, at in self._positions.items()}
        if columns["value"].null_count:
            raise ValueError("column value: every record needs a value, but one is null")
        longest = pyarrow.compute.max(pyarrow.compute.binary_length(columns["value"])).as_py()
        if longest > MAX_RECORD_BYTES:
            raise ValueError(
                f"column value: a value has {longest} bytes; the sink writes values of up to"
                f" {MAX_RECORD_BYTES}. Append larger ones by a client (append_stream)"
            )
        _check_trace_ids(columns.get("traceid"))
        topics = columns.pop("topic", None)
        names = [name for name in columns if name != "partition"]
        rows = pyarrow.RecordBatch.from_arrays([columns[name] for name in names], names=names)
        for topic, chosen in self._by_topic(topics):
            part = rows if chosen is None else rows.filter(chosen)
            given = columns.get("partition")
            if given is not None and chosen is not None:
                given = given.filter(chosen)
            yield from self._put(topic, part, given)
        if sum(self._sizes.values()) > OPEN_BYTES:
            yield from self.finish()

    def finish(self) -> Iterator[Stage]:
        """Yield the stages of all rows that were put and not yielded yet."""
        for where in list(self._open):
            yield self._close(where)

    def _by_topic(self, topics: pyarrow.Array | None) -> Iterator[tuple[str, pyarrow.Array | None]]:
        """Yield each topic with a mask of its rows; None for the mask stands for all rows."""
        if self._topic is not None:
            yield self._topic, None
            return
        assert topics is not None, "neither a topic nor a column of topics"
        if topics.null_count:
            raise ValueError("column topic: a row has null, and no option topic is given")
        distinct = topics.unique().to_pylist()
        for topic in distinct:
            yield topic, None if len(distinct) == 1 else pyarrow.compute.equal(topics, topic)

    def _put(self, topic: str, rows: pyarrow.RecordBatch, given: pyarrow.Array | None) -> Iterator[Stage]:
        partitioner = self._known.get(topic)
        if partitioner is None:
            partitioner = self._known[topic] = self._partitioner_of(topic)
        keys = rows.column("key") if "key" in rows.schema.names else None
        for partition, part in _split(rows, partitioner.of(keys, given, rows.num_rows)):
            for piece in _cut(part):
                where = (topic, partition)
                size, held = piece.nbytes, self._open.get(where, [])
                if held and (
                    self._sizes[where] + size > STAGE_BYTES
                    or sum(each.num_rows for each in held) + piece.num_rows > STAGE_RECORDS
                ):
                    yield self._close(where)
                self._open.setdefault(where, []).append(piece)
                self._sizes[where] = self._sizes.get(where, 0) + size

    def _close(self, where: tuple[str, int]) -> Stage:
        held = self._open.pop(where)
        del self._sizes[where]
        columns = {
            name: pyarrow.concat_arrays([piece.column(name) for piece in held])
            if len(held) > 1
            else held[0].column(name)
            for name in held[0].schema.names
        }
        headers = columns.get("headers")
        made = frame(
            columns["value"],
            keys=columns.get("key"),
            tags=columns.get("tag"),
            timestamps=columns.get("timestamp"),
            trace_ids=columns.get("traceid"),
            headers=None if headers is None else [_header_map(cell) for cell in headers.to_pylist()],
        )
        return (*where, made, len(columns["value"]))


def _plain(name: str, column: pyarrow.Array) -> pyarrow.Array:
    """Return a column cast to the type that the frame's builder takes; times are floored to milliseconds."""
    if name in ("key", "value", "traceid"):
        return column.cast(pyarrow.binary())
    if name in ("tag", "topic"):
        return column.cast(pyarrow.utf8())
    if name == "timestamp":
        floored = pyarrow.compute.floor_temporal(column, unit="millisecond")
        return floored.cast(pyarrow.timestamp("ms", tz="UTC"))
    return column


def _check_trace_ids(column: pyarrow.Array | None) -> None:
    """Refuse a trace id of another length. Raises `ValueError`."""
    if column is None or column.null_count == len(column):
        return
    sizes = pyarrow.compute.min_max(pyarrow.compute.binary_length(column)).as_py()
    for size in (sizes["min"], sizes["max"]):
        if size != TRACE_ID_BYTES:
            raise ValueError(f"column traceId: a trace id has {TRACE_ID_BYTES} bytes, not {size}")


def _split(
    rows: pyarrow.RecordBatch, partitions: pyarrow.Array | int
) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
    """Yield each partition with its rows, in the order in which they came.

    `partitions` is the partition of each row, or one number for all.
    """
    if isinstance(partitions, int):
        yield partitions, rows
        return
    counts = sorted((each["values"], each["counts"]) for each in partitions.value_counts().to_pylist())
    if len(counts) == 1:
        yield counts[0][0], rows
        return
    # The sort is stable: records of one key stay in order.
    ordered = rows.take(pyarrow.compute.array_sort_indices(partitions))
    first = 0
    for partition, count in counts:
        yield partition, ordered.slice(first, count)
        first += count


def _cut(rows: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
    """Yield rows in pieces that fit into one stage each; a piece of one record may be larger."""
    if rows.num_rows > 1 and (rows.nbytes > STAGE_BYTES or rows.num_rows > STAGE_RECORDS):
        half = rows.num_rows // 2
        yield from _cut(rows.slice(0, half))
        yield from _cut(rows.slice(half))
    else:
        yield rows


def _header_map(cell: list[dict[str, Any]] | None) -> dict[str, bytes] | None:
    """Return a cell of Spark's ``array<struct<key, value>>`` as a record's headers."""
    if cell is None:
        return None
    found: dict[str, bytes] = {}
    for each in cell:
        if each["key"] is None or each["value"] is None:
            raise ValueError("column headers: every header needs a key and a value, but one is null")
        if each["key"] in found:
            raise ValueError(f"column headers: one record has {each['key']!r} twice")
        found[each["key"]] = each["value"]
    return found
