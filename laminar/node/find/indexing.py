"""Build the key indexes of a shard, for sealed segments whose entries are all committed.

A segment is read with the code of fetches, so that exactly the records that fetches show are indexed. Indexes
are built one at a time, slowly, in reader threads, the newest segment first because its pages are still
cached; bytes without an index are counted. An index is written to a temporary file, synced, and renamed, so a
crash leaves a whole one or none.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, NamedTuple

from laminar.batch import Batch, BatchError, Buffer, Header
from laminar.http.api.problems import Problem
from laminar.log.disk.disk import Disk, File
from laminar.log.disk.errors import DiskError, StorageClosed, StorageError
from laminar.log.key_index.layout import Covered, KeyIndexError
from laminar.log.key_index.writer import KeyIndexWriter
from laminar.log.segment.segment import Segment
from laminar.log.segment.segment_file import SegmentFile
from laminar.node.find import scan
from laminar.node.find.by_index import open_index
from laminar.node.find.index_terms import digests_of, terms_of
from laminar.node.find.pace import Cost, Pace
from laminar.node.find.where import let_others_run
from laminar.node.partition.partition import Partition
from laminar.node.partition.reads import frames

ENTRIES_PER_S: Final = 20_000
"""The most entries that are added to indexes in a second: hashing them takes a few hundredths of a core."""
IDLE_S: Final = 5.0
RETRY_S: Final = 600.0
"""The pause before the index of a segment is tried again after a failure."""
BUILT_AT_ONCE: Final = 16
"""After this number of indexes the list of segments is made again, because newer ones come first."""
_PARTITIONS_AT_ONCE: Final = 100
_NEW: Final = ".new"
_log = logging.getLogger("laminar.find")

Sleep = Callable[[float], Awaitable[None]]


class _Due(NamedTuple):
    """A sealed segment without the index that it should have, and the append time (ms) of its last entry."""

    appended_ms: int
    partition: Partition
    segment: Segment
    terms: tuple[str, ...]


class Indexer:
    """Builds the key indexes of the partitions that `partitions` returns; `run` it as a task.

    `setting_of` returns the setting `index` of a topic; None if the topic is unknown: then its indexes are
    left as they are. `space_is_low` returns whether nothing may be written for want of space.
    """

    def __init__(
        self,
        partitions: Callable[[], Iterable[Partition]],
        *,
        setting_of: Callable[[str], str | None],
        pace: Pace,
        entries_per_s: int = ENTRIES_PER_S,
        space_is_low: Callable[[], bool] = lambda: False,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._partitions = partitions
        self._setting_of = setting_of
        self._pace = pace
        self._entries_per_s = entries_per_s
        self._space_is_low = space_is_low
        self._sleep = sleep
        # By log and segment the loop's time from which on its index may be tried again.
        self._retry_s: dict[tuple[int, int], float] = {}
        self._swept: set[int] = set()
        self._unindexed_bytes = 0
        self._indexed_segments = 0
        self._indexed_bytes = 0
        self._errors = 0

    async def run(self) -> None:
        """Build missing indexes, with a pause when there are none; return when the storage is closed."""
        while True:
            try:
                built = await self.run_pass()
            except StorageClosed:
                return
            if not built:
                await self._sleep(IDLE_S)

    async def run_pass(self) -> int:
        """Find the sealed segments without an index, and build indexes of the newest; return their number."""
        due = await self._look()
        built = 0
        for each in sorted(due, key=lambda one: one.appended_ms, reverse=True)[:BUILT_AT_ONCE]:
            if self._space_is_low():
                break
            if each.terms != self._terms(each.partition):
                continue
            built += await self._tried(each)
        return built

    async def _look(self) -> list[_Due]:
        """Return the segments whose index can be built now; count the bytes of segments without one."""
        due: list[_Due] = []
        unindexed, now_s = 0, asyncio.get_running_loop().time()
        retry_s: dict[tuple[int, int], float] = {}
        logs: set[int] = set()
        for number, partition in enumerate(list(self._partitions())):
            if number % _PARTITIONS_AT_ONCE == _PARTITIONS_AT_ONCE - 1:
                await asyncio.sleep(0)
            log = partition.log
            segments = log.sealed_segments()
            if not segments:
                continue
            logs.add(log.log_id)
            terms = self._terms(partition)
            if terms is None:
                continue
            for segment in segments:
                if segment.indexed == terms or segment.first_offset == segment.next_offset:
                    continue
                if segment.indexed is None:
                    segment.indexed = await self._found(partition, segment)
                    if segment.indexed == terms:
                        continue
                if terms:
                    unindexed += segment.size
                key = log.log_id, segment.first_index
                if self._retry_s.get(key, now_s) > now_s:
                    retry_s[key] = self._retry_s[key]
                elif is_complete(partition, segment):
                    due.append(_Due(segment.last_row.append_time_ms, partition, segment, terms))
            if log.log_id not in self._swept:
                await self._sweep(partition)
        self._retry_s, self._unindexed_bytes = retry_s, unindexed
        self._swept &= logs
        return due

    def _terms(self, partition: Partition) -> tuple[str, ...] | None:
        setting = self._setting_of(partition.topic)
        return None if setting is None else terms_of(setting)

    async def _found(self, partition: Partition, segment: Segment) -> tuple[str, ...]:
        """Return the terms of a segment's existing index; () if there is none, or it is invalid."""
        index = await partition.log.in_thread(0, open_index, segment.file, segment.covered)
        return () if index is None else index.names

    async def _sweep(self, partition: Partition) -> None:
        """Remove files that a crash has left: indexes that are not finished, or have no segment."""
        log = partition.log
        self._swept.add(log.log_id)
        try:
            await log.in_thread(0, _sweep, log.files.disk, log.files.directory)
        except StorageClosed:
            raise
        except StorageError as error:
            _log.warning("%s: index files that a crash has left cannot be removed: %s", log.name, error)

    async def _tried(self, due: _Due) -> bool:
        """Build an index, or remove one that the topic no longer asks for; return whether that was done."""
        log, segment = due.partition.log, due.segment
        try:
            if not due.terms:
                await log.in_thread(0, segment.file.remove_key_index)
                segment.indexed = ()
                return True
            if log.written_index < segment.last_index:
                return False  # its file lacks entries, or does not exist yet
            size = await self._build(due.partition, segment, due.terms)
        except StorageClosed:
            raise
        except (StorageError, Problem, BatchError, KeyIndexError) as error:
            if segment not in log.sealed_segments():
                return False  # it was removed meanwhile
            self._errors += 1
            self._retry_s[log.log_id, segment.first_index] = asyncio.get_running_loop().time() + RETRY_S
            _log.warning(
                "%s: the key index of segment %d cannot be built, so searches scan the segment: %s",
                *(log.name, segment.first_index, error),
            )
            return False
        if size:
            self._indexed_segments += 1
            self._indexed_bytes += segment.size
            self._unindexed_bytes = max(0, self._unindexed_bytes - segment.size)
        return bool(size)

    async def _build(self, partition: Partition, segment: Segment, terms: tuple[str, ...]) -> int:
        """Build the index of a segment; return its size in bytes, 0 if the segment has changed meanwhile."""
        log, file, covered = partition.log, segment.file, segment.covered
        truncations, path = segment.truncations, file.key_index_path + _NEW
        building = await log.in_thread(0, _begin, log.files.disk, path, covered, terms)
        try:
            offset = max(covered.first_offset, log.start.offset)
            while offset < covered.next_offset:
                cost = Cost()
                async with self._pace.turn(cost):
                    offset = await self._add(partition, building, offset, cost)
                if segment.truncations != truncations or not is_complete(partition, segment):
                    return 0
                if self._space_is_low():
                    return 0
            size = await log.in_thread(0, building.install, file, truncations)
            if size and segment.truncations == truncations:
                segment.indexed = terms
            return size
        finally:
            await log.in_thread(0, _discard, log.files.disk, path)

    async def _add(self, partition: Partition, building: _Building, offset: int, cost: Cost) -> int:
        """Add a slice of batches from `offset` on; return the offset at which the next slice begins."""
        context, end = partition.context, building.covered.next_offset
        read = await frames(
            context, offset, max_bytes=scan.SLICE_BYTES, before=end, most_frames=scan.SLICE_FRAMES
        )
        if not read:
            raise KeyIndexError(f"nothing can be read at offset {offset}")
        cost.bytes = sum(map(len, read))
        entries = await partition.log.in_thread(cost.bytes, building.add, read)
        cost.rest_s = entries / self._entries_per_s
        return Header.unpack(read[-1]).next_offset

    def statistics(self) -> dict[str, int]:
        """Return the counters and gauges of indexing, for metrics."""
        return {
            "unindexed_bytes": self._unindexed_bytes,
            "indexed_segments": self._indexed_segments,
            "indexed_bytes": self._indexed_bytes,
            "errors": self._errors,
        }


