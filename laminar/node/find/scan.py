"""A search of one replica: slices of what fetches would show, each read, looked through, and let go.

Only committed records are looked at, by the same code as fetches read with. A scan ends where its time or its
room is used up, at damage, at the end of this replica, or where all was looked at; it says how far it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from laminar.batch import Buffer, Header, tag_bit
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange, EntriesTrimmed, StorageError
from laminar.node.find.examine import Examined, Found, Skipped, Wanted, examine
from laminar.node.find.pace import Cost, Pace
from laminar.node.partition.partition import Partition
from laminar.node.partition.reads import TAGGED_ROWS, frames

SLICE_BYTES: Final = 1 << 20
SLICE_FRAMES: Final = 100
"""Most batches of one slice: so the loop and the thread are never busy with it for long."""
FIRST_WINDOW: Final = 1024
NO_END: Final = -1
"""In place of an offset: the search goes on for ever, with what is appended."""

Ended = Literal["", "absent", "behind", "damaged"]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Offsets of a partition from `low` to before `high`; `group` is the id of the partition."""

    number: int
    group: bytes
    low: int
    high: int


class Scanned(msgspec.Struct, array_like=True):
    """How a scan of one span ended: what is left of it, and what was found.

    `ended`: why the rest was not looked at here, which another replica may change; empty: for lack of time or
    room, or nothing is left. `damaged`: the damaged offsets, from and to before, at which it ended.
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
    """Whether there is nothing more at this replica yet."""
    is_final: bool = False
    """Whether nothing will ever follow: the partition has ended for good."""


async def scan(partition: Partition, span: Span, wanted: Wanted, pace: Pace, *, until_s: float) -> Scanned:
    """Search a span of a replica until this time of the loop; at least one slice is looked at."""
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
    """One scan under way; `result` says at each moment what is left."""

    def __init__(self, partition: Partition, result: Scanned, wanted: Wanted, pace: Pace) -> None:
        self._partition = partition
        self._result = result
        self._wanted = wanted
        self._pace = pace
        self._room = wanted.most_bytes
        self._window = FIRST_WINDOW
        self.reading = result.low
        """The offset at which the last read began."""

    async def slice(self) -> bool:
        """Look through the next slice; return whether there is more to look at."""
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
            examined = await (self._newest(cost) if self._wanted.newest else self._oldest(end, cost))
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
        """Count what lies before the start of the log as not searched."""
        result = self._result
        end = start if result.high == NO_END else min(start, result.high)
        if end > result.low:
            result.skipped.append(Skipped(result.low, end, "expired"))
            result.low = end

    async def _oldest(self, end: int, cost: Cost) -> Examined | None:
        """Look through the first slice of what is left, up to before `end`."""
        low = self.reading = self._result.low
        tag = self._wanted.where.tag
        if tag is not None:
            low = self.reading = min(end, await self._first_tagged(low, tag_bit(tag)))
            self._result.low = low
            if low == end:
                return Examined(low, low)
        read = await self._read(low, end, cost)
        return await self._examine(read, low, min(end, _end_of(read)), cost) if read else None

    async def _first_tagged(self, low: int, bit: int) -> int:
        """Return an offset from `low` on before which no record has the tag, by the index alone."""
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
        """Look through the last slice of what is left.

        Batches are read forwards, so a window of records is tried: a smaller one if it is more than a slice.
        """
        result, window, read = self._result, self._window, list[Buffer]()
        while True:
            low = self.reading = max(result.low, result.high - window)
            window = result.high - low
            try:
                read = await self._read(low, result.high, cost)
            except DamagedRange:
                # What lies after the damage is looked at first.
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
        return await self._examine(read, first, result.high, cost)

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
