"""Reading frames back from segments: one `pread` for a range, and nothing served unverified.

The loop tries without waiting; what the page cache does not hold goes to a small pool of threads with a
limit of its own, so a consumer that replays cold data does not slow the writers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from laminar.batch import BatchError, verify
from laminar.log.disk import Buffer
from laminar.log.errors import DamagedRange, StorageClosed
from laminar.log.rows import UNKNOWN_KIND, Row
from laminar.log.segment import SegmentFile


@dataclass(slots=True)
class Piece:
    """Entries that lie one behind the other in one segment's file; `size` bytes altogether."""

    segment: SegmentFile
    rows: list[Row]
    size: int

    def damage(self) -> DamagedRange:
        """The error that names the first entry."""
        row = self.rows[0]
        return DamagedRange(
            first_index=row.index,
            last_index=row.index,
            first_offset=row.base_offset,
            next_offset=row.next_offset,
            file=self.segment.path,
            position=row.position,
        )


def whole_frames(data: Buffer, rows: Sequence[Row]) -> list[Buffer]:
    """The frames of `data` up to the first that is damaged or is not the one its row names."""
    view = memoryview(data).toreadonly()
    base = rows[0].position
    frames: list[Buffer] = []
    for row in rows:
        frame = view[row.position - base : row.position - base + row.size]
        if row.kind == UNKNOWN_KIND:
            break
        try:
            header = verify(frame)
        except BatchError:
            break
        if header.index != row.index or header.term != row.term:
            break
        frames.append(frame)
    return frames


class Readers:
    """The ways to a segment's bytes, for all logs of a storage."""

    def __init__(self, *, threads: int, inline_bytes: int, executor: Executor | None = None) -> None:
        """`executor` in place of threads of our own: tests and the simulator run reads in turn."""
        self._threads = threads
        self._inline_bytes = inline_bytes
        self._executor = executor
        self._closed = False

    @property
    def executor(self) -> Executor:
        """The pool; its threads start with the first use."""
        if self._closed:
            raise StorageClosed("the storage is closed")
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="reader")
        return self._executor

    def read_nowait(self, piece: Piece) -> list[Buffer] | None:
        """Its whole frames up to the first damaged one; None when a thread must do it."""
        file = piece.segment.opened
        if file is None or piece.size > self._inline_bytes:
            return None
        data = file.pread_nowait(piece.size, piece.rows[0].position)
        return None if data is None else whole_frames(data, piece.rows)

    async def read(self, piece: Piece) -> list[Buffer]:
        """As `read_nowait`, in the pool. Raises `DiskError`."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, _read, piece)

    def close(self) -> None:
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=True)


def _read(piece: Piece) -> list[Buffer]:
    data = piece.segment.data().pread(piece.size, piece.rows[0].position)
    return whole_frames(data, piece.rows)
