"""The values that the client returns: receipts, records, batches as read, descriptions.

They make no requests. A `ReadBatch` is a view of the requested part of a received frame, with its partition;
a `Record` is a view of one row of a batch. Columns are decoded when they are first used.
"""

from __future__ import annotations

import base64
import datetime
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicInfo:
    """A topic's description, from ``GET /v1/topics/{t}``. ``raw`` is the whole answer."""

    topic: str
    partitions: int
    replicas: int
    settings: Mapping[str, Any]
    route: int
    raw: Mapping[str, Any]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> TopicInfo:
        """Return the description in an answer of ``GET /v1/topics/{t}``."""
        return cls(
            topic=str(answer["topic"]),
            partitions=int(answer["partitions"]),
            replicas=int(answer.get("replicas", 0)),
            settings=cast("Mapping[str, Any]", answer.get("settings") or {}),
            route=int(answer.get("route", 0)),
            raw=answer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInfo:
    """One partition of a topic, from ``GET /v1/topics/{t}/partitions``.

    `start_offset` is the first offset that is kept, `end_offset` the offset after the last committed record.
    """

    partition: int
    leader: str | None
    replicas: tuple[str, ...]
    in_sync: int
    start_offset: int
    end_offset: int
    term: int
    raw: Mapping[str, Any]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> PartitionInfo:
        """Return the partition that one row of the answer describes."""
        replicas = answer.get("replicas") or ()
        return cls(
            partition=int(answer["partition"]),
            leader=(answer.get("leader") or {}).get("node"),
            replicas=tuple(str(each["node"]) for each in replicas),
            in_sync=sum(1 for each in replicas if each.get("in_sync", True)),
            start_offset=int(answer.get("start_offset") or 0),
            end_offset=int(answer.get("end_offset") or 0),
            term=int(answer.get("term") or 0),
            raw=answer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteInfo:
    """The route of a topic, from ``GET /v1/topics/{t}/routes``.

    Keys are hashed to 65,536 *logical partitions*. `ranges` has by partition the logical partitions whose
    records it takes. `ends` has, for each partition that takes no more records, its final end offset.
    `changing` is the version of the next route while a split, merge or move is under way, else None.
    """

    version: int
    ranges: Mapping[int, range]
    ends: Mapping[int, int]
    changing: int | None
    raw: Mapping[str, Any]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> RouteInfo:
        """Return the route in an answer of ``GET /v1/topics/{t}/routes``."""
        (route,) = answer["routes"]
        change = answer.get("change")
        changes = [*answer.get("changes", ()), *([change] if change else [])]
        return cls(
            version=int(route["version"]),
            ranges={
                int(held["partition"]): range(int(held["from"]), int(held["to"])) for held in route["ranges"]
            },
            ends={
                int(held["partition"]): int(held["end"])
                for each in changes
                for held in each["inputs"]
                if held["end"] is not None
            },
            changing=int(change["version"]) if change else None,
            raw=answer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelInfo:
    """A channel: its settings, and counts of its records in the partitions whose leaders answered.

    `settings` leaves out settings that have their default. `depth` is an upper bound of the number of records
    still to be given out. `out` is the number of records that consumers have at the moment; `pinned` of these
    wait for a transaction that acknowledges them. `aside` is the number of records that wait for their next
    attempt, `dead` of those that failed for good and wait for an operator, `lost` of those that were trimmed
    before they were acknowledged. `oldest_age_s` is the age of the oldest record that is neither acknowledged
    nor dead. If `blocked` is true, too many records are out or aside, so that no new ones are given out.
    `kept_bytes` is the number of bytes in the log that are kept only because channels still need them.
    `opening` are the partitions in which the channel is not open yet; `unanswered` those whose leaders did
    not answer.
    """

    channel: str
    id: int
    version: int
    settings: Mapping[str, Any]
    depth: int
    out: int
    pinned: int
    aside: int
    dead: int
    lost: int
    oldest_age_s: float | None
    blocked: bool
    kept_bytes: int
    opening: Sequence[int]
    unanswered: Sequence[int]
    raw: Mapping[str, Any]

    @property
    def paused(self) -> bool:
        """Whether the channel is paused, so that nothing is given out."""
        return bool(self.settings.get("paused", False))

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> ChannelInfo:
        """Return the channel that the JSON of an answer describes."""
        oldest = answer.get("oldest_age_ms")
        return cls(
            channel=str(answer["channel"]),
            id=int(answer["id"]),
            version=int(answer["version"]),
            settings=dict(answer["settings"]),
            depth=int(answer["depth"]),
            out=int(answer["out"]),
            pinned=int(answer.get("pinned", 0)),
            aside=int(answer["aside"]),
            dead=int(answer["dead"]),
            lost=int(answer["lost"]),
            oldest_age_s=None if oldest is None else oldest / 1000,
            blocked=bool(answer["blocked"]),
            kept_bytes=int(answer.get("kept_bytes", 0)),
            opening=list(answer["opening"]),
            unanswered=list(answer["unanswered"]),
            raw=answer,
        )


class Settled(NamedTuple):
    """The result of acknowledging, refusing or extending jobs.

    `done` is the number of records that were changed as asked. `late` are the tokens whose delivery had
    expired: nothing changed for these.
    """

    done: int
    late: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AsideInfo:
    """A record of a channel that is aside: it waits for its next attempt, or is dead.

    `attempts` is the number of failed attempts, `reason` the reason of the last one. `time` (RFC 3339) is the
    time of the next attempt, or when the record became dead. With `waits_for_key` the record was not tried
    and has no time: an earlier record of its key goes first. `token` names the record for `Channel.replay`
    and `Channel.drop`; `Topic.open` reads its value. If `unreadable` is true the leader could not read the
    record, and `key` and `tag` are not known.
    """

    partition: int
    offset: int
    token: str
    attempts: int
    time: str | None
    waits_for_key: bool
    reason: str
    key: bytes | None = None
    tag: str | None = None
    unreadable: bool = False

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> AsideInfo:
        """Return the record that one row of a list of records aside or dead describes."""
        key = answer["key"].encode() if "key" in answer else None
        return cls(
            partition=int(answer["partition"]),
            offset=int(answer["offset"]),
            token=str(answer["token"]),
            attempts=int(answer["attempts"]),
            time=None if answer["waits_for_key"] else str(answer["at"]),
            waits_for_key=bool(answer["waits_for_key"]),
            reason=str(answer["reason"]),
            key=base64.b64decode(answer["key_base64"]) if "key_base64" in answer else key,
            tag=answer.get("tag"),
            unreadable=bool(answer.get("unreadable", False)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorInfo:
    """A cursor: by partition its position, its lag in records, and its owner.

    `overtaken_by` has, for partitions in which records were trimmed before the cursor passed them, the number
    of these records; `lag` includes them. `owners` has the members of a group that own partitions; `changed`
    is the time of the last move. `waits_for` has the partitions that may not be read yet, because they
    replaced others: for each, the partitions that the cursor must finish first, with their ends.
    """

    cursor: str
    positions: Mapping[int, int]
    lag: Mapping[int, int]
    owners: Mapping[int, str]
    overtaken_by: Mapping[int, int]
    waits_for: Mapping[int, Mapping[int, int]]
    changed: str
    raw: Mapping[str, Any]

    @property
    def overtaken(self) -> bool:
        """Whether records were trimmed before the cursor passed them."""
        return bool(self.overtaken_by)

    @property
    def total_lag(self) -> int:
        """Number of records between the cursor and the ends of all partitions."""
        return sum(self.lag.values())

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> CursorInfo:
        """Return the cursor that the JSON of an answer describes."""

        def by_partition(name: str) -> dict[int, Any]:
            return {int(number): value for number, value in (answer.get(name) or {}).items()}

        return cls(
            cursor=str(answer["cursor"]),
            positions=by_partition("positions"),
            lag=by_partition("lag"),
            owners=by_partition("owners"),
            overtaken_by=by_partition("overtaken_by"),
            waits_for={
                number: {int(before): int(end) for before, end in ends.items()}
                for number, ends in by_partition("waits_for").items()
            },
            changed=str(answer.get("changed", "")),
            raw=answer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trimmed:
    """The result of `Topic.delete_before`: it removed `deleted` records from `from_offset` on.

    `start_offset` is the first offset that is kept. It is the first one of a batch, so it may be before the
    requested offset. `held_back_by` are nodes whose replicas have not received all of the records yet: these
    records are kept for them.
    """

    partition: int
    deleted: int
    from_offset: int
    start_offset: int
    dry_run: bool
    held_back_by: tuple[str, ...]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Trimmed:
        """Return the result in the answer to a trim."""
        return cls(
            partition=int(answer["partition"]),
            deleted=int(answer["deleted"]),
            from_offset=int(answer["from_offset"]),
            start_offset=int(answer["start_offset"]),
            dry_run=bool(answer["dry_run"]),
            held_back_by=tuple(str(node) for node in answer.get("held_back_by") or ()),
        )


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


class SinkInfo(NamedTuple):
    """A sink's description, from ``GET /v1/sinks/{sink}``.

    `committed` is the number of the last committed batch, None before the first; `fingerprint` is the text
    that its writer gave for it, "" for none. `publishing` says that not all partitions show the batch yet.
    `once` says that the sink is a single-use one, which the cluster forgets some time after its batch.
    `changed` is the time when the sink was last begun or committed. `deleting` says that its deletion has
    begun and is not finished.
    """

    sink: str
    epoch: int
    committed: int | None
    publishing: bool
    fingerprint: str = ""
    once: bool = False
    changed: str = ""
    deleting: bool = False

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> SinkInfo:
        """Return the sink that the JSON of an answer describes."""
        committed = answer["committed"]
        return cls(
            str(answer["sink"]),
            int(answer["epoch"]),
            None if committed is None else int(committed),
            bool(answer["publishing"]),
            str(answer.get("fingerprint") or ""),
            bool(answer.get("once")),
            str(answer.get("changed") or ""),
            bool(answer.get("deleting")),
        )
