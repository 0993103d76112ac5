"""Find the batches that a search has to read, by the key indexes of a replica's sealed segments.

An index tells which batches may have a value, and so which have not; each record of these is still compared
by its own bytes. Segments without a valid index, and the active one, are read completely.
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
    """The batches to read in a stretch of a sealed segment (their first offsets), in the order of the search.

    `is_whole` says that these are all up to `stop`, the offset where the segment or the range of the search
    ends.
    """

    batches: Sequence[int]
    is_whole: bool
    stop: int


class ByIndex:
    """Looks batches up in the indexes of one scan, one segment at a time. It runs in the loop's thread."""

    def __init__(self, partition: Partition, where: Where) -> None:
        self._partition = partition
        self._asked = asked_of(where)
        self._segment: Segment | None = None
        self._index: KeyIndex | None = None
        self._term = ("", b"")

    async def following(self, low: int, end: int, cost: Cost, *, border: int | None) -> Stretch | None:
        """Return the batches from `low` to before `end` of the segment that has `low`.

        None: the segment has no index for this search, or `low` is neither its beginning nor `border`, so
        that it may lie within a batch.
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
        """Return the batches from `low` to before `high` of the segment that has the last, newest first.

        None: the segment has no index for this search, or `high` is neither its end nor `border`, so that it
        may lie within a batch. Batches before the start of the log are left out.
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
        """Remove the index in use, because it is invalid. It will be built again."""
        segment, self._index = self._segment, None
        if segment is not None:
            segment.indexed = None
            await self._partition.log.in_thread(0, _remove, segment.file)

    async def _opened(self, offset: int, cost: Cost) -> Segment | None:
        """Return the sealed segment with this offset, its index opened; None if it has no fitting index."""
        if not self._asked:
            return None
        log = self._partition.log
        segment = log.sealed_at(offset)
        if segment is None or segment.last_index > self._partition.context.committed_index:
            return None
        if segment is not self._segment:
            self._segment, self._index = segment, None
            # The index is checked each time: the file may be gone, or replaced, since it was last used.
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
        """Look the search's value up in the index: return batches, and whether there are more.

        Returns None for the batches if the index is invalid.
        """
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
    """Return the index of a segment; None if there is none, or it is invalid. Runs in a reader thread."""
    try:
        index = KeyIndex(file.open_key_index())
    except (DiskError, KeyIndexError):
        return None
    return index if index.covered == covered else None


def _remove(file: SegmentFile) -> None:
    try:
        file.remove_key_index()
    except DiskError:
        return  # the file stays, and will be found invalid again
