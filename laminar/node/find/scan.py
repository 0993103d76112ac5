"""Search one replica, in slices: each slice of batches is read, examined, and dropped from memory.

Only committed records are searched, read by the same code as for fetches. If a segment has a key index for
the search, only the batches that it names are read. A scan ends when its time or its room for records is used
up, at damage, at the end of this replica, or when the whole span is searched; the result tells how far it
came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from laminar.batch import Buffer, Header, tag_bit
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange, EntriesTrimmed, StorageError
from laminar.node.find.by_index import ByIndex
from laminar.node.find.examine import Examined, Found, Skipped, Wanted, examine
from laminar.node.find.pace import Cost, Pace
from laminar.node.partition.partition import Partition
from laminar.node.partition.reads import TAGGED_ROWS, frames

SLICE_BYTES: Final = 1 << 20
SLICE_FRAMES: Final = 100
"""The most batches of one slice, so that it never occupies the loop or the thread for long."""
FIRST_WINDOW: Final = 1024
SEGMENTS_AT_ONCE: Final = 16
"""The most segments that one slice passes because their indexes find nothing."""
NO_END: Final = -1
"""Instead of an end offset: the search has no end, and continues with records appended later."""

Ended = Literal["", "absent", "behind", "damaged"]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """The offsets of a partition from `low` to before `high`; `group` is the id of the partition's group."""

    number: int
    group: bytes
    low: int
    high: int


class Scanned(msgspec.Struct, array_like=True):
    """The result of a scan of one span: the records found, and the rest of the span (`low` to before `high`).

    `ended` tells why this replica cannot search the rest, which another replica may; it is empty if only time
    or room ran out, or nothing is left. `damaged` are the damaged offsets (first, end) at which the scan
    ended.
    """

    number: int
    low: int
    high: int
    ended: Ended = ""
    damaged: tuple[int, int] = (0, 0)
    found: list[Found] = []
    skipped: list[Skipped] = []
    bytes: int = 0
    is_at_end: bool = False
    """Whether this replica has no further records yet."""
    is_final: bool = False
    """Whether no records will ever follow, because the partition is sealed for good."""
    segments_by_index: int = 0
    """The number of segments of which only the batches named by the index were read."""


async def scan(partition: Partition, span: Span, wanted: Wanted, pace: Pace, *, until_s: float) -> Scanned:
    """Search a span of a replica until the loop's time `until_s`; at least one slice is searched."""
    result = Scanned(span.number, span.low, span.high)
    if partition.replica.group != span.group:
        result.ended = "absent"
        return result
    work = _Scan(partition, result, wanted, pace)
    try:
        while await work.slice():
            if asyncio.get_running_loop().time() >= until_s:
                break
    except DamagedRange as damage:
        first = min(max(damage.first_offset, result.low), work.reading)
        result.ended, result.damaged = "damaged", (first, max(damage.next_offset, work.reading + 1))
    except EntriesTrimmed:
        pass  # the next step finds where the log begins now
    except Problem as problem:
        if problem.code != "offset_expired":
            raise
    except StorageError:
        result.ended = "absent"
    seal = partition.context.final_seal
    result.is_final = seal is not None and result.low >= partition.end_offset
    return result


