"""The trace events of one partition: prepared when its leader proposes an entry, emitted at its commit.

A partition has a `PartitionTrace` only while its topic's setting enables it; otherwise the attribute is None,
and the only cost is the check for that. Only the replica that proposed an entry emits its events, once: a
truncated entry emits none, and the events of a leader that ends before the commit are missing.

Nothing here may block or fail an append. An error is counted and logged, and the append goes on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from laminar.batch import NO_PRODUCER, Batch, Buffer, Column, Flag, Header, Kind, has_column
from laminar.node.partition.state.channel_changes import (
    TIME_OUT,
    Acknowledged,
    Change,
    Failed,
    GivenOut,
    Retried,
    Sought,
    channel_changes,
    offsets_in,
    runs_in,
)
from laminar.node.partition.state.channels import Channel, Why
from laminar.node.partition.state.delayed_records import (
    CANCELLED,
    Added,
    Changed,
    delayed_change,
)
from laminar.node.partition.state.delayed_records import Place as DelayedPlace
from laminar.node.partition.state.pins import PinsEnded
from laminar.node.partition.state.staging_entries import publish_record
from laminar.node.partition.state.state import PartitionState
from laminar.node.trace.mode import Mode, mode_of
from laminar.node.trace.ring import Event, Known, Place, TraceRing, Who, place_of, shortened
from laminar.wire.trace import TRACEPARENT, TraceParent, parse_traceparent

Shares = Sequence[tuple[int, Who | None]]
"""Numbers of consecutive records, each with the requester that appended them."""

MOST_READ: Final = 10_000
"""Events of larger batches have neither keys nor trace ids, because reading them takes milliseconds."""
MOST_HELD: Final = 2 * MOST_READ
"""The most events and records with keys of one partition that wait for a commit; more events are dropped."""

_READ: Final = (Column.KEY, Column.TRACE_ID, Column.HEADERS)
"""The columns of a batch from which events take their fields."""
_KINDS: Final = frozenset((Kind.DATA, Kind.DELAYED, Kind.CHANNEL, Kind.PUBLISH))


class _Columns(NamedTuple):
    """The fields of a batch's records that events contain; None if no record has any.

    `sampled` is None if the flag is not needed.
    """

    keys: list[bytes | None] | None = None
    trace_ids: list[bytes | None] | None = None
    sampled: list[bool] | None = None
    parent_ids: list[bytes | None] | None = None

    def known(self, row: int) -> Known | None:
        """Return the fields of one record to remember for its later events; None if there are none."""
        if self == _NOTHING:
            return None
        return Known(
            None if self.trace_ids is None else self.trace_ids[row],
            None if self.keys is None else self.keys[row],
            self.sampled is not None and self.sampled[row],
            None if self.parent_ids is None else self.parent_ids[row],
        )


_NOTHING: Final = _Columns()
_UNKNOWN: Final = Known(None, None, False)


class _Batch(NamedTuple):
    """Records that an entry adds, whose events are emitted when the entry is committed.

    `first` is the offset of the first record; None for delayed records, which have no offsets yet. `numbers`
    are the numbers of delayed records, `due` their times.
    """

    name: str
    at_ms: int
    entry: int
    first: int | None
    length: int
    shares: Shares
    columns: _Columns
    member: str = ""
    numbers: Sequence[int | None] | None = None
    due: Sequence[int | None] | None = None


class PartitionTrace:
    """Emits the trace events of one partition: who appended, received or settled which records.

    `requester` is the requester of the entry that is proposed next; `requesters`, by channel and offset, are
    those of single records, and override it. Both are set only for the duration of one call.
    """

    __slots__ = (
        *("_held", "_pending", "_place", "_ring", "_salt", "_shares", "_waiting"),
        *("mode", "requester", "requesters"),
    )

    def __init__(self, place: Place, mode: Mode, ring: TraceRing) -> None:
        self.mode = mode
        self.requester: Who | None = None
        self.requesters: Mapping[tuple[int, int], Who] = {}
        self._place = place
        self._ring = ring
        self._salt = int.from_bytes(place.group[:8], "big")
        # By the future of its receipt: the requester of an append that waits for its batch.
        self._waiting: WeakKeyDictionary[asyncio.Future[Any], Who | None] = WeakKeyDictionary()
        # The requesters of the entry that is being proposed; None if none is.
        self._shares: Shares | None = None
        # By entry, in order: the events that its commit emits.
        self._pending: deque[tuple[int, _Batch | list[Event]]] = deque()
        self._held = 0

    # -- called by the parts of a partition ------------------------------------------------

    def waits(self, future: asyncio.Future[Any]) -> None:
        """Remember the requester of an append that is proposed later in this turn."""
        self._waiting[future] = self.requester

    def begin(self, appends: Iterable[tuple[asyncio.Future[Any], int]]) -> None:
        """Begin the proposal of an entry with these appends, each with its number of records."""
        waiting = self._waiting
        self._shares = [
            (count, waiting.pop(future) if future in waiting else self.requester) for future, count in appends
        ]

    def end(self) -> None:
        """End the proposal: entries that are appended from now on were not proposed here."""
        self._shares = None

    def appended(self, header: Header, frame: Buffer, state: PartitionState) -> None:
        """Prepare the events of an entry that is appended; `state` is the partition's state before it."""
        if self._shares is None or header.kind not in _KINDS:
            return
        try:
            found = self._of_entry(header, frame, state)
        except Exception as error:  # noqa: BLE001  # the entry is good; only its events are missing
            self._ring.failed(error, header.count)
            return
        if found:
            self._pending.append((header.index, found))
            self._held += _size(found)

    def truncated(self, index: int) -> None:
        """Drop the prepared events of entries from `index` on, which were truncated."""
        while self._pending and self._pending[-1][0] >= index:
            self._held -= _size(self._pending.pop()[1])

    def committed(self, index: int) -> None:
        """Emit the events of the entries up to `index`, which are committed."""
        pending = self._pending
        while pending and pending[0][0] <= index:
            found = pending.popleft()[1]
            self._held -= _size(found)
            if isinstance(found, _Batch):
                try:
                    self._make(found)
                # the entry is committed; only its events are missing
                except Exception as error:  # noqa: BLE001
                    self._ring.failed(error, found.length)
            else:
                for event in found:
                    self._ring.put(event)

    def extended(
        self,
        channel: Channel,
        offset: int,
        delivery: int,
        who: Who | None,
        *,
        entry: int,
        at_ms: int,
        due_ms: int,
    ) -> None:
        """Emit the event that a delivery was extended until `due_ms`; there is no log entry for that."""
        if self._certain(offset, self._mode_of(channel)):
            event = Event("extended", at_ms, self._place, offset, entry, who, channel.name, delivery)
            self._ring.put(event._replace(due_ms=due_ms))

    def read(self, offsets: Iterable[int], frames: Iterable[Buffer]) -> None:
        """Remember the keys and trace ids of batches that are given out, unless all `offsets` are known."""
        group, ring = self._place.group, self._ring
        if all(ring.known(group, offset) is not None for offset in offsets):
            return
        try:
            for frame in frames:
                columns = self._columns(frame)
                if columns == _NOTHING:
                    continue
                header = Header.unpack(frame)
                for row in range(header.count):
                    ring.know(group, header.base_offset + row, columns.known(row) or _UNKNOWN)
        except Exception as error:  # noqa: BLE001  # they are given out all the same
            self._ring.failed(error)

    @property
    def _room(self) -> int:
        """The number of further events that may wait."""
        return min(self._ring.room, MOST_HELD - self._held)

    # -- the events of an entry ------------------------------------------------------------

    def _of_entry(self, header: Header, frame: Buffer, state: PartitionState) -> _Batch | list[Event] | None:
        kind = header.kind
        assert self._shares is not None, "an entry is proposed"
        if not self.mode.limit and kind != Kind.CHANNEL:
            return None  # only a channel is traced
        if kind == Kind.DATA:
            is_named = header.producer_id != NO_PRODUCER and not header.flags & Flag.KEYED
            return _Batch(
                *("appended", header.append_time_ms, header.index, header.base_offset, header.count),
                *(self._shares or [(header.count, self.requester)], self._columns(frame)),
                member=header.producer_id.hex() if is_named else "",
            )
        if kind == Kind.CHANNEL:
            room = self._room
            found: list[Event] = []
            for change in channel_changes(frame):
                if room <= len(found):
                    self._ring.miss(_named_by(change))
                    continue
                for event in self._of_change(header, change, state):
                    if len(found) < room:
                        found.append(event)
                    else:
                        self._ring.miss(1)
            return found
        if kind == Kind.PUBLISH:
            return self._of_publish(header, frame, state)
        return self._of_delayed(header, frame, state)

    def _of_publish(self, header: Header, frame: Buffer, state: PartitionState) -> _Batch:
        due = publish_record(frame).due
        numbers, columns = None, _NOTHING
        if due is not None:
            table = state.delayed
            places = map(DelayedPlace, due.rows[::2], due.rows[1::2])
            numbers = [table.number_of(place) if table.is_pending(place) else None for place in places]
            columns = self._columns(due.frame)
        return _Batch(
            *("published", header.append_time_ms, header.index, header.base_offset, header.count),
            *([(header.count, self.requester)], columns),
            numbers=numbers,
        )

    def _of_delayed(
        self, header: Header, frame: Buffer, state: PartitionState
    ) -> _Batch | list[Event] | None:
        change = delayed_change(frame)
        if isinstance(change, Added):
            times = Batch(change.frame, verified=True).delivery_times
            numbers = range(change.first, change.first + change.count)
            return _Batch(
                *("scheduled", header.append_time_ms, header.index, None, change.count),
                *([(change.count, self.requester)], self._columns(change.frame)),
                numbers=numbers,
                due=times,
            )
        if not isinstance(change, Changed):
            return None
        return [
            Event(
                "cancelled",
                header.append_time_ms,
                self._place,
                None,
                header.index,
                self.requester,
                number=number,
            )
            for number, due_ms in zip(change.items[::3], change.items[1::3], strict=True)
            if due_ms == CANCELLED
            and state.delayed.find(number) is not None
            and self._certain(~number, self.mode)
        ]

    def _of_change(self, header: Header, change: Change, state: PartitionState) -> Iterator[Event]:
        """Yield the events of one change of the channels' table; `state` has the table before the entry."""
        if isinstance(change, PinsEnded):
            if change.done:
                pinned = state.channels.pinned((change.sink, change.number, change.epoch))
                for number, offsets in pinned.items():
                    for offset in offsets:
                        yield from self._event("acked", header, state.channels.by_id[number], offset)
            return
        channel = state.channels.by_id.get(change.channel)
        if channel is None:
            return
        if isinstance(change, GivenOut):
            yield from self._given_out(header, channel, change)
        elif isinstance(change, Acknowledged):
            for run in runs_in(change.runs):
                for offset in run:
                    if offset in channel.out:
                        yield from self._event("acked", header, channel, offset)
                    elif offset in channel.aside:
                        yield from self._event("dropped", header, channel, offset)
        elif isinstance(change, Failed):
            yield from self._failed(header, channel, change)
        elif isinstance(change, Retried):
            items = change.items
            for offset, delay_ms in zip(offsets_in(items[::2]), items[1::2], strict=True):
                aside = channel.aside.get(offset)
                if aside is not None and aside.why is Why.DEAD:
                    due_ms = header.append_time_ms + delay_ms
                    yield from self._event("replayed", header, channel, offset, due_ms=due_ms)
        elif isinstance(change, Sought):
            yield from self._sought(header, channel, change)

    def _given_out(self, header: Header, channel: Channel, change: GivenOut) -> Iterator[Event]:
        due_ms = header.append_time_ms + change.timeout_ms
        for offset in offsets_in(change.again):
            aside = channel.aside.get(offset)
            if aside is not None:
                yield from self._event(
                    *("delivered", header, channel, offset),
                    delivery=header.index,
                    attempt=aside.attempts + 1,
                    due_ms=due_ms,
                )
        for run in runs_in(change.fresh):
            for offset in run:
                if offset >= channel.next:
                    yield from self._event(
                        *("delivered", header, channel, offset),
                        delivery=header.index,
                        attempt=1,
                        due_ms=due_ms,
                    )

    def _failed(self, header: Header, channel: Channel, change: Failed) -> Iterator[Event]:
        items = change.items
        for offset, delay_ms, counts in zip(offsets_in(items[::3]), items[1::3], items[2::3], strict=True):
            if offset not in channel.out:
                continue
            if not counts:
                name = "released"
            else:
                name = "timed_out" if change.reason == TIME_OUT else "nacked"
            due_ms = None if delay_ms < 0 else header.append_time_ms + delay_ms
            reason = change.reason if name == "nacked" else ""
            yield from self._event(name, header, channel, offset, due_ms=due_ms, reason=reason)
            if delay_ms < 0:
                yield from self._event("dead", header, channel, offset, reason=change.reason)

    def _sought(self, header: Header, channel: Channel, change: Sought) -> Iterator[Event]:
        for offset in sorted(channel.out):
            yield from self._event("dropped" if change.drop else "released", header, channel, offset)
        if change.drop:
            for offset, aside in sorted(channel.aside.items()):
                if aside.why is not Why.DEAD:
                    yield from self._event("dropped", header, channel, offset)

    def _event(
        self,
        name: str,
        header: Header,
        channel: Channel,
        offset: int,
        *,
        delivery: int | None = None,
        attempt: int | None = None,
        due_ms: int | None = None,
        reason: str = "",
    ) -> Iterator[Event]:
        """Yield the event of a record in a channel, if the record is traced."""
        certain = self._certain(offset, self._mode_of(channel))
        if not certain and (certain is False or name != "delivered"):
            return
        item = channel.out.get(offset)
        if delivery is None and item is not None:
            delivery, attempt = item.delivery, item.attempt
        who = self.requesters.get((channel.id, offset), self.requester)
        yield Event(
            *(name, header.append_time_ms, self._place, offset, header.index, who, channel.name),
            *(delivery, attempt, due_ms, reason),
            if_sampled=certain is None,
        )

    # -- which records are traced ----------------------------------------------------------

    def _mode_of(self, channel: Channel) -> Mode | None:
        """Return the mode of a channel: that of its own setting, or else that of the topic."""
        setting = channel.settings.trace
        return self.mode if setting is None else mode_of(setting)

    def _certain(self, place: int, mode: Mode | None) -> bool | None:
        """Return whether a record is traced; None if that is unknown, as its "sampled" flag is forgotten."""
        if mode is None:
            return False
        if mode.by_flag:
            known = self._ring.known(self._place.group, place)
            return None if known is None else known.is_sampled
        return mode.takes(self._salt, place)

    def _make(self, batch: _Batch) -> None:
        """Emit the events of records that were added, as many as there is room for."""
        columns, numbers, ring = batch.columns, batch.numbers, self._ring
        length = min(batch.length, MOST_HELD)
        if batch.length > length and not self.mode.by_flag:
            ring.miss(self.mode.about(batch.length - length))
        rows = self._rows(batch, length)
        room = ring.room
        if len(rows) > room:
            ring.miss(len(rows) - room)
            rows = rows[:room]
        if not rows:
            return
        whos = _each(batch.shares, rows[-1] + 1)
        for row in rows:
            offset = None if batch.first is None else batch.first + row
            number = None if numbers is None else numbers[row]
            self._know(place_of(offset, number), columns.known(row))
            ring.put(
                Event(
                    *(batch.name, batch.at_ms, self._place, offset, batch.entry, whos[row]),
                    due_ms=None if batch.due is None else batch.due[row],
                    number=number,
                    member=batch.member,
                )
            )

    def _rows(self, batch: _Batch, length: int) -> Sequence[int]:
        """Return the rows of a batch, among the first `length`, whose records are traced, in order."""
        if self.mode.by_flag:
            return [row for row, is_sampled in enumerate(batch.columns.sampled or ()) if is_sampled]
        if batch.first is not None:
            return self.mode.rows(self._salt, batch.first, length)
        numbers = enumerate(batch.numbers or ())
        return [row for row, number in numbers if self.mode.takes(self._salt, ~(number or 0))]

    def _know(self, place: int, known: Known | None) -> None:
        if known is not None and (known.trace_id is not None or known.key is not None or known.is_sampled):
            self._ring.know(self._place.group, place, known)

    def _columns(self, frame: Buffer) -> _Columns:
        """Read the fields that events need from a batch; read nothing while there is no room for events."""
        if not self._room or not any(has_column(frame, each) for each in _READ):
            return _NOTHING
        batch = Batch(frame, verified=True)
        if len(batch) > MOST_READ:
            return _NOTHING
        keys, trace_ids, headers = batch.keys, batch.trace_ids, batch.headers
        found = _Columns(None if keys is None else shortened(keys), trace_ids)
        parents = [_parent(each) for each in headers or ()]
        if self.mode.reads_flags and headers is not None:
            found = found._replace(sampled=[each is not None and each.is_sampled for each in parents])
        if any(parents):
            found = _in_traces(found, parents)
        return found


