"""Record batches of a task on their way into a topic: by topic and partition, as frames. No I/O.

1. Records of one key keep their order: rows are gathered by partition in the order in which they come.
2. No Python object is made of a record, but for its headers, and of each distinct key.
3. What is gathered and not handed out stays below `OPEN_BYTES` and what came last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pyarrow
import pyarrow.compute

from laminar.batch.arrow.pyarrow_in import frame
from laminar.client.policy.record_accumulator import MAX_RECORD_BYTES
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route, logical_of_key

# A stage is an entry in its partition's log: see `bench_state` for what smaller ones cost.
STAGE_BYTES: Final = 1 << 20
STAGE_RECORDS: Final = 65_536
OPEN_BYTES: Final = 32 << 20


class Places:
    """Which partition of a topic a row belongs to."""

    def __init__(self, partitions: int, *, first: int) -> None:
        route = Route.even(partitions)
        self.partitions = partitions
        # Rows without a key go to one partition for as long as a batch lasts, then to the next.
        self._sticky = first % partitions
        self._partition_of = [
            number for number, logicals in enumerate(route.ranges()) for _ in range(len(logicals))
        ]
        assert len(self._partition_of) == LOGICAL_PARTITIONS, "a route covers all logical partitions"

    def of(self, keys: pyarrow.Array | None, given: pyarrow.Array | None, rows: int) -> pyarrow.Array | int:
        """The partition of each row: the given one, else the key's, else this batch's. One number: of all."""
        sticky = self._sticky
        self._sticky = (sticky + 1) % self.partitions
        if given is not None and given.null_count == rows:
            given = None
        if given is not None:
            self._check(given)
        if keys is None or keys.null_count == rows or self.partitions == 1:
            found: pyarrow.Array | int = sticky
        else:
            coded = keys.dictionary_encode()
            table = [self._partition_of[logical_of_key(key)] for key in coded.dictionary.to_pylist()]
            places = pyarrow.array(table, pyarrow.int32()).take(coded.indices)
            found = pyarrow.compute.fill_null(places, sticky) if keys.null_count else places
        if given is None:
            return found
        return pyarrow.compute.coalesce(
            given, pyarrow.scalar(found, pyarrow.int32()) if isinstance(found, int) else found
        )

    def _check(self, given: pyarrow.Array) -> None:
        bounds = pyarrow.compute.min_max(given).as_py()
        for number in (bounds["min"], bounds["max"]):
            if not 0 <= number < self.partitions:
                raise ValueError(f"column partition: {number} is not one of {self.partitions} partitions")


# Where a frame goes: topic, partition, frame, records.
Stage = tuple[str, int, bytearray, int]


class Rows:
    """The rows of one task. `places_of` tells of a topic's partitions; it may ask the cluster."""

    def __init__(
        self, positions: Mapping[str, int], *, topic: str | None, places_of: Callable[[str], Places]
    ) -> None:
        self._positions = positions
        self._topic = topic
        self._places_of = places_of
        self._known: dict[str, Places] = {}
        self._open: dict[tuple[str, int], list[pyarrow.RecordBatch]] = {}
        self._sizes: dict[tuple[str, int], int] = {}

    def put(self, batch: pyarrow.RecordBatch) -> Iterator[Stage]:
        """Gather the rows of a batch; yields the stages that are full."""
        if not batch.num_rows:
            return
        columns = {name: _plain(name, batch.column(at)) for name, at in self._positions.items()}
        if columns["value"].null_count:
            raise ValueError("column value: a record has a value, and here one is null")
        longest = pyarrow.compute.max(pyarrow.compute.binary_length(columns["value"])).as_py()
        if longest > MAX_RECORD_BYTES:
            raise ValueError(
                f"column value: a record of {longest} bytes; the sink writes values of up to"
                f" {MAX_RECORD_BYTES}. Larger ones are appended by a client, as a stream (append_stream)"
            )
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
        """The stages that are left: of all that was put and not yielded yet."""
        for where in list(self._open):
            yield self._close(where)

    def _by_topic(self, topics: pyarrow.Array | None) -> Iterator[tuple[str, pyarrow.Array | None]]:
        """Each topic, and which rows are its; None is all of them."""
        if self._topic is not None:
            yield self._topic, None
            return
        assert topics is not None, "neither a topic nor a column of topics"
        if topics.null_count:
            raise ValueError("column topic: null, and there is no option topic")
        distinct = topics.unique().to_pylist()
        for topic in distinct:
            yield topic, None if len(distinct) == 1 else pyarrow.compute.equal(topics, topic)

    def _put(self, topic: str, rows: pyarrow.RecordBatch, given: pyarrow.Array | None) -> Iterator[Stage]:
        places = self._known.get(topic)
        if places is None:
            places = self._known[topic] = self._places_of(topic)
        keys = rows.column("key") if "key" in rows.schema.names else None
        for partition, part in _split(rows, places.of(keys, given, rows.num_rows)):
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
            headers=None if headers is None else [_header_map(cell) for cell in headers.to_pylist()],
        )
        return (*where, made, len(columns["value"]))


def _plain(name: str, column: pyarrow.Array) -> pyarrow.Array:
    """A column in the one type that a frame is made of, whatever Spark was told to write text as."""
    if name in ("key", "value"):
        return column.cast(pyarrow.binary())
    if name in ("tag", "topic"):
        return column.cast(pyarrow.utf8())
    if name == "timestamp":
        floored = pyarrow.compute.floor_temporal(column, unit="millisecond")
        return floored.cast(pyarrow.timestamp("ms", tz="UTC"))
    return column


def _split(
    rows: pyarrow.RecordBatch, places: pyarrow.Array | int
) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
    """The rows of each partition, in their order."""
    if isinstance(places, int):
        yield places, rows
        return
    counts = sorted((each["values"], each["counts"]) for each in places.value_counts().to_pylist())
    if len(counts) == 1:
        yield counts[0][0], rows
        return
    # Stable: what has one key stays in order.
    ordered = rows.take(pyarrow.compute.array_sort_indices(places))
    first = 0
    for partition, count in counts:
        yield partition, ordered.slice(first, count)
        first += count


def _cut(rows: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
    """Rows in pieces for one stage each; a record alone may be larger."""
    if rows.num_rows > 1 and (rows.nbytes > STAGE_BYTES or rows.num_rows > STAGE_RECORDS):
        half = rows.num_rows // 2
        yield from _cut(rows.slice(0, half))
        yield from _cut(rows.slice(half))
    else:
        yield rows


def _header_map(cell: list[dict[str, Any]] | None) -> dict[str, bytes] | None:
    """A cell of Spark's ``array<struct<key, value>>`` as a record has it."""
    if cell is None:
        return None
    found: dict[str, bytes] = {}
    for each in cell:
        if each["key"] is None or each["value"] is None:
            raise ValueError("column headers: a header has a key and a value, and here one is null")
        if each["key"] in found:
            raise ValueError(f"column headers: {each['key']!r} is there twice in one record")
        found[each["key"]] = each["value"]
    return found
