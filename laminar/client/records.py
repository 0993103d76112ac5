"""The values that the client returns for records: receipts, records, batches as read, what was staged.

They make no requests. A `ReadBatch` is a view of the requested part of a received frame, with its partition;
a `Record` is a view of one row of a batch. Columns are decoded when they are first used.
"""

from __future__ import annotations

import datetime
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from laminar.batch.large_record import size_of
from laminar.client.errors import Error

if TYPE_CHECKING:
    import pyarrow

    from laminar.batch import Batch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Receipt(NamedTuple):
    """The receipt of an append: the place of the record, and how durable it is.

    The partition has ``replicas`` replicas; a majority of them, and at least the topic's `min_replicas`, have
    the record: on disk if ``synced``, else perhaps only in memory. ``offset`` is -1 if an earlier run of a
    named producer made the record durable, and for a delayed record, which gets its offset when it is
    published: ``scheduled`` is the id of such a record.
    """

    partition: int
    offset: int
    replicas: int
    synced: bool
    scheduled: str | None = None


class Record(Generic[T_co]):
    """One record as read. ``value`` is decoded by the topic's codec; ``raw`` is its bytes."""

    __slots__ = ("_batch", "_position")

    def __init__(self, batch: ReadBatch[T_co], position: int) -> None:
        self._batch = batch
        self._position = position

    @property
    def topic(self) -> str:
        """Name of the record's topic."""
        return self._batch.topic

    @property
    def partition(self) -> int:
        """Number of the record's partition."""
        return self._batch.partition

    @property
    def offset(self) -> int:
        """Offset of the record in its partition."""
        return self._batch.base_offset + self._position

    @property
    def raw(self) -> bytes:
        """The value as bytes, not decoded by the topic's codec; b"" for a large record."""
        return self._batch.frame.values[self._position]

    @property
    def value(self) -> T_co:
        """Value of the record, decoded by the topic's codec; bytes without a codec.

        For a large record it is b"" if the topic has no codec; with a codec an `Error` is raised.
        """
        frame = self._batch.frame
        if frame.is_large and self._batch.decode is not identity:
            raise Error(
                f"the value of {self.topic}/{self.partition} at {self.offset} has {self.large_bytes} bytes",
                code="large_record",
                value=self.offset,
                hint="topic.open(record.partition, record.offset) reads it",
            )
        return self._batch.decode(self.raw)

    @property
    def large_bytes(self) -> int | None:
        """Length of the value of a large record; None for any other record.

        For a large record `raw` is empty: `Topic.open` reads the value.
        """
        frame = self._batch.frame
        return size_of(frame) if frame.is_large else None

    @property
    def key(self) -> bytes | None:
        """Key of the record as bytes, or None."""
        keys = self._batch.frame.keys
        return None if keys is None else keys[self._position]

    @property
    def tag(self) -> str | None:
        """Tag of the record (a short text by which servers filter), or None."""
        tags = self._batch.frame.tags
        return None if tags is None else tags[self._position]

    @property
    def headers(self) -> Mapping[str, bytes]:
        """Headers by name; {} if there are none."""
        headers = self._batch.frame.headers
        return {} if headers is None else headers[self._position]

    @property
    def trace_id(self) -> str | None:
        """Trace id that the producer gave the record, as 32 hexadecimal digits; None if it gave none."""
        traces = self._batch.frame.trace_ids
        found = None if traces is None else traces[self._position]
        return None if found is None else found.hex()

    @property
    def timestamp(self) -> int:
        """The time that the producer gave the record, else the time of its append; epoch milliseconds."""
        return self._batch.frame.timestamps[self._position]

    @property
    def time(self) -> datetime.datetime:
        """The `timestamp` as an aware datetime."""
        return datetime.datetime.fromtimestamp(self.timestamp / 1000, datetime.UTC)

    @property
    def text(self) -> str:
        """Value as text. Raises UnicodeDecodeError if it is not UTF-8."""
        return self.raw.decode()

    def json(self) -> Any:
        """Return the value decoded from JSON. Raises ValueError (msgspec's DecodeError) if it is not JSON."""
        return msgspec.json.decode(self.raw)

    def __repr__(self) -> str:
        return f"<Record {self.topic}/{self.partition}@{self.offset} {len(self.raw)} bytes>"


