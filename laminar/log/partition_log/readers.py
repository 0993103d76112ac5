"""Read frames and index rows from the files of segments: one `pread` for each range of entries.

The loop first tries to read without waiting, from the page cache. A range that is not in there is a *cold*
read: a small pool of threads does it, with limits of its own, so that a consumer that replays old data does
not slow down the writers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import ParamSpec, TypeVar

from laminar.log.disk.disk import Buffer, Disk
from laminar.log.disk.errors import DiskError, StorageClosed
from laminar.log.disk.fair_queue import FairLimiter
from laminar.log.disk.open_files import Resources
from laminar.log.format.index_entry import ROW_SIZE, UNKNOWN_KIND, IndexEntry, is_frame_at
from laminar.log.format.settings import StorageSettings
from laminar.log.partition_log.read_ahead import ReadAheadCache
from laminar.log.segment.index_rebuild import check_chunk, load_chunk
from laminar.log.segment.quarantine import Damage
from laminar.log.segment.segment import IndexNotCached, Segment
from laminar.log.segment.segment_file import SegmentFile

P = ParamSpec("P")
T = TypeVar("T")


# Bytes read from memory, about a tenth of a millisecond's work, after which other tasks on the loop run.
_TURN_BYTES = 1024 * 1024


@dataclass(slots=True)
class ReadRange:
    """Consecutive entries of one segment file, to be read by one call; their frames have `size` bytes."""

    segment: SegmentFile
    rows: list[IndexEntry]
    size: int

    def intact_frames(self, data: Buffer) -> list[Buffer]:
        """Return the frames in `data`, the bytes of the range, up to the first that is damaged."""
        known = takewhile(lambda row: row.kind != UNKNOWN_KIND, self.rows)
        places = [(row.term, row.position, row.size) for row in known]
        return intact_frames(data, self.rows[0].index, places) if places else []

    def damage(self) -> Damage:
        """Return the description of damage to the first entry of the range."""
        row = self.rows[0]
        return Damage(
            first_index=row.index,
            last_index=row.index,
            term=row.term,
            first_offset=row.base_offset,
            next_offset=row.next_offset,
            segment=self.segment.first_index,
            position=row.position,
            size=row.size,
        )


def intact_frames(data: Buffer, first_index: int, places: Sequence[tuple[int, int, int]]) -> list[Buffer]:
    """Return the frames in `data`, one per row, up to the first that is damaged or does not fit its row.

    `places` are (term, position, size) of the rows of consecutive entries; `data` begins with the first.
    """
    view = memoryview(data).toreadonly()
    base = places[0][1]
    frames: list[Buffer] = []
    index = first_index
    for term, position, size in places:
        start = position - base
        end = start + size
        if not is_frame_at(view, start, end, index, term):
            break
        frames.append(view[start:end])
        index += 1
    return frames


class SegmentReader:
    """The reader of segments' frames and index rows for all logs of a storage.

    `..._nowait` reads in the loop's thread what needs no wait; the other methods use a pool of threads, in
    which each reader gets its turn.
    """

    def __init__(self, disk: Disk, settings: StorageSettings, *, executor: Executor | None = None) -> None:
        """Make a reader with a pool of threads, or with `executor` in its place, for tests."""
        self.resources = Resources(disk, open_files=settings.open_files, row_bytes=settings.row_bytes)
        self.ahead = ReadAheadCache(settings.ahead_bytes)
        self._threads = settings.reader_threads
        self._inline_bytes = settings.inline_read_bytes
        self._executor = executor
        self._turns = FairLimiter(limit=settings.reader_threads, limit_bytes=settings.reader_bytes)
        self._closed = False
        self._pace_bytes_per_s = settings.cold_bytes_per_s
        self._piece_bytes = settings.cold_piece_bytes
        # The time, by the loop's clock, from which on the cold reads begun so far are within the rate limit.
        self._paced_until_s = 0.0
        # Whether commits are in progress, which cold reads must not delay.
        self.beside_commits: Callable[[], bool] = lambda: False
        self._unturned_bytes = 0
        self.cold_reads = 0

    @property
    def executor(self) -> Executor:
        """The pool of reader threads; its threads start with the first use."""
        if self._closed:
            raise StorageClosed("the storage is closed")
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="reader")
        return self._executor

    def read_nowait(self, piece: ReadRange) -> list[Buffer] | None:
        """Return the range's intact frames up to the first damaged one; None if a thread must read them."""
        file = piece.segment.opened
        if file is None or piece.size > self._inline_bytes:
            return None
        try:
            data = file.pread_nowait(piece.size, piece.rows[0].position)
        except DiskError:
            return None
        return None if data is None else piece.intact_frames(data)

    def frame_nowait(self, segment: SegmentFile, position: int, size: int) -> Buffer | None:
        """Return the bytes of one frame, which the caller must verify; None if a thread must read them."""
        file = segment.opened
        if file is None or size > self._inline_bytes:
            return None
        try:
            return file.pread_nowait(size, position)
        except DiskError:
            return None

    async def read(self, piece: ReadRange, *, reader: Hashable) -> list[Buffer]:
        """Return the range's intact frames up to the first damaged one, read in the pool in a fair order.

        `reader` is any key by which the reads of one reader are recognised.

        Raises:
            DiskError: The file cannot be read.
        """
        self.cold_reads += 1
        await self._throttle(piece.size)
        return await self.in_turn(reader, piece.size, read_frames, piece)

    def cold_bytes(self, most_bytes: int) -> int:
        """Return how many bytes a cold read should take now: `most_bytes`, or less during commits."""
        return min(most_bytes, self._piece_bytes) if self.beside_commits() else most_bytes

    async def yield_to_loop(self, size_bytes: int, *, replaying: bool) -> None:
        """Let other tasks run after each MiB of reads that did not have to wait.

        Otherwise a reader that finds everything in memory would occupy the loop. `replaying` tells that the
        reader uses what the kernel has just read ahead from the disk: during commits it is throttled instead,
        because that read-ahead delays them.
        """
        if replaying and self.beside_commits():
            await self._throttle(size_bytes)
            return
        self._unturned_bytes += size_bytes
        if self._unturned_bytes >= _TURN_BYTES:
            self._unturned_bytes = 0
            await asyncio.sleep(0)

    async def _throttle(self, size_bytes: int) -> None:
        """During commits, wait until the cold reads begun before are within the rate limit."""
        now_s = asyncio.get_running_loop().time()
        if not self.beside_commits():
            self._paced_until_s = now_s
            return
        start_s = max(now_s, self._paced_until_s)
        self._paced_until_s = start_s + size_bytes / self._pace_bytes_per_s
        if start_s > now_s:
            await asyncio.sleep(start_s - now_s)

    async def load(self, cold: IndexNotCached, *, reader: Hashable) -> None:
        """Read the index rows that `cold` names into the cache, in the pool.

        Raises:
            DiskError: The files cannot be read.
        """
        chunk = cold.segment.chunk(cold.number)
        rows = await self.in_turn(reader, chunk.count * ROW_SIZE, load_chunk, chunk)
        cold.segment.loaded(chunk, rows)

    async def compare(self, segment: Segment, row: IndexEntry, *, reader: Hashable) -> None:
        """Compare `row`, which did not fit its frame, and the rows of its chunk with the frames, in the pool.

        Wrong rows are rebuilt; afterwards `segment.is_unverified` is false for the rows of the chunk.

        Raises:
            DiskError: The files cannot be read.
        """
        chunk = segment.suspect(row)
        rows = await self.in_turn(reader, chunk.count * ROW_SIZE, check_chunk, chunk, row)
        segment.verified(chunk, rows)

    async def in_turn(
        self, reader: Hashable, size_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the result of `work`, called in the pool when it is this reader's turn.

        `size_bytes` is the memory that `work` uses, which counts against the limit of all reads.
        """
        await self._turns.acquire(reader, size_bytes)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self.executor, partial(work, *args, **kwargs)
            )
        finally:
            self._turns.release(size_bytes)

    def statistics(self) -> dict[str, int]:
        """Return counters of cold reads, and gauges of caches and open files."""
        return {
            "cold_reads": self.cold_reads,
            "reads_waiting": self._turns.waiting,
            "row_chunks_loaded": self.resources.rows.loads,
            "ahead_bytes": self.ahead.size_bytes,
            "row_bytes": self.resources.rows.size_bytes,
            "open_files": len(self.resources.files),
        }

    def close(self) -> None:
        """Refuse further reads, and wait until those in progress have ended."""
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=True)


def read_frames(piece: ReadRange) -> list[Buffer]:
    """Return the intact frames of a range up to the first damaged one. Blocks.

    Raises:
        DiskError: The file cannot be read.
    """
    try:
        data = piece.segment.data().pread(piece.size, piece.rows[0].position)
    except DiskError as error:
        if not error.is_damage:
            raise
        return _one_by_one(piece)
    return piece.intact_frames(data)


def _one_by_one(piece: ReadRange) -> list[Buffer]:
    """Return the intact frames of a range up to the first damaged or unreadable one, read one by one."""
    frames: list[Buffer] = []
    for row in piece.rows:
        try:
            one = ReadRange(piece.segment, [row], row.size)
            found = one.intact_frames(piece.segment.data().pread(row.size, row.position))
        except DiskError as error:
            if not error.is_damage:
                raise
            break
        if not found:
            break
        frames += found
    return frames
