"""The table of delayed records of one partition: records that readers get at a later time.

A producer may say when readers are to get a record. Until then the record is in an entry of kind `DELAYED`,
replicated and checksummed like any other, without an offset and invisible to readers. When the record is due
the leader appends a `PUBLISH` entry with a copy of it, which gives it an offset (`laminar.node.delay`).

Each delayed record has a *number* for good: the number of the partition that took it, times 2**40, plus a
count from 0. Requests cancel a record, or move it to another time, by this number. A record is *pending*
until it is published, cancelled, or sent to a partition that follows this one. Only the log says which of
these states it is in.

The entry of a pending record is not trimmed. So that records with long delays do not keep a whole log on the
disk, the leader from time to time copies the pending records of old entries into a new one. The same entry
contains the copies and the change of the table.

Like the table of channels this one is a function of the log: changed when an entry is appended, rolled back
when the entry is truncated. It stores an item per batch with one bit per record, and an item per record only
for those that were moved or cancelled: a batch of 10,000 records takes about 1,500 bytes. Reference:
`docs/delay.md`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from laminar.batch import HEADER_SIZE, BatchError, Buffer, Header, Kind, body_of
from laminar.batch.header import seal
from laminar.wire.delayed import NUMBERS

CANCELLED: Final = -1
"""The delivery time in a `Changed` that cancels a record."""
MAX_CHANGED: Final = 100_000
"""Most pending records of one partition whose time was changed."""
MAX_CANCELLED: Final = 100_000
"""Most cancelled records of one partition that are remembered."""
CANCELLED_MS: Final = 24 * 3_600_000
"""How long (ms) after its delivery time a cancelled record is remembered, unless there are too many."""


class Added(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Change: add a producer's batch of `count` delayed records, numbered from `first` on.

    `first_due_ms` and `last_due_ms` are the earliest and latest delivery time, `frame` the unstamped batch.
    """

    first: int
    count: int
    first_due_ms: int
    last_due_ms: int
    frame: bytes


class Changed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Change: move pending records to another delivery time, or cancel them.

    `items` has three values per record: its number, its new time in ms or `CANCELLED`, and, for a cancelled
    record, the time at which it was due (otherwise unused).
    """

    items: list[int]


class Copied(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Change: this entry contains copies of pending records of earlier entries, which may be trimmed now.

    `frame` is the batch of the copies. `rows` has two values per record, in the order of `frame`: the index
    of the entry that had it, and its row in the batch there.
    """

    rows: list[int]
    first_due_ms: int
    last_due_ms: int
    frame: bytes


