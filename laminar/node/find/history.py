"""The history of one record: events, from the entries of its partition's log that affect the record.

Each delivery is an entry of the log (docs/channels.md), so the history of a record is in the log after it.
The table of channels is rebuilt from these entries by its own code, for this record only: so the events are
exact, and none comes from an entry that is not committed. A history needs no data that are written in
advance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args

import msgspec

from laminar.batch import Buffer, Header, Kind, body_of
from laminar.node.consensus.log_start import log_start_record
from laminar.node.partition.state.channel_changes import (
    TIME_OUT,
    Acknowledged,
    Change,
    Failed,
    Opened,
    Retried,
    Sought,
    channel_changes,
    channel_entry,
)
from laminar.node.partition.state.channels import Aside, Channel, Channels, Out, Started, StoredChannel, Why
from laminar.node.partition.state.cursors import CursorChange
from laminar.node.partition.state.derived_state import decode_state
from laminar.node.partition.state.pins import PinsEnded, StoredPins
from laminar.wire.channels import ChannelSettings

T = TypeVar("T")

MOST_CURSORS: Final = 64
"""The most cursors that are followed until they pass the record; with more `is_complete` is False."""
KINDS: Final = frozenset((Kind.CHANNEL, Kind.CURSOR, Kind.LOG_START, Kind.SEAL))
"""The kinds of the entries that may affect a record before them."""

EventName = Literal[
    "appended",
    "published",
    "waiting",
    "delivered",
    "acked",
    "nacked",
    "timed_out",
    "released",
    "dead",
    "replayed",
    "moved",
    "dropped",
    "passed",
    "sought",
    "lost",
    "closed",
    "read",
    "rewound",
    "expired",
    "sealed",
]
EVENTS: Final = get_args(EventName)


class Event(NamedTuple):
    """An event of the record, caused by the entry of this Raft index and append time (ms).

    `delivery` is the number of the delivery. `due_ms` is the time of the next attempt; for the event
    "delivered", the time at which the delivery expires.
    """

    name: EventName
    entry: int
    time_ms: int
    channel: str | None = None
    cursor: str | None = None
    delivery: int | None = None
    attempt: int | None = None
    due_ms: int | None = None
    reason: str = ""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The point up to which a log was read, for a token: index of the last entry, and the state there."""

    index: int
    is_complete: bool
    channels: list[StoredChannel] = []
    pins: list[StoredPins] = []
    cursors: list[str] = []
    """The cursors that have not passed the record yet."""
    is_expired: bool = False
    not_theirs: list[int] = []