class _Scan:
    """A scan that is under way; `result` always has what was found and what is left."""

    def __init__(self, partition: Partition, result: Scanned, wanted: Wanted, pace: Pace) -> None:
        self._partition = partition
        self._result = result
        self._wanted = wanted
        self._pace = pace
        self._room = wanted.most_bytes
        self._window = FIRST_WINDOW
        self._by_index = ByIndex(partition, wanted.where)
        # The border of a batch at the end of the rest that is searched next; None if it is unknown.
        self._border: int | None = None
        self.reading = result.low
        """The offset at which the last read began."""

    async def slice(self) -> bool:
        """Search the next slice; return whether there is more to search."""
        result, bounds = self._result, self._partition.reader.bounds()
        if result.low < bounds.start:
            self._expire(bounds.start)
        end = bounds.end if result.high == NO_END else min(result.high, bounds.end)
        if result.low >= end or (self._wanted.newest and result.high > end):
            if result.high > bounds.end:
                result.ended = "behind"
            result.is_at_end = result.low >= bounds.end
            return False
        cost = Cost()
        async with self._pace.turn(cost):
            if self._wanted.newest:
                examined = await self._newest_by_index(cost) or await self._newest(cost)
            else:
                examined = await self._oldest_by_index(end, cost) or await self._oldest(end, cost)
        if examined is None:
            result.ended = "behind"
            return False
        result.bytes += cost.bytes
        result.found += examined.found
        result.skipped += examined.skipped
        if self._wanted.newest:
            result.high = examined.low
        else:
            result.low = examined.high
        self._room -= sum(len(each.document) for each in examined.found)
        full = examined.is_full or len(result.found) >= self._wanted.limit or self._room <= 0
        return not full and result.low != result.high  # its end is found by the next call

    def _expire(self, start: int) -> None:
        """Report the offsets before the start of the log as not searched."""
        result = self._result
        end = start if result.high == NO_END else min(start, result.high)
        if end > result.low:
            result.skipped.append(Skipped(result.low, end, "expired"))
            result.low = end

    async def _oldest_by_index(self, end: int, cost: Cost) -> Examined | None:
        """Search the first batches before `end` that an index names; None if no index fits."""
        result = self._result
        start = self._partition.reader.bounds().start
        for _ in range(SEGMENTS_AT_ONCE):
            border = start if result.low == start else self._border
            stretch = await self._by_index.following(result.low, end, cost, border=border)
            if stretch is None:
                return None
            if stretch.batches:
                break
            result.low = self._border = stretch.stop
            result.segments_by_index += 1
            if result.low == end:
                return Examined(end, end)
        else:
            return Examined(result.low, result.low)
        self.reading = result.low = stretch.batches[0]
        read = await self._read_named(stretch.batches, cost)
        if read is None:
            return None
        is_whole = stretch.is_whole and len(read) == len(stretch.batches)
        high = stretch.stop if is_whole else min(end, _end_of(read))
        examined = await self._examine(read, result.low, high, cost)
        self._border = high if examined.high == high else None
        result.segments_by_index += examined.high == stretch.stop
        return examined

    async def _newest_by_index(self, cost: Cost) -> Examined | None:
        """Search the last batches of the rest that an index names; None if no index fits."""
        result = self._result
        for _ in range(SEGMENTS_AT_ONCE):
            stretch = await self._by_index.preceding(result.low, result.high, cost, border=self._border)
            if stretch is None:
                return None
            if stretch.batches:
                break
            result.high = self._border = stretch.stop
            result.segments_by_index += 1
            if result.high == result.low:
                return Examined(result.low, result.low)
        else:
            return Examined(result.high, result.high)
        self.reading = max(stretch.batches[0], result.low)
        try:
            read = await self._read_named(stretch.batches, cost)
        except DamagedRange as damage:
            if damage.next_offset > self.reading:  # the index names no batch between it and the rest
                result.high = min(result.high, damage.next_offset)
            raise
        if read is None:
            return None
        is_whole = stretch.is_whole and len(read) == len(stretch.batches)
        low = stretch.stop if is_whole else max(result.low, Header.unpack(read[-1]).base_offset)
        examined = await self._examine(read[::-1], low, result.high, cost)
        self._border = low if examined.low == low else None
        result.segments_by_index += examined.low == stretch.stop
        return examined

    async def _read_named(self, batches: Sequence[int], cost: Cost) -> list[Buffer] | None:
        """Return the batches at these offsets, at most a slice; None if the index proves wrong.

        Raises:
            DamagedRange: the first batch is damaged.
        """
        read: list[Buffer] = []
        size = 0
        for at in batches:
            if read and (size >= SLICE_BYTES or len(read) >= SLICE_FRAMES):
                break
            try:
                found = await frames(self._partition.context, at, max_bytes=1, most_frames=1)
            except DamagedRange:
                if read:
                    break
                raise
            if not found or Header.unpack(found[0]).base_offset != at:
                await self._by_index.distrust()
                return None
            read.append(found[0])
            size += len(found[0])
        cost.bytes += size
        return read

    async def _oldest(self, end: int, cost: Cost) -> Examined | None:
        """Search the first slice of the rest, before `end`."""
        low = self.reading = self._result.low
        tag = self._wanted.where.tag
        if tag is not None:
            low = self.reading = min(end, await self._first_tagged(low, tag_bit(tag)))
            self._result.low = low
            if low == end:
                return Examined(low, low)
        read = await self._read(low, end, cost)
        if not read:
            return None
        examined = await self._examine(read, low, min(end, _end_of(read)), cost)
        self._border = examined.high if examined.high == _end_of(read) else None
        return examined

    async def _first_tagged(self, low: int, bit: int) -> int:
        """Return an offset, at least `low`, before which no record has the tag, by the entries' tag masks."""
        context = self._partition.context
        index = await context.log.find_offset(low)
        last = min(context.committed_index, (index or 0) + TAGGED_ROWS - 1)
        if index is None or index > last:
            return low
        first, _ = await context.log.find_tagged(index, last, bit)
        if first > last:
            return max(low, (await context.log.find_index_entry(last)).next_offset)
        return max(low, (await context.log.find_index_entry(first)).base_offset)

    async def _newest(self, cost: Cost) -> Examined | None:
        """Search the last slice of the rest.

        Batches are read forwards, so a window of records at the end is tried, and a smaller one if it exceeds
        a slice.
        """
        result, window, read = self._result, self._window, list[Buffer]()
        while True:
            low = self.reading = max(result.low, result.high - window)
            window = result.high - low
            try:
                read = await self._read(low, result.high, cost)
            except DamagedRange:
                # The records after the damage are searched first.
                if window == 1:
                    raise
                read = []
            if read and (_end_of(read) >= result.high or window == 1):
                break
            if window == 1:
                return None
            window = max(1, window // 4)
        first = max(result.low, min(low, Header.unpack(read[0]).base_offset))
        small = sum(map(len, read)) < SLICE_BYTES // 4 and len(read) < SLICE_FRAMES // 4
        self._window = 4 * window if small else window
        examined = await self._examine(read, first, result.high, cost)
        self._border = first if examined.low == first == Header.unpack(read[0]).base_offset else None
        return examined

    async def _read(self, low: int, before: int, cost: Cost) -> list[Buffer]:
        read = await frames(
            self._partition.context, low, max_bytes=SLICE_BYTES, before=before, most_frames=SLICE_FRAMES
        )
        cost.bytes += sum(map(len, read))
        return read

    async def _examine(self, read: Sequence[Buffer], low: int, high: int, cost: Cost) -> Examined:
        left = self._wanted.limit - len(self._result.found)
        wanted = msgspec.structs.replace(self._wanted, limit=left, most_bytes=self._room)
        log, number = self._partition.log, self._result.number
        return await log.in_thread(cost.bytes, examine, number, read, low, high, wanted)


def _end_of(read: Sequence[Buffer]) -> int:
    return Header.unpack(read[-1]).next_offset
