"""The entries of a log, found by index, offset, time or tag.

A lookup that is awaited (`find_...`) uses a reader thread if the index rows are not in memory. The same
lookup without `await` reads them in the loop's thread, and so may delay the loop by one small read. It is for
Raft's core, a pure state machine that cannot wait; the core asks for old entries rarely, and for one row each
time.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from operator import attrgetter
from typing import TypeVar

from laminar.log.disk.disk import Buffer
from laminar.log.disk.errors import DamagedRange, EntriesTrimmed, StorageError
from laminar.log.format.checkpoint_state import LogStart
from laminar.log.format.index_entry import IndexEntry, row_is_shown, row_kind, row_mask, row_offset
from laminar.log.partition_log.readers import SegmentReader
from laminar.log.segment.segment import IndexNotCached, Segment
from laminar.log.segment.segment_file import SegmentFile

T = TypeVar("T")

FIRST_OFFSET = attrgetter("first_offset")


class LogEntries:
    """The entries of one log: its segments, its start and end, and the lookups of entries.

    `Log` adds and removes entries; `LogReader` looks up what it reads. The loop's thread only.
    """

    def __init__(
        self, readers: SegmentReader, *, log_id: int, name: str, start: LogStart, segments: Sequence[Segment]
    ) -> None:
        """Make the entries of a log with the segments that recovery found, without gaps from `start` on."""
        self._readers = readers
        self.log_id = log_id
        self.name = name
        self.start = start
        self.segments = list(segments)
        self._firsts = [segment.first_index for segment in self.segments]
        # Bytes of all segments.
        self.size_bytes = sum(segment.size for segment in self.segments)
        # Counts all changes after which an answer read from the files may be wrong, not only truncations:
        # also a new start, deletion and replacement.
        self.truncations = 0
        self.take_end()

    def __repr__(self) -> str:
        return f"<entries {self.first_index}..{self.last_index} of {self.name}>"

    def take_end(self) -> None:
        """Set the log's last index, term, offset and time: from its last row, or from its start if empty."""
        if self.segments:
            last = self.segments[-1].last_row
            self.last_index, self.last_term = last.index, last.term
            self.next_offset = last.base_offset + last.count
            self.last_append_time_ms = last.append_time_ms
        else:
            self.last_index, self.last_term = self.start.index, self.start.term
            self.next_offset, self.last_append_time_ms = self.start.offset, self.start.time_ms

    # Changes

    def add_segment(self, segment: Segment) -> None:
        """Add a new, empty segment, into which the next entries go."""
        for sealed in self.segments[-2:]:
            sealed.evict_entries()
        self.segments.append(segment)
        self._firsts.append(segment.first_index)

    def remove_from(self, index: int) -> list[SegmentFile]:
        """Remove entry `index` and all after it; return the files of the segments removed with them."""
        removed: list[SegmentFile] = []
        while self.segments and self.segments[-1].first_index >= index:
            self._firsts.pop()
            segment = self.segments.pop()
            self.size_bytes -= segment.size
            removed.append(segment.file)
        kept = self.segments[-1] if self.segments else None
        if kept is not None and kept.last_index >= index:
            before = kept.size
            kept.truncate(index)
            self.size_bytes -= before - kept.size
        self.truncations += 1
        self.take_end()
        return removed

    def move_start(self, start: LogStart) -> list[SegmentFile]:
        """Make the log begin after entry `start.index`; return the files of the segments before that."""
        removed: list[SegmentFile] = []
        while self.segments and self.segments[0].last_index <= start.index:
            segment = self.segments.pop(0)
            self._firsts.pop(0)
            self.size_bytes -= segment.size
            removed.append(segment.file)
        self.start = start
        self.truncations += 1
        self.take_end()
        return removed

    # Lookups

    @property
    def first_index(self) -> int:
        """Index of the first entry."""
        return self.start.index + 1

    @property
    def segment_first_indexes(self) -> list[int]:
        """First index of each segment, lowest first."""
        return list(self._firsts)

    def sealed(self) -> Iterator[tuple[int, int, int]]:
        """Yield (last index, append time of the last batch, size) of each sealed segment, oldest first.

        These are all segments but the last. The time is in ms since the epoch, the size in bytes.
        """
        for segment in self.segments[:-1]:
            last = segment.last_row
            yield last.index, last.append_time_ms, segment.size

    def term(self, index: int) -> int | None:
        """Return the term of an entry, or of the one before the first; None if it is not known.

        It is not known outside the log, and for a damaged entry without a row. May wait for the disk, for
        one small read: only in a segment in which the term changes, so for entries around an election
        that are no longer in memory. An append to a follower that is far behind asks for one such entry;
        that delays the loop no more than a page fault.
        """
        if index == self.last_index:
            return self.last_term
        if index == self.start.index:
            return self.start.term
        if not self.start.index < index <= self.last_index:
            return None
        place = bisect_right(self._firsts, index) - 1
        segment = self.segments[place]
        # Terms never fall along a log.
        before = self.segments[place - 1].last_term if place else self.start.term
        if before and before == segment.last_term:
            return before
        return segment.term(index) or None

    def index_entry(self, index: int) -> IndexEntry:
        """Return the index row of an entry that the log holds. May wait for the disk.

        Raft's core asks for the rows of consecutive entries, which it sends next to a follower, because of
        their sizes: one read serves a hundred of them. A caller that can await uses `find_index_entry`.
        """
        assert self.start.index < index <= self.last_index, f"row {index} of {self!r}"
        return self.segment_of(index).index_entry(index)

    def size(self, index: int) -> int:
        """Return the size in bytes of an entry that the log holds. May wait for the disk (`index_entry`)."""
        return self.index_entry(index).size

    def offset_after(self, index: int) -> int:
        """Return the offset after the records of an entry; for one before the log's start, its first offset.

        May wait for the disk, unless the entry is the last.
        """
        if index == self.last_index:
            return self.next_offset
        if index <= self.start.index:
            return self.start.offset
        return self.index_entry(index).next_offset

    async def find_index_entry(self, index: int) -> IndexEntry:
        """Return the index row of an entry; a reader thread waits for the disk if necessary.

        Raises:
            EntriesTrimmed: The entry was removed meanwhile.
        """

        def lookup() -> IndexEntry:
            if not self.start.index < index <= self.last_index:
                raise EntriesTrimmed(f"entry {index} of {self.name} was removed while it was looked up")
            return self.segment_of(index).index_entry_nowait(index)

        return await self._find(lookup)

    def segment_of(self, index: int) -> Segment:
        """Return the segment that holds entry `index`, which must be an entry of the log."""
        last = self.segments[-1]
        if index >= last.first_index:
            return last
        return self.segments[bisect_right(self._firsts, index) - 1]

    def sealed_at(self, offset: int) -> Segment | None:
        """Return the sealed segment that holds the record at `offset`; None if no sealed segment does."""
        place = bisect_right(self.segments, offset, key=FIRST_OFFSET) - 1
        return self.segments[place] if 0 <= place < len(self.segments) - 1 else None

    def index_of_offset(self, offset: int) -> int | None:
        """Return the index of the entry with the record at `offset`; None if it is trimmed or not written.

        May wait for the disk, for a few small reads; a caller that can await uses `find_offset`.

        Raises:
            DamagedRange: Damage left no row with this offset, so the entry's index is not known.
        """
        try:
            return self._offset_nowait(offset)
        except IndexNotCached:
            return _here_and_now(lambda: self._offset_nowait(offset))

    async def find_offset(self, offset: int) -> int | None:
        """Return the index of the entry with the record at `offset`, or None; never block the loop.

        Results and errors are those of `index_of_offset`.
        """
        try:
            return self._offset_nowait(offset)
        except IndexNotCached:
            pass
        return await self._find(lambda: self._offset_nowait(offset))

    def _offset_nowait(self, offset: int) -> int | None:
        if not self.start.offset <= offset < self.next_offset:
            return None
        segment = self.segments[-1]
        if offset < segment.first_offset:
            place = bisect_right(self.segments, offset, key=FIRST_OFFSET)
            segment = self.segments[max(place - 1, 0)]
        index = max(segment.index_of_offset(offset), self.first_index)
        segment = self.segment_of(index)
        rows, place = segment.rows_at(index - segment.first_index)
        first_offset = row_offset(rows, place)
        if first_offset > offset:
            # Never an entry that begins after the offset: a reader that continues from it would
            # miss records.
            raise DamagedRange(
                first_index=index - 1,
                last_index=index - 1,
                first_offset=offset,
                next_offset=first_offset,
                file=segment.file.path,
                position=0,
            )
        return index

    def index_of_time(self, time_ms: int) -> int:
        """Return the index of the first entry appended at `time_ms` or later, or `last_index + 1`.

        May wait for the disk, for a few small reads; a caller that can await uses `find_time`.
        """
        return _here_and_now(lambda: self._time_nowait(time_ms))

    async def find_time(self, time_ms: int) -> int:
        """Return the index of the first entry appended at `time_ms` or later; never block the loop.

        It is `last_index + 1` if there is none, as in `index_of_time`.
        """
        return await self._find(lambda: self._time_nowait(time_ms))

    def _time_nowait(self, time_ms: int) -> int:
        place = bisect_left(self.segments, time_ms, key=lambda each: each.last_row.append_time_ms)
        if place == len(self.segments):
            return self.last_index + 1
        segment = self.segments[place]
        entries = range(max(segment.first_index, self.first_index), segment.last_index + 1)
        found = bisect_left(
            entries, time_ms, key=lambda index: segment.index_entry_nowait(index).append_time_ms
        )
        return entries.start + found

    async def find_tagged(self, first_index: int, last_index: int, bit: int) -> tuple[int, int]:
        """Return the first run of entries, from `first_index` to `last_index`, whose tag masks have `bit`.

        The result is (index of its first entry, index after its last): all entries between have `bit`, and
        there may be more runs after them. Both are `last_index + 1` if there is none. Only index rows are
        examined, so an entry of the run may still have no record with the wanted tag.

        Raises:
            EntriesTrimmed: Entries were removed meanwhile.
        """
        return await self._find_run(first_index, last_index, lambda rows, slot: row_mask(rows, slot) & bit)

    async def find_shown(self, first_index: int, last_index: int) -> tuple[int, int]:
        """Return the first run of entries that are not staged: (index of the first, index after the last).

        Both are `last_index + 1` if there is none, as in `find_tagged`.
        """
        return await self._find_run(first_index, last_index, row_is_shown)

    async def find_kinds(self, first_index: int, last_index: int, kinds: Container[int]) -> tuple[int, int]:
        """Return the first run of entries of these kinds: (index of the first, index after the last).

        Both are `last_index + 1` if there is none, as in `find_tagged`.
        """
        return await self._find_run(first_index, last_index, lambda rows, slot: row_kind(rows, slot) in kinds)

    async def _find_run(
        self, first_index: int, last_index: int, wanted: Callable[[Buffer, int], int]
    ) -> tuple[int, int]:
        def lookup() -> tuple[int, int]:
            if not self.start.index < index <= last_index <= self.last_index:
                raise EntriesTrimmed(f"entry {index} of {self.name} was removed while it was looked up")
            segment = self.segment_of(index)
            return segment.run(index, min(last_index, segment.last_index), wanted)

        index = first_index
        while True:
            found, after = await self._find(lookup)
            if after > found or found > last_index:
                return found, after
            index = found
            # After about a hundred rows let other tasks on the loop run.
            await asyncio.sleep(0)

    async def _find(self, lookup: Callable[[], T]) -> T:
        """Return the result of `lookup`; while it lacks index rows, let a thread read them, then repeat it.

        `lookup` may raise an error if entries were removed meanwhile.
        """
        while True:
            try:
                return lookup()
            except IndexNotCached as missing:
                cold = missing
            before = self.truncations
            try:
                await self._readers.load(cold, reader=self.log_id)
            except StorageError:
                if before == self.truncations:
                    raise


def _here_and_now(lookup: Callable[[], T]) -> T:
    while True:
        try:
            return lookup()
        except IndexNotCached as cold:
            cold.segment.load(cold.number)