class History:
    """The history of the record at `offset`; `events` are those of all entries taken so far.

    `names` are the names of the present channels, by id.
    """

    def __init__(self, offset: int, place: Place, names: Mapping[int, str]) -> None:
        self.events: list[Event] = []
        self.offset = offset
        self.index = place.index
        self.is_complete = place.is_complete
        self._channels = Channels()
        self._channels.restore(place.channels, place.pins)
        self._cursors = dict.fromkeys(place.cursors)
        self._is_expired = place.is_expired
        self._names = names
        # Channels that were opened after the record, and do not give it out.
        self._not_theirs = dict.fromkeys(place.not_theirs)

    def place(self) -> Place:
        """Return how far the log was read, with the state there, to continue from."""
        self._forget_others()
        return Place(
            self.index,
            self.is_complete,
            self._channels.stored(),
            self._channels.stored_pins(),
            list(self._cursors),
            self._is_expired,
            list(self._not_theirs),
        )

    def take(self, frames: Sequence[Buffer]) -> None:
        """Apply committed entries (of `KINDS`), in order, and add their events."""
        for frame in frames:
            header = Header.unpack(frame)
            self.index = header.index
            if header.kind == Kind.CHANNEL:
                for change in channel_changes(frame):
                    self._change(header, change)
            elif header.kind == Kind.CURSOR:
                self._cursor(header, msgspec.msgpack.decode(body_of(frame), type=CursorChange))
            elif header.kind == Kind.LOG_START:
                self._start(header, frame)
            elif header.kind == Kind.SEAL:
                self._note("sealed", header)

    def lacks(self, last_index: int) -> None:
        """Skip entries up to `last_index`, which cannot be read: so events may be missing."""
        self.index = max(self.index, last_index)
        self.is_complete = False

    # -- channels --------------------------------------------------------------------------

    def _change(self, header: Header, change: Change) -> None:
        known = self._channels.by_id
        if isinstance(change, PinsEnded):
            pass
        elif isinstance(change, Opened):
            if change.channel not in known and change.next > self.offset:
                self._not_theirs[change.channel] = None
        elif change.channel and change.channel not in known:
            # It was opened before the record was appended, so it had not reached the record then.
            name = self._names.get(change.channel, "")
            restored = StoredChannel(change.channel, name, 0, ChannelSettings(), 0, None, 0, [], [])
            self._channels.restore([*self._channels.stored(), restored], self._channels.stored_pins())
            known = self._channels.by_id
        before = {number: _state(channel, self.offset) for number, channel in known.items()}
        self._channels.appended(header, channel_entry([change]))
        self._channels.committed(header.index)
        known = self._channels.by_id
        for number, was in before.items():
            channel = known.get(number)
            now = None if channel is None else _state(channel, self.offset)
            if was != now:
                self._not_theirs.pop(number, None)
                self._say(header, number, was, now, change)
        self._forget_others()

    def _say(self, header: Header, channel: int, was: _State, now: _State | None, change: Change) -> None:
        name = was.name
        at: dict[str, Any] = {"channel": name or str(channel)}
        if isinstance(was.item, Out):
            at |= {"delivery": was.item.delivery, "attempt": was.item.attempt}
        item = None if now is None else now.item
        if now is None:
            if was.item is not None or not was.is_passed:
                self._note("closed", header, **at)
        elif isinstance(item, Out):
            at |= {"delivery": item.delivery, "attempt": item.attempt}
            self._note("delivered", header, due_ms=header.append_time_ms + item.timeout_ms, **at)
        elif isinstance(item, Aside):
            self._say_aside(header, was, item, change, at)
        elif was.item is not None:
            self._say_ended(header, was, change, at)
        elif was.is_passed != now.is_passed:
            self._note("sought" if isinstance(change, Sought) else "passed", header, **at)

    def _say_aside(
        self, header: Header, was: _State, item: Aside, change: Change, at: dict[str, Any]
    ) -> None:
        reason, due_ms = item.reason, item.due_ms
        if item.why is Why.BUSY:
            self._note("waiting", header, **at)
        elif item.why is Why.DEAD:
            self._note("dead", header, reason=reason, **at)
        elif isinstance(change, Failed):
            counts = isinstance(was.item, Out) and item.attempts == was.item.attempt
            name: EventName = "released"
            if counts:
                name = "timed_out" if reason == TIME_OUT else "nacked"
            self._note(name, header, due_ms=due_ms, reason=reason if name == "nacked" else "", **at)
        elif isinstance(change, Retried):
            is_dead = isinstance(was.item, Aside) and was.item.why is Why.DEAD
            self._note("replayed" if is_dead else "moved", header, due_ms=due_ms, **at)
        else:
            self._note("sought", header, due_ms=due_ms, **at)

    def _say_ended(self, header: Header, was: _State, change: Change, at: dict[str, Any]) -> None:
        if isinstance(change, Acknowledged):
            self._note("acked" if isinstance(was.item, Out) else "dropped", header, **at)
        elif isinstance(change, PinsEnded):
            self._note("acked", header, **at)
        elif isinstance(change, Sought):
            self._note("sought", header, **at)
        else:
            self._note("lost", header, **at)

    def _forget_others(self) -> None:
        """Remove other records from the rebuilt table: they do not matter for this one."""
        _keep_only(self._channels.copies, self.offset)
        for channel in self._channels.by_id.values():
            _keep_only(channel.out, self.offset)
            _keep_only(channel.aside, self.offset)

    # -- the rest --------------------------------------------------------------------------

    def _cursor(self, header: Header, change: CursorChange) -> None:
        is_behind = change.position is not None and change.position > self.offset
        if is_behind and change.name not in self._cursors:
            if len(self._cursors) >= MOST_CURSORS:
                self.is_complete = False
                return
            self._cursors[change.name] = None
            self._note("read", header, cursor=change.name)
        elif not is_behind and change.name in self._cursors:
            del self._cursors[change.name]
            self._note("rewound", header, cursor=change.name)

    def _start(self, header: Header, frame: Buffer) -> None:
        record = log_start_record(frame)
        if not self.is_complete and not self._channels.by_id:
            # The entries before it are trimmed: this entry has the table as they left it.
            state = decode_state(record.state)
            self._channels.restore(state.channels, state.pins)
            self._forget_others()
        before = {number: _state(each, self.offset) for number, each in self._channels.by_id.items()}
        self._channels.started(header.index, Started(record.index, record.offset))
        self._channels.committed(header.index)
        for number, was in before.items():
            if was.item is not None and _state(self._channels.by_id[number], self.offset).item is None:
                self._note("lost", header, channel=was.name or str(number))
        if record.offset > self.offset and not self._is_expired:
            self._is_expired = True
            self._note("expired", header)

    def _note(self, name: EventName, header: Header, **more: Any) -> None:
        self.events.append(Event(name, header.index, header.append_time_ms, **more))

    def states(self) -> dict[int, str]:
        """Return the record's present state in each channel that the entries named, by channel id."""
        return {
            number: "not_theirs" if number in self._not_theirs else _state(channel, self.offset).word
            for number, channel in self._channels.by_id.items()
        }


def _keep_only(table: dict[int, T], offset: int) -> None:
    if len(table) > (offset in table):
        kept = table.get(offset)
        table.clear()
        if kept is not None:
            table[offset] = kept


class _State(NamedTuple):
    """The record's state in a channel; `is_passed` says that the channel has reached the record."""

    name: str
    item: Out | Aside | None
    is_passed: bool

    @property
    def word(self) -> str:
        """The state as a word: the value of `now` in an answer."""
        if isinstance(self.item, Out):
            return "out"
        if isinstance(self.item, Aside):
            return "dead" if self.item.why is Why.DEAD else "aside"
        return "done" if self.is_passed else "waiting"


def _state(channel: Channel, offset: int) -> _State:
    item = channel.out.get(offset) or channel.aside.get(offset)
    return _State(channel.name, item, channel.next > offset)
