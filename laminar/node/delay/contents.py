"""Read the entries of delayed records: the records' times, and new batches of some of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import sub
from typing import Final, NamedTuple, TypeVar, cast

from laminar.batch import Batch, Column, Header, Kind
from laminar.http.api.records import Records
from laminar.log.disk.errors import EntriesTrimmed, StorageError
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.delayed_records import (
    Added,
    Copied,
    DelayedBatch,
    DelayedRecords,
    Place,
    Received,
    delayed_change,
)

_T = TypeVar("_T")

EARLIEST_MS: Final = -(1 << 63)
LATEST_MS: Final = 1 << 63
PUBLISH_BYTES: Final = 1 << 20
"""The most bytes of records in one entry that a leader makes from them, unless one record alone has more."""
HELD_BYTES: Final = 32 << 20
"""The approximate limit of bytes of entries in memory while a new batch is made from their records."""
# The most entries in the cache, and the most bytes of all, unless one alone has more.
_KEPT: Final = 16
_KEPT_BYTES: Final = 16 << 20


class Due(NamedTuple):
    """A pending record: its due time (ms), its number, its place (entry and row). It sorts in this order."""

    due_ms: int
    number: int
    place: Place


class Contents:
    """Reads the entries of one partition that contain delayed records, with a small cache."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        # By index and term of the entry: another leader may have replaced the entry.
        self._kept: OrderedDict[tuple[int, int | None], Batch] = OrderedDict()
        self._kept_bytes = 0

    @property
    def _table(self) -> DelayedRecords:
        return self._partition.state.delayed

    def forget(self) -> None:
        """Empty the cache, because entries may have been truncated since."""
        self._kept.clear()
        self._kept_bytes = 0

    async def batch(self, entry: int) -> Batch:
        """Return the batch of records in an entry.

        Raises:
            EntriesTrimmed: the entry is trimmed, or was truncated meanwhile.
            DamagedRange: it is damaged here.
            StorageError: it cannot be read.
        """
        log = self._partition.log
        key = (entry, log.term(entry))
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found
        # Yield to other requests: thousands of entries may be read one after the other, all from memory.
        await asyncio.sleep(0)
        frames = await log.read_promptly(entry, entry, max_bytes=1)
        if not frames or Header.unpack(frames[0]).kind is not Kind.DELAYED or log.term(entry) != key[1]:
            raise EntriesTrimmed(f"{self._partition.context.name}: entry {entry} was truncated")
        change = delayed_change(frames[0])
        assert isinstance(change, (Added, Copied, Received)), f"entry {entry} holds no records"
        # The checksum of the entry is that of the batch in it, too.
        batch = Batch(change.frame, verified=True)
        self._kept[key] = batch
        self._kept_bytes += plain_bytes(batch)
        while len(self._kept) > 1 and (len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES):
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= plain_bytes(dropped)
        return batch

    async def due(
        self, held: DelayedBatch, *, from_ms: int | None = None, before_ms: int | None = None
    ) -> list[Due]:
        """Return the pending records of an entry that are due from `from_ms` on and before `before_ms`.

        They are in the order of their rows. None for a time is no limit.

        Raises:
            EntriesTrimmed: the entry is trimmed, or was truncated meanwhile.
            DamagedRange: the entry is damaged here.
            StorageError: the entry cannot be read.
        """
        batch = await self.batch(held.index)
        first = EARLIEST_MS if from_ms is None else from_ms
        end = LATEST_MS if before_ms is None else before_ms
        times, numbers, moved = _written(batch), held.numbers, self._table.moved
        if not moved:
            # Most records of an entry are due at other times: this loop skips them in 50 ns each.
            return [
                Due(times[row], numbers[row], Place(held.index, row))
                for row in [row for row, due_ms in enumerate(times) if first <= due_ms < end]
                if held.is_pending(row)
            ]
        found = []
        for row in held.pending():
            number = numbers[row]
            due_ms = moved[number].due_ms if number in moved else times[row]
            if first <= due_ms < end:
                found.append(Due(due_ms, number, Place(held.index, row)))
        return found

    async def records(self, chosen: Sequence[Due], *, readable: bool = False) -> list[tuple[Due, Batch]]:
        """Return the first of these records, as many as fit in one entry, each with the batch that has it.

        The number follows from the records and the log alone, so that every leader gets the same. With
        `readable` it stops before a record that cannot be read. At least one record is returned. Raises as
        `batch`.
        """
        batches: dict[int, Batch] = {}
        found: list[tuple[Due, Batch]] = []
        size = held = 0
        for each in chosen:
            entry = each.place.entry
            batch = batches.get(entry)
            if batch is None:
                if found and held > HELD_BYTES:
                    break
                try:
                    batch = batches[entry] = await self.batch(entry)
                except StorageError:
                    if found and readable:
                        break
                    raise
                held += plain_bytes(batch)
            size += record_bytes(batch, each.place.row)
            if found and size > PUBLISH_BYTES:
                break
            found.append((each, batch))
        return found


def joined(records: Iterable[tuple[Due, Batch]], *, as_written: bool = False) -> bytearray:
    """Return one unstamped batch of these records, in order, each with its present due time.

    With `as_written` each has its original time instead, which is part of its id.
    """
    rows = list(records)
    return Records(
        [batch.value(each.place.row) for each, batch in rows],
        keys=[_cell(batch.keys, each) for each, batch in rows],
        tags=[_cell(batch.tags, each) for each, batch in rows],
        headers=[_cell(batch.headers, each) for each, batch in rows],
        timestamps=[_cell(batch.given_timestamps, each) for each, batch in rows],
        delivery_times=[
            written_ms(batch, each.place.row) if as_written else each.due_ms for each, batch in rows
        ],
        trace_ids=[_cell(batch.trace_ids, each) for each, batch in rows],
    ).build()


def _cell(column: Sequence[_T] | None, each: Due) -> _T | None:
    return None if column is None else column[each.place.row]


def written_ms(batch: Batch, row: int) -> int:
    """Return the original due time (ms) of a delayed record, before any change."""
    return _written(batch)[row]


def _written(batch: Batch) -> list[int]:
    times = batch.delivery_times
    assert times is not None, f"{batch!r} has no times of delivery"
    # A leader accepts such an entry only if each of its records has one.
    return cast("list[int]", times)


def next_ms(batch: Batch, from_ms: int) -> int:
    """Return the earliest original due time (ms) in a batch that is not before `from_ms`."""
    return min((due_ms for due_ms in _written(batch) if due_ms >= from_ms), default=LATEST_MS)


def plain_bytes(batch: Batch) -> int:
    """Return the size in bytes of a batch when it is decompressed."""
    return sum(entry.plain_length for entry in batch.directory().values())


def record_bytes(batch: Batch, row: int) -> int:
    """Return the size in bytes of a record: of its value, key, tag and headers."""
    size = 0
    for column in (Column.VALUE, Column.KEY, Column.TAG, Column.HEADERS):
        cells = batch.cells(column)
        if cells is not None:
            ends, _ = cells
            size += ends[row + 1] - ends[row]
    return size


def value_bytes(batch: Batch) -> list[int]:
    """Return the size of each record's value in bytes."""
    cells = batch.cells(Column.VALUE)
    assert cells is not None, f"{batch!r} has no values"
    ends, _ = cells
    return list(map(sub, ends[1:], ends))


def tag_mask(frame: bytearray) -> int:
    """Return the bit mask of a batch's tags, by which reads with a tag filter skip entries."""
    return Header.unpack(frame).tag_mask
