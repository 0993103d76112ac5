"""The place of one partition in its topic's routes: which change created it, and whether it has ended.

A *change* of a topic's route replaces some partitions, its *inputs*, by others, its *outputs*, over the same
range of keys (counted in logical partitions); no record is copied. Entry 1 of an output names the change: the
partition is `waiting`, and takes no record before its leader has appended an `OPEN` entry. An input ends with
a `SEAL` entry: no entry that adds a record is appended after it, so the offset of the seal is the final end.

Like the table of producers this one is a function of the log: changed when an entry is appended, rolled back
when the entry is truncated. It does not know whether an entry is committed, nor how far the change is in the
catalog. Reference: `docs/consensus.md#ends-of-partitions`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec

from laminar.batch import (
    MAX_TIME_MS,
    BatchError,
    Buffer,
    Header,
    Kind,
    body_of,
    build_control,
    kind_of,
)
from laminar.http.api.documents.shared import MAX_PARTITIONS
from laminar.node.partition.state.delayed_records import Sent, delayed_change
from laminar.node.partition.state.staging_entries import prepare_adds_nothing
from laminar.wire.key_route import LOGICAL_PARTITIONS

# Kinds that an open partition takes while its leader asks whether a seal was lost: that seal, the entry that
# opens the partition, and publishes of decided batches, which the log with the seal had before the seal.
_IN_DOUBT: Final = frozenset({Kind.SEAL, Kind.OPEN, Kind.PUBLISH})
# Kinds that a partition takes when it takes no records.
_WITHOUT_RECORDS: Final = frozenset(
    {Kind.NOOP, Kind.CONFIGURATION, Kind.LOG_START, Kind.CURSOR, Kind.CHANNEL}
)

_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME_MS)]
_First = Annotated[int, msgspec.Meta(ge=0, le=LOGICAL_PARTITIONS - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=LOGICAL_PARTITIONS)]
_Group = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Several = msgspec.Meta(min_length=1, max_length=MAX_PARTITIONS)
_Some = msgspec.Meta(max_length=MAX_PARTITIONS)

Status: TypeAlias = Literal["waiting", "open", "sealed"]


class Output(msgspec.Struct, frozen=True, array_like=True):
    """A partition that a change creates: its number, range of logical partitions, and Raft group's id.

    The range are `size` logical partitions, from number `first` on.
    """

    number: _Natural
    first: _First
    size: _Size
    group: _Group


class Input(msgspec.Struct, frozen=True, array_like=True):
    """A partition that a change ends: its number, Raft group's id, final end offset, and time of its seal."""

    number: _Natural
    group: _Group
    end: _Natural
    time_ms: _Time