class ReadBatch(Generic[T_co]):
    """Records of one partition, read together: all from ``start_offset`` to ``next_offset - 1``.

    If the reader has a filter, only those of them that passed it, perhaps none. Reading goes on at
    ``next_offset`` in any case. ``node`` is the node that served the records. ``base_offset`` is the offset
    of the received frame's first record, which may lie before ``start_offset``.
    """

    __slots__ = (
        "_rows",
        "base_offset",
        "decode",
        "frame",
        "next_offset",
        "node",
        "partition",
        "start_offset",
        "topic",
    )

    def __init__(
        self,
        frame: Batch,
        *,
        topic: str,
        partition: int,
        start_offset: int,
        stop_offset: int,
        node: str,
        decode: Callable[[bytes], T_co],
    ) -> None:
        base_offset = frame.header.base_offset
        first = max(start_offset - base_offset, 0)
        stop = min(stop_offset - base_offset, frame.header.count)
        self.frame = frame
        self.base_offset = base_offset
        self.topic = topic
        self.partition = partition
        self.node = node
        self.decode = decode
        self.start_offset = base_offset + first
        self.next_offset = base_offset + stop
        self._rows: Sequence[int] = range(first, stop)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def _whole(self) -> bool:
        return len(self._rows) == len(self.frame)

    def only(self, pick: Callable[[Batch, range], Sequence[int]], *, start_offset: int) -> ReadBatch[T_co]:
        """Return a batch of the range from `start_offset` on, with only the records that `pick` chooses.

        `pick` gets the decoded batch and the rows of this batch's records in it; it returns the rows to keep.
        """
        rows = self._rows
        assert isinstance(rows, range), "records are filtered once"
        return self._with(pick(self.frame, rows), start_offset)

    def rest(self, offset: int) -> ReadBatch[T_co]:
        """Return the records from `offset` on, as a batch."""
        return self._with(self._rows[bisect_left(self._rows, offset - self.base_offset) :], offset)

    def _with(self, rows: Sequence[int], start_offset: int) -> ReadBatch[T_co]:
        made = ReadBatch(
            self.frame,
            topic=self.topic,
            partition=self.partition,
            start_offset=start_offset,
            stop_offset=self.next_offset,
            node=self.node,
            decode=self.decode,
        )
        made.start_offset, made.next_offset, made._rows = start_offset, self.next_offset, rows
        return made

    @property
    def values(self) -> Sequence[bytes]:
        """Values of the records as bytes, not decoded by the topic's codec."""
        return self._picked(self.frame.values)

    @property
    def keys(self) -> Sequence[bytes | None]:
        """Keys of the records; None for a record without one."""
        keys = self.frame.keys
        return [None] * len(self) if keys is None else self._picked(keys)

    def _picked(self, cells: list[T]) -> list[T]:
        if self._whole:
            return cells
        rows = self._rows
        return cells[rows.start : rows.stop] if isinstance(rows, range) else [cells[row] for row in rows]

    @property
    def offsets(self) -> Sequence[int]:
        """Offsets of the records in the partition."""
        base, rows = self.base_offset, self._rows
        if isinstance(rows, range):
            return range(base + rows.start, base + rows.stop)
        return [base + row for row in rows]

    @property
    def last_offset(self) -> int:
        """Offset of the last record; -1 if there is none."""
        return self.base_offset + self._rows[-1] if self._rows else -1

    def records(self) -> Iterator[Record[T_co]]:
        """Return an iterator over the records, which are made one by one."""
        return map(Record, repeat(self), self._rows)

    def __iter__(self) -> Iterator[Record[T_co]]:
        return self.records()

    def to_arrow(self) -> pyarrow.RecordBatch:
        """Return the batch as a pyarrow RecordBatch; columns that are not compressed are not copied."""
        from laminar.batch.arrow.pyarrow_out import to_arrow  # pyarrow is an extra

        whole, rows = to_arrow(self.frame), self._rows
        if self._whole:
            return whole
        if isinstance(rows, range) or not rows:
            return whole.slice(rows[0] if rows else 0, len(rows))
        return whole.take(rows)

    def __repr__(self) -> str:
        return f"<ReadBatch {self.topic}/{self.partition} {self.start_offset}..{self.next_offset}>"


def identity(raw: bytes) -> bytes:
    """Return `raw`: the decoder of a topic without a codec."""
    return raw


class Settled(NamedTuple):
    """The result of acknowledging, refusing or extending jobs.

    `done` is the number of records that were changed as asked. `late` are the tokens whose delivery had
    expired: nothing changed for these.
    """

    done: int
    late: tuple[str, ...]


class StagedPart(NamedTuple):
    """The part of a sink's batch that lies in one partition.

    `stages` are the numbers of the requests that staged its records there (stored them, still invisible), in
    ascending order. `acks` are the jobs of this partition that the batch acknowledges: names of channels,
    each with the tokens of its jobs.
    """

    topic: str
    partition: int
    stages: tuple[int, ...]
    acks: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Staged(NamedTuple):
    """A description of the records that one writer staged for batch `number` of a sink: small, and picklable.

    Pass it to `Sink.commit`; until then the records are stored but invisible, and the cluster drops them
    after a time if they are never committed. `epoch` is the epoch of the sink under which they were staged,
    `records` their number.
    """

    sink: str
    number: int
    epoch: int
    parts: tuple[StagedPart, ...]
    records: int