def _size(pending: _Batch | list[Event]) -> int:
    """Return the number of events for which pending events or records count in the limit."""
    if isinstance(pending, list):
        return len(pending)
    return 1 if pending.columns == _NOTHING else pending.length


def _named_by(change: Change) -> int:
    """Return the approximate number of records that a change of the channels' table names."""
    if isinstance(change, GivenOut):
        return sum(change.fresh[1::2]) + len(change.again)
    if isinstance(change, Acknowledged):
        return sum(change.runs[1::2])
    if isinstance(change, Failed):
        return len(change.items) // 3
    return len(change.items) // 2 if isinstance(change, Retried) else 1


def _parent(headers: Mapping[str, bytes]) -> TraceParent | None:
    value = headers.get(TRACEPARENT)
    return None if value is None else parse_traceparent(bytes(value).decode("ascii", "replace"))


def _in_traces(found: _Columns, parents: Sequence[TraceParent | None]) -> _Columns:
    """Return columns with the fields of each `traceparent`; none for a record with another trace id."""
    traces, spans = list[bytes | None](), list[bytes | None]()
    for row, parent in enumerate(parents):
        trace_id = None if found.trace_ids is None else found.trace_ids[row]
        if trace_id is None and parent is not None:
            trace_id = parent.trace_id
        traces.append(trace_id)
        spans.append(parent.parent_id if parent is not None and parent.trace_id == trace_id else None)
    return found._replace(trace_ids=traces, parent_ids=spans)


def _each(shares: Shares, count: int) -> list[Who | None]:
    """Return the requester of each of the first `count` records; None for records beyond all shares."""
    found: list[Who | None] = []
    for length, who in shares:
        if len(found) >= count:
            break
        found += [who] * min(length, count - len(found))
    return found + [None] * (count - len(found))


class asked_by:  # reads like a statement: with asked_by(trace, who)
    """A context manager that sets the requester of the entries that are proposed within it.

    With `trace` None it does nothing.
    """

    __slots__ = ("_trace", "_who")

    def __init__(self, trace: PartitionTrace | None, who: Who | None) -> None:
        self._trace = trace
        self._who = who

    def __enter__(self) -> None:
        if self._trace is not None:
            self._trace.requester = self._who

    def __exit__(self, *_: object) -> None:
        if self._trace is not None:
            self._trace.requester = None
