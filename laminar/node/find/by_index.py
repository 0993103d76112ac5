"""Which batches of a replica a search has to look at, by the key indexes of its sealed segments.

An index says where a value may be, and so where it is not; what is found is still compared by the record's
own bytes. A segment without an index that holds, and the active one, are looked through as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from laminar.log.disk.errors import DiskError
from laminar.log.key_index.layout import HEAD_BYTES, Covered, KeyIndexError
from laminar.log.key_index.lookup import KeyIndex
from laminar.log.segment.segment import Segment
from laminar.log.segment.segment_file import SegmentFile
from laminar.node.find.index_terms import asked_of
from laminar.node.find.pace import Cost
from laminar.node.find.where import Where
from laminar.node.partition.partition import Partition


class Stretch(NamedTuple):
    """The batches to look at in a stretch of a sealed segment, in the order of the search.

    `is_whole`: there are no more up to `stop`, where the segment is left, or what is asked for ends.
    """

    batches: Sequence[int]
    is_whole: bool
    stop: int


class ByIndex:
    """The indexes that one scan uses, one segment's at a time. The loop's thread."""

    def __init__(self, partition: Partition, where: Where) -> None:
        self._partition = partition
        self._asked = asked_of(where)
        self._segment: Segment | None = None
        self._index: KeyIndex | None = None
        self._term = ("", b"")

    async def following(self, low: int, end: int, cost: Cost, *, border: int | None) -> Stretch | None:
        """Return the batches from `low` to before `end` of the segment that holds `low`.

        None: it has no index for this search. `low` must be where a batch begins: that is so at the begin of
        the segment and at `border`; else None is returned, too.
        """
        segment = await self._opened(low, cost)
        if segment is None or low not in (segment.first_offset, border):
            return None
        found, is_more = await self._look(segment, low, cost, newest=False)
        if found is None:
            return None
        batches = [each for each in found if each < end]
        is_whole = not is_more or len(batches) < len(found)
        return Stretch(batches, is_whole, min(end, segment.next_offset))

    async def preceding(self, low: int, high: int, cost: Cost, *, border: int | None) -> Stretch | None:
        """Return the batches from `low` to before `high` of the segment that holds the last, the last first.

        As `following`, with `high` in place of `low`. Nothing before the begin of the log is returned.
        """
        segment = await self._opened(high - 1, cost)
        if segment is None or high not in (segment.next_offset, border):
            return None
        found, is_more = await self._look(segment, high, cost, newest=True)
        if found is None:
            return None
        # The batch that begins before `low` may reach beyond it.
        wanted = sum(each > low for each in found) + 1
        is_whole = not is_more or wanted <= len(found)
        start = self._partition.context.start_offset
        batches = [each for each in found[:wanted] if each >= start]
        return Stretch(batches, is_whole, max(low, segment.first_offset))

    async def distrust(self) -> None:
        """Remove the index that is in use: it does not hold. It will be built again."""
        segment, self._index = self._segment, None
        if segment is not None:
            segment.indexed = None
            await self._partition.log.in_thread(0, _remove, segment.file)

    async def _opened(self, offset: int, cost: Cost) -> Segment | None:
        """Return the sealed segment with this offset, after opening its index; None if it has none."""
        if not self._asked:
            return None
        log = self._partition.log
        segment = log.sealed_at(offset)
        if segment is None or segment.last_index > self._partition.context.committed_index:
            return None
        if segment is not self._segment:
            self._segment, self._index = segment, None
            # It is not taken for right because it was once: it may be gone, or another by now.
            index = await log.in_thread(HEAD_BYTES, open_index, segment.file, segment.covered)
            term = next((each for each in self._asked if index is not None and each[0] in index.names), None)
            if index is None:
                segment.indexed = None
            elif term is not None:
                cost.bytes += index.bytes_read
                self._index, self._term = index, term
        return segment if self._index is not None else None

    async def _look(
        self, segment: Segment, offset: int, cost: Cost, *, newest: bool
    ) -> tuple[list[int] | None, bool]:
        """Return what the index says; None if it does not hold."""
        index = self._index
        assert index is not None
        before = index.bytes_read
        look = index.preceding if newest else index.following
        try:
            return await self._partition.log.in_thread(HEAD_BYTES, look, *self._term, offset)
        except KeyIndexError:
            await self.distrust()
            return None, False
        finally:
            cost.bytes += index.bytes_read - before


def open_index(file: SegmentFile, covered: Covered) -> KeyIndex | None:
    """Return the index of a segment; None if there is none that holds for it. In a reader thread."""
    try:
        index = KeyIndex(file.open_key_index())
    except (DiskError, KeyIndexError):
        return None
    return index if index.covered == covered else None


def _remove(file: SegmentFile) -> None:
    try:
        file.remove_key_index()
    except DiskError:
        return  # it stays, and is tried and refused again
