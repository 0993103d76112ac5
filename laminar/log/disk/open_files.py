"""Limits that all logs of a storage share: on open files, and on index rows in memory.

A thousand partitions of many segments have more files than a process may open, and more index rows than it
should keep in memory. So files that were not used lately are closed, and rows are cached in chunks; the chunk
that was used least recently is dropped first. This module does not look into files or chunks.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from laminar.log.disk.disk import Buffer, Disk, File

# Memory of a chunk besides its rows: a key and two objects.
_CHUNK_OVERHEAD_BYTES = 250
# This many chunks stay cached even above the limit: a search that needs several at once would else never end,
# as loading one would drop another.
_FEWEST_CHUNKS = 32
# How many open files are examined, at most, to find those that may be released; unsynced ones may not.
_LOOKS = 16


def raise_open_file_limit() -> int:
    """Raise the process's soft limit of open files to the hard limit; return the limit that then applies.

    The usual soft limit of 1,024 is for programs that call `select`. A thousand partitions or connections
    need more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft
    return hard


class Handle:
    """A file that is opened when it is used, and may be closed again between uses; for any thread.

    A file that was written to stays open until a sync has covered the write: the sync of a file that was
    closed and opened again may not report an earlier write error. That does not apply to a file that is
    `checked_when_read` and can be rebuilt (an index): otherwise a checkpoint of ten thousand segments would
    keep twice as many files open. `used` is set by each use, and cleared when the file is considered for
    closing.
    """

    __slots__ = ("_begun", "_ended", "_files", "_synced", "checked_when_read", "file", "path", "used")

    def __init__(self, files: OpenFiles, path: str, *, checked_when_read: bool = False) -> None:
        self._files = files
        self.path = path
        self.checked_when_read = checked_when_read
        # The open file, or None; reading this attribute never blocks. A thread that has taken the file
        # from it may go on using it after its release.
        self.file: File | None = None
        self.used = False
        # A sync may run beside a write, and covers it only if the write ended before the sync began.
        # So both ends of each write are counted: a write in progress is not counted as covered.
        self._begun = 0
        self._ended = 0
        self._synced = 0

    @property
    def unsynced(self) -> bool:
        """Whether a write has begun that no sync has covered yet."""
        return self._begun != self._synced

    def open(self, *, create: bool = False) -> File:
        """Return the open file; open it if necessary, and make a missing one with `create`.

        Raises:
            DiskError: The file cannot be opened.
        """
        self.used = True
        file = self.file
        return self._files.open(self, create=create) if file is None else file

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all buffers back to back; return the number of bytes."""
        self._begun += 1
        try:
            return self.open().pwritev(buffers, position)
        finally:
            self._ended += 1

    def truncate(self, size: int, *, create: bool = False) -> None:
        """Set the size of the file; `create` makes a missing one."""
        self._begun += 1
        try:
            self.open(create=create).truncate(size)
        finally:
            self._ended += 1

    @property
    def writes(self) -> int:
        """Number of writes that have ended; read it before a sync, and pass it to `synced` afterwards."""
        return self._ended

    def synced(self, writes: int) -> None:
        """Note that a sync has covered the first `writes` writes; the file may be closed after them."""
        self._synced = max(self._synced, writes)
        self._files.shrink()

    def sync(self) -> None:
        """Make every write that ended before this call durable. A concurrent write is not covered."""
        if self.unsynced:
            writes = self._ended
            self.open().sync()
            self.synced(writes)

    def start_writeback(self, size: int, position: int) -> None:
        """Ask the kernel to begin writing these bytes to the disk, so that a later sync is short."""
        self.open().start_writeback(size, position)

    def forget(self) -> None:
        """Drop the open file, even if it is unsynced; it is closed when no thread reads it any more."""
        self._files.forget(self)

    def close(self) -> None:
        """Close the file at once, if it is open."""
        file = self._files.forget(self)
        if file is not None:
            file.close()


class OpenFiles:
    """The open files of a storage: about `limit` of them, and in addition those that wait for a sync.

    At most `unsynced_limit` files should wait for a sync: if there are more, the segment writer syncs the
    oldest. Each limit is at most a quarter of the number of files that this process may open.
    """

    def __init__(self, disk: Disk, limit: int) -> None:
        allowed = raise_open_file_limit()
        self.disk = disk
        self._limit = min(limit, allowed // 4)
        self.unsynced_limit = allowed // 4
        self._lock = threading.Lock()
        self._open: dict[Handle, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, handle: Handle, *, create: bool) -> File:
        """Return the open file of a handle: a new one, or the one that another thread has just opened."""
        file = self.disk.open(handle.path, create=create)
        with self._lock:
            if handle.file is not None:
                return handle.file
            handle.file = file
            self._open[handle] = None
            self._let_go()
        return file

    def shrink(self) -> None:
        """Close files if there are more than the limit, except those in use and those that need a sync."""
        if len(self._open) > self._limit:
            with self._lock:
                self._let_go()

    def _let_go(self) -> None:
        # The lock is held. Files above the limit go if they were not used since they were last looked at.
        for _ in range(_LOOKS):
            if len(self._open) <= self._limit:
                return
            oldest = next(iter(self._open))
            del self._open[oldest]
            if oldest.used or (oldest.unsynced and not oldest.checked_when_read):
                oldest.used = False
                self._open[oldest] = None
            else:
                # Not closed here: a thread may be reading it. It closes with its last
                # reference.
                oldest.file = None

    def forget_in(self, directory: str) -> None:
        """Drop all open files in a removed directory: an open file would keep its space on the disk."""
        with self._lock:
            for handle in [each for each in self._open if os.path.dirname(each.path) == directory]:
                del self._open[handle]
                handle.file = None

    def forget(self, handle: Handle) -> File | None:
        """Remove the open file from `handle`, without closing it, and return it; None if it was not open."""
        with self._lock:
            self._open.pop(handle, None)
            file, handle.file = handle.file, None
        return file


class RowCache:
    """A cache of index rows in chunks, by (segment file, chunk number), up to `limit_bytes`.

    The loop's thread only.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._chunks: OrderedDict[tuple[Hashable, int], bytes] = OrderedDict()
        self.size_bytes = 0
        self.loads = 0

    def get(self, owner: Hashable, number: int) -> bytes | None:
        """Return the rows of chunk `number` of `owner`, a segment file; None if they are not cached."""
        key = (owner, number)
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._chunks.move_to_end(key)
        return chunk

    def put(self, owner: Hashable, number: int, chunk: bytes) -> None:
        """Cache a chunk; above the limit, drop the chunks that were used least recently."""
        self.drop(owner, number)
        self.loads += 1
        self._chunks[owner, number] = chunk
        self.size_bytes += len(chunk) + _CHUNK_OVERHEAD_BYTES
        while self.size_bytes > self._limit_bytes and len(self._chunks) > _FEWEST_CHUNKS:
            _, oldest = self._chunks.popitem(last=False)
            self.size_bytes -= len(oldest) + _CHUNK_OVERHEAD_BYTES

    def drop(self, owner: Hashable, number: int) -> None:
        """Remove a chunk, if it is cached."""
        chunk = self._chunks.pop((owner, number), None)
        if chunk is not None:
            self.size_bytes -= len(chunk) + _CHUNK_OVERHEAD_BYTES


class Resources:
    """The open files and the row cache of one storage."""

    def __init__(self, disk: Disk, *, open_files: int, row_bytes: int) -> None:
        self.files = OpenFiles(disk, open_files)
        self.rows = RowCache(row_bytes)
