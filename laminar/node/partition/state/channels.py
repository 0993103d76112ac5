"""The table of channels of one partition: which records are out, to be tried again, or dead, by channel.

A channel is a named queue of a topic. For a channel each record is in one of four states. *Not given out
yet*: its offset is at or after the channel's `next`. *Out*: given to a consumer that has not acknowledged it.
*Aside*: it waits to be given out again, or is *dead* and will not be. *Done*: every record below `next` that
is neither out nor aside. The table stores only records that are out or aside (*open* records), so
acknowledgements in any order take no space.

**A delivery is an entry of the log**: a consumer gets a record when the `channel` entry whose change
`GivenOut` names the record is committed. So every leader knows which records are out and how often they were
tried, and a deposed leader cannot give out any. The number of a delivery is the index of that entry, and only
a consumer that names this number may acknowledge the record.

A `channel` entry holds changes (`channel_changes`), which are applied in order. A change that does not fit
the table (its record is not out, its channel is closed) has no effect. Like the table of cursors this one is
a function of the log: changed when an entry is appended, rolled back when the entry is truncated. The leader
decides which record to give out next, and when a consumer's time is over (`laminar.node.channels`).
Reference: `docs/channels.md`.

An open record would keep the whole log after it from being trimmed. So when retention would trim an open
record, the leader copies it to the log's end (`laminar.node.channels.open_records.carrier`); one entry
contains the copy and the change of the table. A copy does not change the state of its record. A record that
was done before the entry is applied gets no copy, and a copy is forgotten when its record is open in no
channel any more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import mmh3
import msgspec

from laminar.batch import Buffer, Header
from laminar.node.partition.state.channel_changes import (
    Acknowledged,
    Change,
    Copied,
    Deleted,
    Failed,
    GivenOut,
    Opened,
    Retried,
    Sought,
    channel_changes,
    offsets_in,
    runs_in,
    runs_of,
    spaced_runs,
)
from laminar.node.partition.state.pins import Pinned, PinnedBatch, PinsEnded, StoredPins
from laminar.node.partition.state.staged_batches import BatchKey
from laminar.wire.channels import ChannelSettings

T = TypeVar("T")

MAX_OPEN: Final = 100_000
"""Most open records (out or aside) of one channel; at this number only records aside are given out."""
MAX_OPEN_HERE: Final = 200_000
"""Most open records of all channels of one partition: all replicas and snapshots contain them."""

NO_KEY: Final = 0
"""The key hash of a record without a key, and of every record in a channel that keeps no order."""


def key_hash(key: bytes | None) -> int:
    """Return the hash by which an ordered channel knows a key.

    Keys with the same hash wait for each other.
    """
    return NO_KEY if key is None else (mmh3.hash64(key, 0, True, False)[0] or 1)


class Why(IntEnum):
    """The reason why a record is aside (not out, and not done)."""

    RETRY = 0
    """A delivery of it has ended without success; it is given out again at its due time."""
    BUSY = 1
    """It was never given out, because an earlier record with the same key was out or aside."""
    DEAD = 2
    """All its attempts failed. It waits for an operator, and is dropped after `dead_ms`."""


class Out(NamedTuple):
    """A record that is out: given to a consumer and not acknowledged yet.

    `delivery` is the index of the entry that gave it out, `attempt` the number of this attempt (from 1),
    `timeout_ms` the time that the consumer has, `key` the hash of the record's key.
    """

    delivery: int
    attempt: int
    timeout_ms: int
    key: int


class Aside(NamedTuple):
    """A record that is aside: it waits to be given out again, or it is dead.

    `attempts` is how often it was given out and failed, `due_ms` the time from which it may be given out
    again (of a dead record the time at which it died), `delay_ms` the delay that led to this time, `key` the
    hash of its key, and `reason` the text with which a consumer reported the failure.
    """

    attempts: int
    due_ms: int
    delay_ms: int
    key: int
    why: Why
    reason: str = ""


class Copy(NamedTuple):
    """The copy of an open record: the index of the entry that contains it, and its row in that entry's batch.

    `size` is its approximate size in bytes, `time_ms` the append time of the original record.
    """

    entry: int
    row: int
    size: int
    time_ms: int


class Started(NamedTuple):
    """A new start of the log, after entry `last`, at `offset`; records before it without a copy are lost."""

    last: int
    offset: int


class StoredChannel(msgspec.Struct, frozen=True, array_like=True):
    """One channel in the form stored in snapshots and `log_start` entries.

    `out`, `aside` and `copies` are flat lists with five, seven and five values per record: its offset and the
    fields of `Out`, `Aside` or `Copy`. `copies` are those of records that are open in this channel, which may
    be open in other channels, too.
    """

    channel: int
    name: str
    version: int
    settings: ChannelSettings
    next: int
    until: int | None
    lost: int
    out: list[int]
    aside: list[Any]
    copies: list[int] = []


class _Head(NamedTuple):
    """The state of a channel apart from its records; replaced as a whole, so that it can be rolled back."""

    version: int
    settings: ChannelSettings
    next: int
    until: int | None
    lost: int


class Channel:
    """One channel in one partition, as of the log's end.

    `out` and `aside` map offsets to records. `pins` maps the offset of each record that a transaction is to
    acknowledge to the batch of that transaction (`pins`).
    """

    __slots__ = ("_head", "aside", "id", "name", "out", "pins")

    def __init__(self, channel: int, name: str, head: _Head) -> None:
        self.id = channel
        self.name = name
        self.out: dict[int, Out] = {}
        self.aside: dict[int, Aside] = {}
        self.pins: dict[int, BatchKey] = {}
        self._head = head

    @property
    def version(self) -> int:
        """The version, given by the catalog, of the settings that this partition uses now."""
        return self._head.version

    @property
    def settings(self) -> ChannelSettings:
        """The channel's settings that this partition uses now."""
        return self._head.settings

    @property
    def next(self) -> int:
        """The offset from which on no record has been given out or passed over yet."""
        return self._head.next

    @property
    def until(self) -> int | None:
        """The offset before which the channel ends in this partition; None: it has no end."""
        return self._head.until

    @property
    def lost(self) -> int:
        """Number of records that were deleted from the log before they were done."""
        return self._head.lost

    @property
    def open(self) -> int:
        """Number of open records: those that are out or aside."""
        return len(self.out) + len(self.aside)

    @property
    def dead(self) -> int:
        """Number of dead records."""
        return sum(aside.why is Why.DEAD for aside in self.aside.values())

    def last(self, end: int) -> int:
        """Return the offset at which the channel ends, in a partition whose end offset is `end`."""
        return end if self.until is None else min(end, self.until)

    def depth(self, end: int) -> int:
        """Return how many records before `end` are not done yet, dead ones left out; an upper bound."""
        return max(0, self.last(end) - self.next) + self.open - self.dead

    @property
    def floor(self) -> int:
        """The lowest offset of a record that is not done."""
        return min((self.next, *self.out, *self.aside))

    def has_open(self, offset: int) -> bool:
        """Return whether the record at `offset` is out or aside in this channel."""
        return offset in self.out or offset in self.aside

    def stored(self, copies: Mapping[int, Copy]) -> StoredChannel:
        """Return the channel as snapshots have it, with the copies of its open records from `copies`."""
        out: list[int] = []
        for offset, each in sorted(self.out.items()):
            out += (offset, each.delivery, each.attempt, each.timeout_ms, each.key)
        aside: list[Any] = []
        for offset, item in sorted(self.aside.items()):
            aside += (offset, item.attempts, item.due_ms, item.delay_ms, item.key, int(item.why), item.reason)
        head = self._head
        # Do not loop over `copies`: most of them may be of records that only other channels have open.
        copied = sorted(offset for table in (self.out, self.aside) for offset in table if offset in copies)
        return StoredChannel(
            *(self.id, self.name, head.version, head.settings, head.next, head.until, head.lost),
            *(out, aside),
            [value for offset in copied for value in (offset, *copies[offset])],
        )


