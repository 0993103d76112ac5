"""The table of channels of one partition: which records are out, to be tried again, or dead, by channel.

A channel is a named queue of a topic. Of each record it knows one of four things: it is at or after `next`,
so it was never given out; it is *out*, given to a consumer that has not acknowledged it; it is *aside*, to be
given out later, or never (*dead*); or it is done. What is done is stored nowhere: below `next` it is all that
is neither out nor aside. So acknowledgements in any order cost no state.

**A delivery is an entry of the log**: a consumer is given a record when the `OUT` that names it is committed.
So every leader knows what is out and how often it was tried, and one that was deposed gives out nothing. The
number of a delivery is the index of that entry, and only the consumer that names it may acknowledge.

A `channel` entry holds changes, which are applied in order; what does not fit the table (a record that is not
out, a channel that is closed) changes nothing. Like the table of cursors this one is a function of the log:
changed when an entry is appended, rolled back when the entry is truncated. What to give out next, and when a
consumer's time is over, is decided by the leader (`laminar.node.channels`). Reference: `docs/channels.md`.

So that a record that is out or aside does not keep all that follows it in the log, the leader copies it to
the log's end when retention would trim it (`laminar.node.channels.carrier`): in one entry, which is at once
the copy and the change of the table. A copy changes nothing of what is open: what has ended when its entry is
applied has no copy, and a copy is forgotten with the last channel that has its record open.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from laminar.batch import BatchError, Buffer, Header, Kind, body_of, build_control
from laminar.batch.header import Flag
from laminar.node.partition.state.pins import Pinned, PinnedBatch, PinsEnded, StoredPins
from laminar.node.partition.state.staged_batches import BatchKey
from laminar.wire.channels import ChannelSettings

T = TypeVar("T")

MAX_OPEN: Final = 100_000
"""Most records of one channel that are out or aside; beyond it none is given out for the first time."""
MAX_OPEN_HERE: Final = 200_000
"""The same of all channels of one partition: each is in memory on every replica, and in every snapshot."""

NO_KEY: Final = 0
"""The hash that stands for a record without a key, and for every record of a channel without order."""


TIME_OUT: Final = "time-out"
"""The reason of a failure by time."""


class Why(IntEnum):
    """Why a record is aside."""

    RETRY = 0
    """It was tried, and is due at a time."""
    BUSY = 1
    """An earlier record of its key was out or aside; it was never tried."""
    DEAD = 2
    """It was tried often enough. It waits for a person, and is dropped after `dead_ms`."""


class Out(NamedTuple):
    """A record that is out: the delivery, the number of this attempt (from 1), the time that it has."""

    delivery: int
    attempt: int
    timeout_ms: int
    key: int


class Aside(NamedTuple):
    """A record that is aside. `attempts`: how often it was tried; `due_ms`: when it may be out again.

    Of a dead record `due_ms` is the time at which it died. `reason` is the consumer's text.
    """

    attempts: int
    due_ms: int
    delay_ms: int
    key: int
    why: Why
    reason: str = ""


class Copy(NamedTuple):
    """A copy of a record that is open: the entry that has it, and its row there.

    `size`: about how many bytes it takes; `time_ms`: the append time of the record itself.
    """

    entry: int
    row: int
    size: int
    time_ms: int


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Open a channel that gives out from offset `next` up to `until` (None: no end).

    For one that is open, with a higher version: its settings from here on.
    """

    channel: int
    name: str
    version: int
    settings: ChannelSettings
    next: int
    until: int | None = None


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Close a channel: forget it."""

    channel: int


class GivenOut(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Give out records: `fresh` ones before the new `next`, and `again` those of `aside`.

    `fresh` are runs, `again` is an ascending list, both as `spaced`. In a channel with order `keys` has the
    hash of each fresh one, and `busy` the others before `next` that wait for one of their key: place, hash,
    place, hash. What is below `next` and nowhere named is passed over for good.
    """

    channel: int
    next: int
    timeout_ms: int
    fresh: list[int] = []
    again: list[int] = []
    keys: list[int] = []
    busy: list[int] = []