class Received(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Change: take over pending records from a partition that this one follows.

    `sequence` is the number of this batch, from 0, in the `stream` of batches from that partition. `numbers`
    are the records' numbers, in the order of `frame`. `moved` lists records whose time was changed: row, new
    time, row, new time, and so on. `first_due_ms` and `last_due_ms` take these new times into account.
    """

    stream: bytes
    sequence: int
    numbers: list[int]
    first_due_ms: int
    last_due_ms: int
    moved: list[int]
    frame: bytes


class Sent(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Change: forget records that a partition which follows this one has taken over.

    `output` is the partition to which the change of the route gave the records' range. `to` is the partition
    that took them: `output`, or one after it if `output` had been sealed by then. `sequence` is the number of
    the batch. `rows` has two values per record: the index of its entry, and its row there.
    """

    output: int
    to: int
    sequence: int
    rows: list[int]


Change: TypeAlias = Added | Changed | Copied | Received | Sent

_decoder = msgspec.msgpack.Decoder(Change)


def delayed_entry(change: Change, *, producer: Header | None = None) -> bytearray:
    """Return the batch of a `delayed` entry, not stamped yet.

    `producer` is the header of the producer's batch, if there is one. The entry gets its producer id, epoch,
    sequence number, key, checkpoint and floor, so that it counts as a batch of records for deduplication.
    """
    frame = bytearray(HEADER_SIZE) + msgspec.msgpack.encode(change)
    if producer is None:
        return seal(frame, Kind.DELAYED)
    return seal(
        frame,
        Kind.DELAYED,
        flags=producer.flags,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        sequence=producer.sequence,
        checkpoint=producer.checkpoint,
        floor=producer.floor,
    )


def delayed_change(frame: Buffer) -> Change:
    """Return the change in the frame of a `delayed` entry. Raises `BatchError` if it is malformed."""
    try:
        change: Change = _decoder.decode(body_of(frame))
    except msgspec.DecodeError as error:
        raise BatchError("malformed", f"delayed entry: {error}", field="body") from error
    return change


class Place(NamedTuple):
    """The place of a pending record: the index of the entry that contains it, and its row in the batch."""

    entry: int
    row: int


class Moved(NamedTuple):
    """The changed delivery time (ms) of a pending record, and the record's place."""

    due_ms: int
    place: Place


class StoredDelayedBatch(msgspec.Struct, frozen=True, array_like=True):
    """One batch of delayed records in the form stored in snapshots and `log_start` entries.

    Its other fields are those of `DelayedBatch`.

    `numbers` is empty if the records' numbers are consecutive from `first` on.
    """

    index: int
    first: int
    count: int
    numbers: list[int]
    first_due_ms: int
    last_due_ms: int
    size_bytes: int
    gone: bytes


class StoredDelayed(msgspec.Struct, frozen=True, array_like=True):
    """The table of a partition's delayed records, as snapshots and `log_start` entries have it.

    The fields are those of `DelayedRecords`. `moved` has four values per record (number, time, entry, row),
    `cancelled` two (number, time).
    """

    next_count: int = 0
    batches: list[StoredDelayedBatch] = []
    moved: list[int] = []
    cancelled: list[int] = []
    forgotten_ms: int = -1
    received: list[tuple[bytes, int]] = []
    sent: list[tuple[int, int, int]] = []


class DelayedBatch:
    """The delayed records of one entry, of which at least one is pending.

    `gone` is a bitmap: bit `row mod 8` of byte `row / 8` is set if the record in that row is not pending any
    more. `left` is the number of pending records. `first_due_ms` and `last_due_ms` are the earliest and
    latest delivery time of all records as the entry was written; some may have been moved since. `lowest` and
    `highest` bound the records' numbers.
    """

    __slots__ = (
        *("count", "first_due_ms", "gone", "highest", "index", "last_due_ms"),
        *("left", "lowest", "numbers", "size_bytes"),
    )

    def __init__(
        self, index: int, numbers: Sequence[int], first_due_ms: int, last_due_ms: int, size_bytes: int
    ) -> None:
        self.index = index
        # A range, or an array.
        self.numbers = numbers
        if isinstance(numbers, range):
            self.lowest, self.highest = numbers.start, numbers.stop - 1
        else:
            self.lowest, self.highest = min(numbers, default=0), max(numbers, default=0)
        self.count = self.left = len(numbers)
        self.first_due_ms = first_due_ms
        self.last_due_ms = last_due_ms
        self.size_bytes = size_bytes
        self.gone = bytearray((self.count + 7) // 8)

    def is_pending(self, row: int) -> bool:
        """Return whether the record in this row of the batch is pending."""
        return not self.gone[row >> 3] >> (row & 7) & 1

    def pending(self) -> Iterator[int]:
        """Return the rows of the records that are pending, in order."""
        if self.left == self.count:
            return iter(range(self.count))
        return (row for row in range(self.count) if self.is_pending(row))

    def pending_row(self, number: int) -> int | None:
        """Return the row of the record with this number; None if it is not in this batch or not pending."""
        numbers = self.numbers
        if isinstance(numbers, range):
            row = number - numbers.start
            return row if number in numbers and self.is_pending(row) else None
        row = -1
        while True:
            # In a copy 0 stands for each record that had ended, and is also the number of the very first.
            try:
                row = numbers.index(number, row + 1)
            except ValueError:
                return None
            if self.is_pending(row):
                return row

    def stored(self) -> StoredDelayedBatch:
        """Return the batch in the form in which snapshots and `log_start` entries have it."""
        first, numbers = 0, list(self.numbers)
        if isinstance(self.numbers, range):
            first, numbers = self.numbers.start, []
        return StoredDelayedBatch(
            *(self.index, first, self.count, numbers, self.first_due_ms, self.last_due_ms),
            *(self.size_bytes, bytes(self.gone)),
        )


# How to roll a step back: a table, a key, and its value before (None: none); or a batch and a row that was
# pending; or the name of a number, and its value before.
_Undo: TypeAlias = tuple[Any, ...]
# What is kept of a change until it is committed, to do it again: a change without its frame, or the rows of
# a publish. Also the index, time and size of its entry.
_Done: TypeAlias = tuple[int, int, int, Change | list[int], list[_Undo]]


class DelayedRecords:
    """The delayed records of one partition, as of the log's end."""

    __slots__ = (
        *("_log", "_steps", "batches", "cancelled", "forgotten_ms"),
        *("left", "moved", "next_count", "received", "sent", "size_bytes"),
    )

    def __init__(self) -> None:
        self.next_count = 0
        """The count in the number of the next delayed record that this partition takes."""
        self.left = 0
        """Number of pending records."""
        self.size_bytes = 0
        """Size in bytes of all entries with pending records."""
        self.batches: dict[int, DelayedBatch] = {}
        """By entry, all batches with pending records."""
        self.moved: dict[int, Moved] = {}
        """By number, the pending records whose time was changed."""
        self.cancelled: dict[int, int] = {}
        """By number, the delivery times of records that were cancelled lately."""
        self.forgotten_ms = -1
        """The latest delivery time of a cancelled record that was forgotten; -1: none was."""
        self.received: dict[bytes, int] = {}
        """By stream (`Received`), how many batches another partition has sent here."""
        self.sent: dict[tuple[int, int], int] = {}
        """By output and by the partition that took them (`Sent`), how many batches were sent."""
        # For each entry that may be truncated: its change, and how to roll it back.
        self._log: deque[_Done] = deque()
        self._steps: list[_Undo] = []

    def __len__(self) -> int:
        return self.left

    def find(self, number: int) -> Place | None:
        """Return the place of the record with this number; None if it is not pending."""
        moved = self.moved.get(number)
        if moved is not None:
            return moved.place
        for batch in self.batches.values():
            # What is appended together is copied together, so few batches have numbers on both sides of one.
            if batch.lowest <= number <= batch.highest:
                row = batch.pending_row(number)
                if row is not None:
                    return Place(batch.index, row)
        return None

    def number_of(self, place: Place) -> int:
        """Return the number of the pending record at a place."""
        return self.batches[place.entry].numbers[place.row]

    def is_pending(self, place: Place) -> bool:
        """Return whether the record at this place is pending."""
        batch = self.batches.get(place.entry)
        return batch is not None and batch.is_pending(place.row)

    def possible_start(self, index: int) -> int:
        """Return the highest index, at most `index`, up to which no entry has pending records."""
        return min(index, min(self.batches, default=index + 1) - 1)

    def copy_bytes(self) -> tuple[list[int], list[int]]:
        """Return the entries with pending records, ascending, and the sizes of copies of these records.

        Item n of the second list is the estimated size in bytes of a copy of the pending records of the first
        n entries, from the share of the records that are pending.
        """
        sizes = sorted(
            (entry, batch.size_bytes * batch.left // batch.count) for entry, batch in self.batches.items()
        )
        return [entry for entry, _ in sizes], [0, *accumulate(size for _, size in sizes)]

    # -- the log's changes -----------------------------------------------------------------

    def appended(self, header: Header, change: Change) -> None:
        """Apply a `delayed` entry that is now the log's last."""
        self._do(header.index, header.append_time_ms, header.frame_size, _without_frame(change))

    def published(self, header: Header, rows: list[int]) -> None:
        """Apply a `publish` entry of pending records: they get their offsets and are not pending any more.

        `rows` has two values per record: the index of its entry, and its row there.
        """
        self._do(header.index, header.append_time_ms, header.frame_size, rows)

    def truncated(self, index: int) -> None:
        """Roll back entry `index` and all after it, which were truncated."""
        while self._log and self._log[-1][0] >= index:
            self._undo(self._log.pop()[4])

    def committed(self, index: int) -> None:
        """Forget how to roll back entries up to `index`: they are committed."""
        while self._log and self._log[0][0] <= index:
            self._log.popleft()

    def _do(self, index: int, time_ms: int, size_bytes: int, change: Change | list[int]) -> None:
        self._steps = []
        if isinstance(change, list):
            for place in _places(change):
                self._end(place)
        elif isinstance(change, Added):
            self._set("next_count", max(self.next_count, change.first % NUMBERS + change.count))
            numbers = range(change.first, change.first + change.count)
            self._add(DelayedBatch(index, numbers, change.first_due_ms, change.last_due_ms, size_bytes))
        elif isinstance(change, Changed):
            self._change(change, time_ms)
        elif isinstance(change, Copied):
            self._copy(index, size_bytes, change)
        elif isinstance(change, Received):
            self._receive(index, size_bytes, change)
        else:
            for place in _places(change.rows):
                self._end(place)
            self._put(self.sent, (change.output, change.to), change.sequence + 1)
        self._log.append((index, time_ms, size_bytes, change, self._steps))

    def _change(self, change: Changed, time_ms: int) -> None:
        items = change.items
        for number, due_ms, was_ms in zip(items[::3], items[1::3], items[2::3], strict=True):
            place = self.find(number)
            if place is None:
                continue
            if due_ms == CANCELLED:
                self._end(place)
                self._put(self.cancelled, number, was_ms)
            else:
                self._put(self.moved, number, Moved(due_ms, place))
        if len(self.cancelled) > MAX_CANCELLED:
            self._forget(time_ms)

    def _forget(self, time_ms: int) -> None:
        """Forget the cancelled records whose time is long past, and at least the tenth that was due first."""
        in_order = sorted(self.cancelled, key=lambda number: (self.cancelled[number], number))
        old = bisect_left(in_order, time_ms - CANCELLED_MS, key=self.cancelled.__getitem__)
        for number in in_order[: max(old, MAX_CANCELLED // 10)]:
            self._set("forgotten_ms", max(self.forgotten_ms, self.cancelled[number]))
            self._put(self.cancelled, number, None)

    def _copy(self, index: int, size_bytes: int, change: Copied) -> None:
        """Replace records of earlier batches by copies in a new batch; one not pending any more stays so."""
        numbers = array("Q")
        ended = []
        for row, place in enumerate(_places(change.rows)):
            batch = self.batches.get(place.entry)
            if batch is None or not batch.is_pending(place.row):
                numbers.append(0)
                ended.append(row)
                continue
            number = batch.numbers[place.row]
            numbers.append(number)
            moved = self.moved.get(number)
            self._end(place)
            if moved is not None:
                self._put(self.moved, number, moved._replace(place=Place(index, row)))
        made = DelayedBatch(index, numbers, change.first_due_ms, change.last_due_ms, size_bytes)
        for row in ended:
            made.gone[row >> 3] |= 1 << (row & 7)
        made.left -= len(ended)
        if made.left:
            self._add(made)

    def _receive(self, index: int, size_bytes: int, change: Received) -> None:
        if change.sequence < self.received.get(change.stream, 0):
            return  # The leader checks before; this is a second guard against taking a record twice.
        # A gap in the sequence: batches in between were lost here, by a power loss or an accepted loss.
        self._put(self.received, change.stream, change.sequence + 1)
        numbers = array("Q", change.numbers)
        self._add(DelayedBatch(index, numbers, change.first_due_ms, change.last_due_ms, size_bytes))
        for row, due_ms in zip(change.moved[::2], change.moved[1::2], strict=True):
            self._put(self.moved, change.numbers[row], Moved(due_ms, Place(index, row)))

    # -- steps that can be rolled back -----------------------------------------------------

    def _add(self, batch: DelayedBatch) -> None:
        self._steps.append((self.batches, batch.index, None))
        self.batches[batch.index] = batch
        self.left += batch.left
        self.size_bytes += batch.size_bytes

    def _end(self, place: Place) -> None:
        """Mark the record at a place as not pending any more, if it is pending."""
        batch = self.batches.get(place.entry)
        if batch is None or not batch.is_pending(place.row):
            return
        number = batch.numbers[place.row]
        if number in self.moved:
            self._put(self.moved, number, None)
        self._steps.append((batch, place.row))
        batch.gone[place.row >> 3] |= 1 << (place.row & 7)
        batch.left -= 1
        self.left -= 1
        if not batch.left:
            self._steps.append((self.batches, batch.index, batch))
            del self.batches[batch.index]
            self.size_bytes -= batch.size_bytes

    def _put(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        self._steps.append((table, key, table.get(key)))
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value

    def _set(self, name: str, value: int) -> None:
        self._steps.append((name, getattr(self, name)))
        setattr(self, name, value)

    def _undo(self, steps: list[_Undo]) -> None:
        for place, *before in reversed(steps):
            if isinstance(place, str):
                setattr(self, place, before[0])
            elif isinstance(place, DelayedBatch):
                row = before[0]
                place.gone[row >> 3] &= ~(1 << (row & 7))
                place.left += 1
                self.left += 1
            else:
                key, value = before
                if place is self.batches:
                    change = value if value is not None else place[key]
                    sign = 1 if value is not None else -1
                    self.left += sign * change.left
                    self.size_bytes += sign * change.size_bytes
                if value is None:
                    place.pop(key, None)
                else:
                    place[key] = value

    # -- stored ----------------------------------------------------------------------------

    def stored(self) -> StoredDelayed:
        """Return the whole table as of the log's end, as a value for snapshots.

        It is sorted, so that equal logs give equal results.
        """
        return StoredDelayed(
            self.next_count,
            [batch.stored() for _, batch in sorted(self.batches.items())],
            [
                value
                for number, (due_ms, place) in sorted(self.moved.items())
                for value in (number, due_ms, *place)
            ],
            [value for item in sorted(self.cancelled.items()) for value in item],
            self.forgotten_ms,
            sorted(self.received.items()),
            [(*named, count) for named, count in sorted(self.sent.items())],
        )

    def stored_at(self, index: int) -> StoredDelayed:
        """Return the table as of entry `index`, which is the last committed one or a later one."""
        later = [each for each in self._log if each[0] > index]
        self.truncated(index + 1)
        found = self.stored()
        for at, time_ms, size_bytes, change, _ in later:
            self._do(at, time_ms, size_bytes, change)
        return found

    def restore(self, stored: StoredDelayed) -> None:
        """Replace the table by one from a snapshot; no change before this can be rolled back."""
        self._log.clear()
        self.next_count, self.forgotten_ms = stored.next_count, stored.forgotten_ms
        self.batches = {each.index: _restored(each) for each in stored.batches}
        self.left = sum(batch.left for batch in self.batches.values())
        self.size_bytes = sum(batch.size_bytes for batch in self.batches.values())
        moved = stored.moved
        self.moved = {
            number: Moved(due_ms, Place(entry, row))
            for number, due_ms, entry, row in zip(
                moved[::4], moved[1::4], moved[2::4], moved[3::4], strict=True
            )
        }
        self.cancelled = dict(zip(stored.cancelled[::2], stored.cancelled[1::2], strict=True))
        self.received = dict(stored.received)
        self.sent = {(output, to): count for output, to, count in stored.sent}


def _restored(stored: StoredDelayedBatch) -> DelayedBatch:
    numbers: Sequence[int] = array("Q", stored.numbers)
    if not stored.numbers:
        numbers = range(stored.first, stored.first + stored.count)
    batch = DelayedBatch(stored.index, numbers, stored.first_due_ms, stored.last_due_ms, stored.size_bytes)
    batch.gone = bytearray(stored.gone)
    batch.left -= sum(each.bit_count() for each in batch.gone)
    return batch


def _places(flat: Sequence[int]) -> Iterable[Place]:
    return map(Place, flat[::2], flat[1::2])


def _without_frame(change: Change) -> Change:
    """Return the change without its records, which the table does not need."""
    return change if isinstance(change, (Changed, Sent)) else msgspec.structs.replace(change, frame=b"")