_OUT_FIELDS: Final = 5
_ASIDE_FIELDS: Final = 7
_COPY_FIELDS: Final = 5

# How to roll a step back: the channel with its former head; or a table with offsets, and what was there
# (None: nothing); or an id with the channel that had it (None: none).
_Undo: TypeAlias = tuple[Any, ...]


class Channels:
    """The table of the channels of one partition, by their ids."""

    __slots__ = ("_log", "_steps", "by_id", "copies", "pins")

    def __init__(self) -> None:
        self.by_id: dict[int, Channel] = {}
        self.copies: dict[int, Copy] = {}
        """By offset, the copies of records that are open in any channel."""
        self.pins: dict[BatchKey, PinnedBatch] = {}
        """By batch of a sink, the records that the batch has pinned, until its pins are ended."""
        # For each entry that may be truncated: its index, its time, its changes (or the new start of the
        # log), and how to roll them back.
        self._log: deque[tuple[int, int, list[Change] | Started, list[_Undo]]] = deque()
        self._steps: list[_Undo] = []

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def open(self) -> int:
        """Number of open records (out or aside) in all channels together."""
        return sum(channel.open for channel in self.by_id.values())

    def floor(self) -> int | None:
        """Return the lowest offset that is not done in some channel; None if there are no channels."""
        return min((channel.floor for channel in self.by_id.values()), default=None)

    def unfinished(self, end: int) -> dict[str, int]:
        """Return the unfinished channels: by name, the lowest offset of a record that is not done.

        A channel is unfinished if it has records before `end` to give out yet, or open ones, dead included.
        """
        found = {}
        for channel in self.by_id.values():
            if channel.floor < channel.last(end) or channel.open:
                found[channel.name] = channel.floor
        return found

    def has_open(self, offset: int) -> bool:
        """Return whether the record at `offset` is out or aside in any channel."""
        return any(channel.has_open(offset) for channel in self.by_id.values())

    def uncopied(self, start: int) -> set[int]:
        """Return the offsets from `start` on of records that are open in a channel and have no copy."""
        return {
            offset
            for channel in self.by_id.values()
            for table in (channel.out, channel.aside)
            for offset in table
            if offset >= start and offset not in self.copies
        }

    # -- the log's changes -----------------------------------------------------------------

    def appended(self, header: Header, frame: Buffer) -> None:
        """Apply a `channel` entry that is now the log's last."""
        changes = channel_changes(frame)
        self._do(header.index, header.append_time_ms, [_without_frame(change) for change in changes])

    def started(self, index: int, start: Started) -> None:
        """Apply a `log_start` entry: open records before the new start that have no copy are lost.

        Retention waits for channels, so records are lost only by an operator's command.
        """
        if any(channel.floor < start.offset for channel in self.by_id.values()):
            self._do(index, 0, start)

    def truncated(self, index: int) -> None:
        """Roll back entry `index` and all after it, which were truncated."""
        while self._log and self._log[-1][0] >= index:
            self._undo(self._log.pop()[3])

    def committed(self, index: int) -> None:
        """Forget how to roll back entries up to `index`: they are committed."""
        while self._log and self._log[0][0] <= index:
            self._log.popleft()

    def _do(self, index: int, time_ms: int, changes: list[Change] | Started) -> None:
        self._steps = []
        if isinstance(changes, Started):
            for channel in self.by_id.values():
                self._start(channel, changes)
        else:
            for change in changes:
                self._apply(change, index, time_ms)
        if self.copies:
            self._forget_copies()
        self._log.append((index, time_ms, changes, self._steps))

    def _undo(self, steps: list[_Undo]) -> None:
        for place, *before in reversed(steps):
            if isinstance(place, Channel):
                place._head = before[0]
            elif isinstance(place, dict):
                offsets, values = before
                if values is None:
                    for offset in offsets:
                        del place[offset]
                else:
                    place.update(zip(offsets, values, strict=True))
            elif before[0] is None:
                del self.by_id[place]
            else:
                self.by_id[place] = before[0]

    # -- one change ------------------------------------------------------------------------

    def _apply(self, change: Change, index: int, time_ms: int) -> None:
        if isinstance(change, PinsEnded):
            self._end_pins(change)
            return
        channel = self.by_id.get(change.channel)
        if isinstance(change, Opened):
            self._open(channel, change)
        elif isinstance(change, Copied):
            self._copy(change, index)
        elif isinstance(change, Deleted):
            for each in self.by_id.values():
                self._lose(each, lambda offset: offset < change.before and offset in self.copies)
        elif channel is None:
            return
        elif isinstance(change, GivenOut):
            self._give_out(channel, change, index)
        elif isinstance(change, Acknowledged):
            for run in runs_in(change.runs):
                self._remove_out(channel, run)
                self._remove(channel.aside, run)
        elif isinstance(change, Failed):
            self._fail(channel, change, time_ms)
        elif isinstance(change, Sought):
            self._seek(channel, change, time_ms)
        elif isinstance(change, Retried):
            self._retry(channel, change, time_ms)
        elif isinstance(change, Pinned):
            self._pin(channel, change, index)
        else:
            self._steps.append((channel.id, channel))
            del self.by_id[channel.id]

    def _open(self, channel: Channel | None, change: Opened) -> None:
        if channel is None:
            head = _Head(change.version, change.settings, change.next, change.until, 0)
            self._steps.append((change.channel, None))
            self.by_id[change.channel] = Channel(change.channel, change.name, head)
        elif change.version > channel.version:
            self._set_head(channel, version=change.version, settings=change.settings)

    def _give_out(self, channel: Channel, change: GivenOut, index: int) -> None:
        first = channel.next
        again = [offset for offset in offsets_in(change.again) if offset in channel.aside]
        before = [channel.aside[offset] for offset in again]
        self._remove(channel.aside, again)
        self._put(
            channel.out,
            again,
            [Out(index, each.attempts + 1, change.timeout_ms, each.key) for each in before],
        )
        if change.next <= first:
            return
        self._set_head(channel, next=change.next)
        fresh = [offset for run in runs_in(change.fresh) for offset in run]
        # Without keys one value for all: they are the same, and there may be thousands.
        given = [Out(index, 1, change.timeout_ms, key) for key in change.keys or (NO_KEY,)]
        if not change.keys:
            given *= len(fresh)
        busy = list(offsets_in(change.busy[::2]))
        waiting = [Aside(0, 0, 0, key, Why.BUSY) for key in change.busy[1::2]]
        # All are at or after the old `next`, unless a lost entry had moved the channel back.
        self._put(channel.out, *_from(first, fresh, given))
        self._put(channel.aside, *_from(first, busy, waiting))

    def _fail(self, channel: Channel, change: Failed, time_ms: int) -> None:
        items = change.items
        found, asides = [], []
        for offset, delay_ms, counts in zip(offsets_in(items[::3]), items[1::3], items[2::3], strict=True):
            out = channel.out.get(offset)
            if out is None:
                continue
            found.append(offset)
            attempts = out.attempt if counts else out.attempt - 1
            if delay_ms < 0:
                aside = Aside(attempts, time_ms, 0, out.key, Why.DEAD, change.reason)
            else:
                aside = Aside(attempts, time_ms + delay_ms, delay_ms, out.key, Why.RETRY, change.reason)
            asides.append(aside)
        self._remove_out(channel, found)
        self._put(channel.aside, found, asides)

    def _seek(self, channel: Channel, change: Sought, time_ms: int) -> None:
        out = sorted(channel.out.items())
        self._remove_out(channel, [offset for offset, _ in out])
        kept = [
            offset
            for offset, aside in channel.aside.items()
            if offset < change.next and not (change.drop and aside.why is not Why.DEAD)
        ]
        self._remove(channel.aside, sorted(channel.aside.keys() - set(kept)))
        if not change.drop:
            back = [(offset, each) for offset, each in out if offset < change.next]
            self._put(
                channel.aside,
                [offset for offset, _ in back],
                [Aside(each.attempt - 1, time_ms, 0, each.key, Why.RETRY) for _, each in back],
            )
        self._set_head(channel, next=change.next)

    def _retry(self, channel: Channel, change: Retried, time_ms: int) -> None:
        found, asides = [], []
        for offset, delay_ms in zip(offsets_in(change.items[::2]), change.items[1::2], strict=True):
            aside = channel.aside.get(offset)
            if aside is None or aside.why is Why.BUSY:
                continue
            found.append(offset)
            attempts = 0 if aside.why is Why.DEAD else aside.attempts
            asides.append(Aside(attempts, time_ms + delay_ms, delay_ms, aside.key, Why.RETRY, aside.reason))
        self._remove(channel.aside, found)
        self._put(channel.aside, found, asides)

    def _start(self, channel: Channel, start: Started) -> None:
        """Forget open records before the new start, except those with a copy after the new start."""
        copies = self.copies
        self._lose(
            channel,
            lambda offset: (
                offset < start.offset and (offset not in copies or copies[offset].entry <= start.last)
            ),
        )
        skipped = start.offset - channel.next
        if skipped > 0:
            self._set_head(channel, next=start.offset, lost=channel.lost + skipped)

    def _lose(self, channel: Channel, is_lost: Callable[[int], bool]) -> None:
        out, aside = sorted(filter(is_lost, channel.out)), sorted(filter(is_lost, channel.aside))
        if out or aside:
            self._remove_out(channel, out)
            self._remove(channel.aside, aside)
            self._set_head(channel, lost=channel.lost + len(out) + len(aside))

    # -- copies ----------------------------------------------------------------------------

    def _copy(self, change: Copied, index: int) -> None:
        """Note the copies of an entry; `_do` forgets those of records that are done by now."""
        rows = enumerate(zip(offsets_in(change.offsets), change.times, strict=True))
        made = {offset: Copy(index, row, change.size, time_ms) for row, (offset, time_ms) in rows}
        offsets = list(made)
        self._remove(self.copies, offsets)
        self._put(self.copies, offsets, list(made.values()))

    def _forget_copies(self) -> None:
        """Forget copies of records that the entry applied just now has changed and no channel has open."""
        touched: set[int] = set()
        for place, *before in self._steps:
            if isinstance(place, dict):
                touched.update(before[0])
            elif isinstance(place, int) and before[0] is not None:
                touched.update(before[0].out, before[0].aside)
        ended = [offset for offset in touched if offset in self.copies and not self.has_open(offset)]
        self._remove(self.copies, sorted(ended))

    # -- pins ------------------------------------------------------------------------------

    def _pin(self, channel: Channel, change: Pinned, index: int) -> None:
        batch = (change.sink, change.number, change.epoch)
        before = self.pins.get(batch)
        if before is not None and before.entry != index:
            return  # Only one entry may pin for a batch, because the decision names that entry.
        parts = () if before is None else before.parts
        self._remove(self.pins, [batch])
        self._put(self.pins, [batch], [PinnedBatch(index, (*parts, (channel.id, tuple(change.runs))))])
        offsets = [
            offset
            for run in runs_in(change.runs)
            for offset in run
            if offset in channel.out and offset not in channel.pins
        ]
        self._put(channel.pins, offsets, [batch] * len(offsets))

    def _end_pins(self, change: PinsEnded) -> None:
        batch = (change.sink, change.number, change.epoch)
        pinned = self.pinned(batch)
        self._remove(self.pins, [batch])
        for channel_id, offsets in pinned.items():
            channel = self.by_id[channel_id]
            if change.done:
                self._remove_out(channel, offsets)
            else:
                self._remove(channel.pins, offsets)

    def pinned(self, batch: BatchKey) -> dict[int, list[int]]:
        """Return by channel id the offsets, ascending, of the records that are pinned for a batch now."""
        held = self.pins.get(batch)
        found: dict[int, list[int]] = {}
        for channel_id, runs in () if held is None else held.parts:
            channel = self.by_id.get(channel_id)
            pins = {} if channel is None else channel.pins
            offsets = {offset for run in runs_in(runs) for offset in run if pins.get(offset) == batch}
            if offsets:
                found[channel_id] = sorted(offsets.union(found.get(channel_id, ())))
        return found

    # -- steps that can be rolled back -----------------------------------------------------

    def _set_head(self, channel: Channel, **changes: Any) -> None:
        self._steps.append((channel, channel._head))
        channel._head = channel._head._replace(**changes)

    def _put(self, table: dict[Any, Any], offsets: Sequence[Any], values: Sequence[Any]) -> None:
        """Add records to a table in which they are not yet, as a step that can be rolled back."""
        if offsets:
            table.update(zip(offsets, values, strict=True))
            self._steps.append((table, offsets, None))

    def _remove(self, table: dict[Any, Any], offsets: Sequence[Any]) -> None:
        """Remove those of the records that are in a table, as a step that can be rolled back."""
        if table:
            found = [offset for offset in offsets if offset in table]
            if found:
                self._steps.append((table, found, [table.pop(offset) for offset in found]))

    def _remove_out(self, channel: Channel, offsets: Sequence[int]) -> None:
        self._remove(channel.pins, offsets)
        self._remove(channel.out, offsets)

    # -- stored ----------------------------------------------------------------------------

    def stored(self) -> list[StoredChannel]:
        """Return all channels as of the log's end, by id, as values for snapshots and `log_start` entries."""
        return [channel.stored(self.copies) for _, channel in sorted(self.by_id.items())]

    def stored_pins(self) -> list[StoredPins]:
        """Return the pins (records reserved for transactions) as of the log's end, by batch."""
        return [
            StoredPins(
                batch,
                held.entry,
                [
                    (channel, spaced_runs(runs_of(offsets)))
                    for channel, offsets in sorted(self.pinned(batch).items())
                ],
            )
            for batch, held in sorted(self.pins.items())
        ]

    def stored_at(self, index: int) -> list[StoredChannel]:
        """Return all channels as of entry `index`, which is the last committed one or a later one."""
        return self._at(index, self.stored)

    def stored_pins_at(self, index: int) -> list[StoredPins]:
        """Return the pins of all batches as of entry `index`, the last committed one or a later one."""
        return self._at(index, self.stored_pins)

    def _at(self, index: int, stored: Callable[[], T]) -> T:
        later = [each for each in self._log if each[0] > index]
        self.truncated(index + 1)
        found = stored()
        for at, time_ms, changes, _ in later:
            self._do(at, time_ms, changes)
        return found

    def restore(self, stored: Iterable[StoredChannel], pins: Iterable[StoredPins] = ()) -> None:
        """Replace the table by one from a snapshot; no change before this can be rolled back."""
        self._log.clear()
        self.by_id, self.copies = {}, {}
        self.pins = {}
        for each in stored:
            head = _Head(each.version, each.settings, each.next, each.until, each.lost)
            channel = self.by_id[each.channel] = Channel(each.channel, each.name, head)
            for at in range(0, len(each.out), _OUT_FIELDS):
                offset, *out = each.out[at : at + _OUT_FIELDS]
                channel.out[offset] = Out(*out)
            for at in range(0, len(each.aside), _ASIDE_FIELDS):
                offset, attempts, due_ms, delay_ms, key, why, reason = each.aside[at : at + _ASIDE_FIELDS]
                channel.aside[offset] = Aside(attempts, due_ms, delay_ms, key, Why(why), reason)
            for at in range(0, len(each.copies), _COPY_FIELDS):
                offset, *copy = each.copies[at : at + _COPY_FIELDS]
                self.copies[offset] = Copy(*copy)
        for held in pins:
            parts = tuple((channel_id, tuple(runs)) for channel_id, runs in held.parts)
            self.pins[held.batch] = PinnedBatch(held.entry, parts)
            for channel_id, runs in parts:
                for run in runs_in(runs):
                    self.by_id[channel_id].pins.update(dict.fromkeys(run, held.batch))


def _from(first: int, offsets: list[int], values: list[T]) -> tuple[list[int], list[T]]:
    """Return the offsets from `first` on, of ascending `offsets`, and their values."""
    at = bisect_left(offsets, first)
    return (offsets[at:], values[at:]) if at else (offsets, values)


def _without_frame(change: Change) -> Change:
    """Return the change without the copied records, which the table does not need."""
    return msgspec.structs.replace(change, frame=b"") if isinstance(change, Copied) else change