class Acknowledged(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """End records that are out or aside: runs, as `spaced`."""

    channel: int
    runs: list[int]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Put records that are out aside.

    `items` has for each: distance, delay in ms from this entry's time on (-1: dead), whether the attempt
    counts (1, 0).
    """

    channel: int
    items: list[int]
    reason: str = ""


class Sought(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Give out from offset `next` on, whatever was out or done there.

    What is out before it goes aside and is due at once, and that attempt does not count; with `drop` it ends,
    as does what is aside but dead.
    """

    channel: int
    next: int
    drop: bool = False


class Retried(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Make records of `aside` due: distance, delay, distance, delay. Dead ones begin with attempt 1 again."""

    channel: int
    items: list[int]


class Copied(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Copy records that are open in any channel: `frame` is a batch of them, in the order of `offsets`.

    `channel` is 0: it is for all. `offsets` are ascending, as `spaced`; `times` are their append times in ms,
    and `size` is about how many bytes each takes. The entry has no other change.
    """

    channel: int
    offsets: list[int]
    times: list[int]
    size: int
    frame: bytes


class Deleted(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Lose the records before an offset that have copies: a person deletes all that is before it.

    `channel` is 0: it is for all. Records without copies are lost with the start of the log that follows.
    """

    channel: int
    before: int


class Started(NamedTuple):
    """The log is to begin after entry `last`, at `offset`: what is before it, without a copy, is lost."""

    last: int
    offset: int


Change: TypeAlias = (
    Opened
    | Closed
    | GivenOut
    | Acknowledged
    | Failed
    | Sought
    | Retried
    | Copied
    | Deleted
    | Pinned
    | PinsEnded
)

_decoder = msgspec.msgpack.Decoder(list[Change])


def channel_entry(changes: Sequence[Change], *, synced: bool = False) -> bytearray:
    """Return the batch of a `channel` entry, not stamped yet. `synced`: it counts only when it is synced."""
    return build_control(Kind.CHANNEL, msgspec.msgpack.encode(changes), flags=Flag.SYNCED if synced else 0)


def channel_changes(frame: Buffer) -> list[Change]:
    """Return the changes in the frame of a `channel` entry. Raises `BatchError` if it is malformed."""
    try:
        return _decoder.decode(body_of(frame))
    except msgspec.DecodeError as error:
        raise BatchError("malformed", f"channel entry: {error}", field="body") from error


def runs_of(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending offsets as runs: the first of each, and how many follow each other."""
    runs: list[tuple[int, int]] = []
    first = count = 0
    for offset in offsets:
        if count and offset == first + count:
            count += 1
            continue
        if count:
            runs.append((first, count))
        first, count = offset, 1
    if count:
        runs.append((first, count))
    return runs


def spaced_runs(runs: Iterable[tuple[int, int]]) -> list[int]:
    """Return ascending runs as distance, count, ...: each distance is from the end of the run before."""
    found: list[int] = []
    end = 0
    for first, count in runs:
        found += (first - end, count)
        end = first + count
    return found


def runs_in(spaced: Sequence[int]) -> Iterator[range]:
    """Yield the runs of offsets that `spaced_runs` has made numbers of."""
    end = 0
    for distance, count in zip(spaced[::2], spaced[1::2], strict=True):
        yield range(end + distance, end + distance + count)
        end += distance + count


def copied_offsets(change: Copied) -> list[int]:
    """Return the offsets of the records that are copied, in the order of their batch."""
    return list(offsets_in(change.offsets))


def spaced(offsets: Iterable[int]) -> list[int]:
    """Return ascending offsets as distances, each from the one before, the first from 0."""
    found: list[int] = []
    last = 0
    for offset in offsets:
        found.append(offset - last)
        last = offset
    return found


def offsets_in(distances: Iterable[int]) -> Iterator[int]:
    """Yield the offsets that `spaced` has made distances of."""
    offset = 0
    for distance in distances:
        offset += distance
        yield offset


class StoredChannel(msgspec.Struct, frozen=True, array_like=True):
    """One channel in a stored table; `out`, `aside` and `copies` are flat: five, seven and five values each.

    `copies` are of records that are open in this channel; one may be open in others, too.
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
    """What of a channel is not by record."""

    version: int
    settings: ChannelSettings
    next: int
    until: int | None
    lost: int


class Channel:
    """One channel in one partition, as of the log's end.

    `out` and `aside` are by offset; `pins` has the batch of each record of `out` that a transaction is to
    acknowledge (`pins.py`). `lost` is how many records left the log before they were done.
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
        """The catalog's version of the settings that are in force here."""
        return self._head.version

    @property
    def settings(self) -> ChannelSettings:
        """The settings that are in force here."""
        return self._head.settings

    @property
    def next(self) -> int:
        """The first offset that was never looked at."""
        return self._head.next

    @property
    def until(self) -> int | None:
        """The offset at which the channel ends here; None: it has no end."""
        return self._head.until

    @property
    def lost(self) -> int:
        """How many records left the log before they were done."""
        return self._head.lost

    @property
    def open(self) -> int:
        """How many records are out or aside."""
        return len(self.out) + len(self.aside)

    @property
    def dead(self) -> int:
        """How many records are dead."""
        return sum(aside.why is Why.DEAD for aside in self.aside.values())

    def last(self, end: int) -> int:
        """Return where the channel ends in a partition that ends at `end`."""
        return end if self.until is None else min(end, self.until)

    def depth(self, end: int) -> int:
        """Return how many records before `end` are to be given out yet, at most; those that are out count."""
        return max(0, self.last(end) - self.next) + self.open - self.dead

    @property
    def floor(self) -> int:
        """The lowest offset that is not done."""
        return min((self.next, *self.out, *self.aside))

    def has_open(self, offset: int) -> bool:
        """Return whether a record is out or aside."""
        return offset in self.out or offset in self.aside

    def stored(self, copies: Mapping[int, Copy]) -> StoredChannel:
        """Return it as a value, with the copies of what is open in it."""
        out: list[int] = []
        for offset, each in sorted(self.out.items()):
            out += (offset, each.delivery, each.attempt, each.timeout_ms, each.key)
        aside: list[Any] = []
        for offset, item in sorted(self.aside.items()):
            aside += (offset, item.attempts, item.due_ms, item.delay_ms, item.key, int(item.why), item.reason)
        head = self._head
        # Not by copy: there may be many times more of what only other channels have open.
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
    """The channels of one partition by id."""

    __slots__ = ("_log", "_steps", "by_id", "copies", "pins")

    def __init__(self) -> None:
        self.by_id: dict[int, Channel] = {}
        self.copies: dict[int, Copy] = {}
        """By offset, the copies of records that are open in any channel."""
        self.pins: dict[BatchKey, PinnedBatch] = {}
        """What transactions have pinned, by batch, until that is ended."""
        # Of each entry that may be truncated: its index and time, its changes, or where it has the log
        # begin, and how to roll them back.
        self._log: deque[tuple[int, int, list[Change] | Started, list[_Undo]]] = deque()
        self._steps: list[_Undo] = []

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def open(self) -> int:
        """How many records are out or aside, in all channels."""
        return sum(channel.open for channel in self.by_id.values())

    def floor(self) -> int | None:
        """Return the lowest offset that a channel has not done; None without channels."""
        return min((channel.floor for channel in self.by_id.values()), default=None)

    def unfinished(self, end: int) -> dict[str, int]:
        """Return by name the lowest offset that a channel is not done with before `end`, with the dead."""
        found = {}
        for channel in self.by_id.values():
            if channel.floor < channel.last(end) or channel.open:
                found[channel.name] = channel.floor
        return found

    def has_open(self, offset: int) -> bool:
        """Return whether a record is out or aside in any channel."""
        return any(channel.has_open(offset) for channel in self.by_id.values())

    def uncopied(self, start: int) -> set[int]:
        """Return the offsets from `start` on of records that are out or aside in a channel, uncopied."""
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
        """Apply the entry by which the log is to begin elsewhere: what was before is lost, without a copy.

        Retention waits for channels, so only a person's command comes to this.
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
        # All are new, unless an entry is lost on all replicas that moved the channel back.
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
        """Forget what is before the first record that is left, but for what has a copy that is left."""
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
        """Note where copies are; that of a record which has ended since is forgotten in the same entry."""
        rows = enumerate(zip(offsets_in(change.offsets), change.times, strict=True))
        made = {offset: Copy(index, row, change.size, time_ms) for row, (offset, time_ms) in rows}
        offsets = list(made)
        self._remove(self.copies, offsets)
        self._put(self.copies, offsets, list(made.values()))

    def _forget_copies(self) -> None:
        """Forget the copies of records that the entry which was applied now has ended in all channels."""
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
            return  # a batch is pinned by one entry: its decision names that
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
        """Return by channel the offsets that a batch has pinned, and that are still pinned, ascending."""
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
        """Put records that are not in a table into it."""
        if offsets:
            table.update(zip(offsets, values, strict=True))
            self._steps.append((table, offsets, None))

    def _remove(self, table: dict[Any, Any], offsets: Sequence[Any]) -> None:
        """Remove records from a table, those that are in it."""
        if table:
            found = [offset for offset in offsets if offset in table]
            if found:
                self._steps.append((table, found, [table.pop(offset) for offset in found]))

    def _remove_out(self, channel: Channel, offsets: Sequence[int]) -> None:
        self._remove(channel.pins, offsets)
        self._remove(channel.out, offsets)

    # -- stored ----------------------------------------------------------------------------

    def stored(self) -> list[StoredChannel]:
        """Return all channels as of the log's end, by id."""
        return [channel.stored(self.copies) for _, channel in sorted(self.by_id.items())]

    def stored_pins(self) -> list[StoredPins]:
        """Return the pins of all batches as of the log's end, by batch."""
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
        """Return the pins of all batches as of entry `index`, as `stored_at`."""
        return self._at(index, self.stored_pins)

    def _at(self, index: int, stored: Callable[[], T]) -> T:
        later = [each for each in self._log if each[0] > index]
        self.truncated(index + 1)
        found = stored()
        for at, time_ms, changes, _ in later:
            self._do(at, time_ms, changes)
        return found

    def restore(self, stored: Iterable[StoredChannel], pins: Iterable[StoredPins] = ()) -> None:
        """Replace the table by a stored one; no change before this can be rolled back."""
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
    """Return those of ascending offsets that are `first` or later, and their values."""
    at = bisect_left(offsets, first)
    return (offsets[at:], values[at:]) if at else (offsets, values)


def _without_frame(change: Change) -> Change:
    """Return what the table needs of a change."""
    return msgspec.structs.replace(change, frame=b"") if isinstance(change, Copied) else change