class SealRecord(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a `seal` entry: the change, the version of the route that it creates, and its outputs.

    The outputs are in the order of their ranges, which follow each other without a gap. `order` says whether
    readers see the records of a key in order across the change (`strict`) or may not (`weak`).
    """

    change_id: _Positive
    version: _Positive
    outputs: Annotated[list[Output], _Several]
    order: Literal["strict", "weak"]

    def frame(self) -> bytearray:
        """Return the entry's batch, not stamped yet. Raises `BatchError` if the record is not valid."""
        frame = build_control(Kind.SEAL, msgspec.msgpack.encode(self))
        seal_record(frame)
        return frame


class OpenRecord(msgspec.Struct, frozen=True, array_like=True):
    """Payload of an `open` entry: the change, its route's version, this partition's range, and the inputs.

    Two kinds of inputs are left out: those not sealed yet (in a forced change), and reclaimed ones.
    """

    change_id: _Positive
    version: _Positive
    first: _First
    size: _Size
    inputs: Annotated[list[Input], _Some]

    def frame(self) -> bytearray:
        """Return the entry's batch, not stamped yet. Raises `BatchError` if the record is not valid."""
        frame = build_control(Kind.OPEN, msgspec.msgpack.encode(self))
        open_record(frame)
        return frame


_Record = TypeVar("_Record", SealRecord, OpenRecord)
_seal_decoder = msgspec.msgpack.Decoder(SealRecord)
_open_decoder = msgspec.msgpack.Decoder(OpenRecord)


def seal_record(frame: Buffer) -> SealRecord:
    """Decode the payload of a `seal` entry from the entry's frame.

    Raises:
        BatchError: it is malformed, or its outputs contradict each other.
    """
    record = _decoded(frame, _seal_decoder, "seal entry")
    outputs = record.outputs
    _check_differ("outputs", [each.number for each in outputs], "seal entry")
    _check_differ("outputs", [each.group for each in outputs], "seal entry")
    expected = outputs[0].first
    for each in outputs:
        if each.first != expected:
            raise _bad("first", each.first, expected, f"seal entry: output {each.number}")
        expected = each.first + each.size
    _check_end(expected, "seal entry")
    return record


def open_record(frame: Buffer) -> OpenRecord:
    """Decode the payload of an `open` entry from the entry's frame.

    Raises:
        BatchError: it is malformed, or its inputs or range are impossible.
    """
    record = _decoded(frame, _open_decoder, "open entry")
    _check_differ("inputs", [each.number for each in record.inputs], "open entry")
    _check_differ("inputs", [each.group for each in record.inputs], "open entry")
    _check_end(record.first + record.size, "open entry")
    return record


def _decoded(frame: Buffer, decoder: msgspec.msgpack.Decoder[_Record], what: str) -> _Record:
    try:
        return decoder.decode(body_of(frame))
    except msgspec.DecodeError as error:
        raise BatchError("malformed", f"{what}: {error}", field="body") from error


def _check_differ(field: str, values: Sequence[int | bytes], what: str) -> None:
    if len(set(values)) != len(values):
        raise BatchError("malformed", f"{what}: two {field} are the same partition", field=field)


def _check_end(end: int, what: str) -> None:
    if end > LOGICAL_PARTITIONS:
        raise _bad("size", end, LOGICAL_PARTITIONS, f"{what}: the end of its range")


def _bad(field: str, value: int, expected: int, what: str) -> BatchError:
    message = f"{what}: {field} is {value}, not {expected}"
    return BatchError("malformed", message, field=field, value=value, limit=expected)


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """The `open` entry of a partition: its index, its append time, and its payload."""

    index: int
    time_ms: int
    record: OpenRecord


class Sealed(msgspec.Struct, frozen=True, array_like=True):
    """The `seal` entry of a partition: its index and term, the final end offset, append time and payload."""

    index: int
    term: int
    end: int
    time_ms: int
    record: SealRecord


class StoredSuccession(msgspec.Struct, frozen=True, array_like=True):
    """The table, as snapshots and `log_start` entries have it.

    `successor_of` is the id of the change that created the partition, or 0.
    """

    successor_of: int = 0
    opened: Opened | None = None
    sealed: Sealed | None = None
    # See `Succession.lacks_entries`.
    lacks_entries: bool = False


class Succession:
    """The table of one partition: the entries that opened and sealed it, and the change that created it."""

    __slots__ = ("_in_doubt", "_now", "_undo", "lacks_entries", "opened_in", "takes_records")

    def __init__(self) -> None:
        self._now = StoredSuccession()
        # (index of the entry, the table before) of changes that may be rolled back.
        self._undo: deque[tuple[int, StoredSuccession]] = deque()
        # Whether the partition is `open` as of the log's end and not `in_doubt`; each append checks this.
        self.takes_records = True
        # The version of the route in the `open` entry; 0 without such an entry.
        self.opened_in = 0
        # Whether entries were damaged on every replica, so that the tables lack them for good: a seal may be
        # among these. It stays True, and is stored with the tables, also for other replicas.
        self.lacks_entries = False
        self._in_doubt = False

    @property
    def in_doubt(self) -> bool:
        """Whether the leader refuses records until the catalog confirms that its log has not lost a seal.

        The leader sets this; it is not derived from the log.
        """
        return self._in_doubt

    @in_doubt.setter
    def in_doubt(self, doubt: bool) -> None:
        self._in_doubt = doubt
        self._set(self._now)

    @property
    def successor_of(self) -> int:
        """Id of the change that created this partition; 0 if it was created with its topic."""
        return self._now.successor_of

    @property
    def opened(self) -> Opened | None:
        """The `open` entry as of the log's end, committed or not."""
        return self._now.opened

    @property
    def sealed(self) -> Sealed | None:
        """The `seal` entry as of the log's end, committed or not."""
        return self._now.sealed

    @property
    def status(self) -> Status:
        """`waiting` before the `open` entry of an output, then `open`, then `sealed`; as of the log's end."""
        if self._now.sealed is not None:
            return "sealed"
        return "waiting" if self._now.successor_of and self._now.opened is None else "open"

    def takes(self, frame: Buffer) -> bool:
        """Return whether this entry may be appended next, in the present status of the partition."""
        if self.takes_records:
            return True
        kind = kind_of(frame)
        if kind in _WITHOUT_RECORDS:
            return True
        if self._in_doubt and self.status == "open" and kind in _IN_DOUBT:
            return True
        if kind == Kind.OPEN:
            return self.status == "waiting"
        if kind == Kind.DELAYED:
            # Delayed records that were pending at the seal are sent to the partitions that follow.
            return self.status == "sealed" and isinstance(delayed_change(frame), Sent)
        # A deleted sink must be forgotten everywhere before its name is free again.
        return kind == Kind.PREPARE and prepare_adds_nothing(frame)

    # -- the log's changes -----------------------------------------------------------------

    def appended(self, header: Header, frame: Buffer) -> None:
        """Apply a `seal` or `open` entry that is now the log's last; a second one of its kind is ignored."""
        now = self._now
        if header.kind is Kind.SEAL and now.sealed is None:
            sealed = Sealed(
                header.index, header.term, header.base_offset, header.append_time_ms, seal_record(frame)
            )
            self._put(header.index, msgspec.structs.replace(now, sealed=sealed))
        elif header.kind is Kind.OPEN and now.opened is None:
            opened = Opened(header.index, header.append_time_ms, open_record(frame))
            self._put(header.index, msgspec.structs.replace(now, opened=opened))

    def made_by(self, index: int, change_id: int) -> None:
        """Apply entry 1 of an output, which names the change that created the partition."""
        self._put(index, msgspec.structs.replace(self._now, successor_of=change_id))

    def truncated(self, index: int) -> None:
        """Roll back entry `index` and all after it, which were truncated."""
        while self._undo and self._undo[-1][0] >= index:
            _, before = self._undo.pop()
            self._set(before)

    def committed(self, index: int) -> None:
        """Forget how to roll back entries up to `index`: they are committed."""
        while self._undo and self._undo[0][0] <= index:
            self._undo.popleft()

    def _put(self, index: int, after: StoredSuccession) -> None:
        self._undo.append((index, self._now))
        self._set(after)

    def _set(self, now: StoredSuccession) -> None:
        self._now = now
        self.opened_in = 0 if now.opened is None else now.opened.record.version
        self.takes_records = self.status == "open" and not self._in_doubt

    # -- stored ----------------------------------------------------------------------------

    def stored(self) -> StoredSuccession:
        """Return the table as of the log's end, as a value for snapshots and `log_start` entries."""
        return msgspec.structs.replace(self._now, lacks_entries=self.lacks_entries)

    def stored_at(self, index: int) -> StoredSuccession:
        """Return the table as of entry `index`, which is the last committed one or a later one."""
        found = next((before for at, before in self._undo if at > index), self._now)
        return msgspec.structs.replace(found, lacks_entries=self.lacks_entries)

    def restore(self, stored: StoredSuccession) -> None:
        """Replace the table by one from a snapshot; no change before this can be rolled back."""
        self._undo.clear()
        self._set(stored)
        self.lacks_entries = stored.lacks_entries