def is_complete(partition: Partition, segment: Segment) -> bool:
    """Return whether a sealed segment may be indexed: all its entries are readable, and committed."""
    return bool(segment.last_term) and segment.last_index <= partition.context.committed_index


class _Building:
    """An index that is being built. Its methods run in reader threads, one at a time."""

    def __init__(self, file: File, covered: Covered, terms: Sequence[str]) -> None:
        self.covered = covered
        self._file = file
        self._terms = terms
        self._writer = KeyIndexWriter(file, covered, terms)

    def add(self, read: Sequence[Buffer]) -> int:
        """Add batches, without those after the segment; return the number of entries added."""
        entries = 0
        for frame in read:
            batch = Batch(frame, verified=True)
            if batch.base_offset < self.covered.next_offset:
                for term in self._terms:
                    entries += self._writer.add(term, digests_of(batch, term), batch.base_offset)
            let_others_run()
        return entries

    def install(self, segment: SegmentFile, truncations: int) -> int:
        """Finish the file and install it; return its size in bytes, 0 if the segment has changed."""
        size = self._writer.finish()
        return size if segment.install_key_index(self._file.path, truncations=truncations) else 0


def _begin(disk: Disk, path: str, covered: Covered, terms: Sequence[str]) -> _Building:
    disk.unlink(path)  # left by a crash
    return _Building(disk.open(path, create=True, exclusive=True), covered, terms)


def _discard(disk: Disk, path: str) -> None:
    """Remove the temporary file of an index that was not installed.

    The file is not closed here, because a thread may still write to it; it closes with the last reference.
    """
    try:
        disk.unlink(path)
    except DiskError as error:
        _log.warning("%s cannot be removed: %s", path, error)


def _sweep(disk: Disk, directory: str) -> None:
    """Remove from a log's directory key indexes that are not finished, and those without a segment.

    Segments are never touched: only files with names of key indexes are removed.
    """
    names = set(disk.list(directory))
    for name in names:
        begun = name.endswith(f".find{_NEW}")
        if begun or (name.endswith(".find") and f"{name.removesuffix('.find')}.log" not in names):
            disk.unlink(os.path.join(directory, name))
