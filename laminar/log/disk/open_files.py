"""What all logs of a storage share and what is bounded for them together: open files, and rows in memory.

A thousand partitions of many segments each have more files than a process may open, and more rows than it
should keep. So files that nobody has used lately are let go of, and rows of segments are kept in chunks,
the least recently used leaving first. It knows nothing of what either holds.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from laminar.log.disk.disk import Buffer, Disk, File

# Beside its rows a chunk takes a key and two objects.
_CHUNK_OVERHEAD_BYTES = 250
# So many stay whatever the limit: a search needs some at once, or it would wait for ever.
_FEWEST_CHUNKS = 32
# How many open files are looked at for one that may go; those written to and not synced may not.
_LOOKS = 16


def raise_open_file_limit() -> int:
    """Raise this process's soft limit of open files to its hard limit; returns the limit that then holds.

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
    """A file that is open only while it is used now and then; any thread may use it.

    A file that was written to stays open until a sync has covered that: one that is opened anew may not hear
    of an error that came in between. Not so one that is `checked_when_read` and can be made anew: else ten
    thousand segments of a checkpoint had twice as many files open.
    """

    __slots__ = ("_begun", "_ended", "_files", "_synced", "checked_when_read", "file", "path", "used")

    def __init__(self, files: OpenFiles, path: str, *, checked_when_read: bool = False) -> None:
        self._files = files
        self.path = path
        self.checked_when_read = checked_when_read
        # The open file, if it is; taking it never blocks. Whoever holds it may go on when it is let go of.
        self.file: File | None = None
        self.used = False
        # A sync may run beside a write. It covers a write only if that has ended before the sync begins, so
        # both ends of each write are counted: of one that is under way, the sync counts neither.
        self._begun = 0
        self._ended = 0
        self._synced = 0

    @property
    def unsynced(self) -> bool:
        """Whether a write was begun that no sync has covered."""
        return self._begun != self._synced

    def open(self, *, create: bool = False) -> File:
        """The file, opened when needed. Raises `DiskError`."""
        self.used = True
        file = self.file
        return self._files.open(self, create=create) if file is None else file

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        self._begun += 1
        try:
            return self.open().pwritev(buffers, position)
        finally:
            self._ended += 1

    def truncate(self, size: int, *, create: bool = False) -> None:
        self._begun += 1
        try:
            self.open(create=create).truncate(size)
        finally:
            self._ended += 1

    @property
    def writes(self) -> int:
        """How many writes have ended: what `synced` is told of."""
        return self._ended

    def synced(self, writes: int) -> None:
        """Count the first so many writes as covered by a sync."""
        self._synced = max(self._synced, writes)
        self._files.shrink()

    def sync(self) -> None:
        """What was written before this call is durable when it returns. A write that is under way is not."""
        if self.unsynced:
            writes = self._ended
            self.open().sync()
            self.synced(writes)

    def start_writeback(self, size: int, position: int) -> None:
        self.open().start_writeback(size, position)

    def forget(self) -> None:
        """Let go of the file, whatever waits for a sync; who reads it may go on."""
        self._files.forget(self)

    def close(self) -> None:
        file = self._files.forget(self)
        if file is not None:
            file.close()


class OpenFiles:
    """The open ones of many files: about `limit` of them, those that wait for a sync beyond it.

    Of files that wait for a sync there should be at most `unsynced_limit`: the segments' writer syncs the
    oldest where there would be more. Both together take half of what this process may open.
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
        file = self.disk.open(handle.path, create=create)
        with self._lock:
            if handle.file is not None:
                return handle.file
            handle.file = file
            self._open[handle] = None
            self._let_go()
        return file

    def shrink(self) -> None:
        """Let go of what is beyond the limit and may go now."""
        if len(self._open) > self._limit:
            with self._lock:
                self._let_go()

    def _let_go(self) -> None:
        for _ in range(_LOOKS):
            if len(self._open) <= self._limit:
                return
            oldest = next(iter(self._open))
            del self._open[oldest]
            if oldest.used or (oldest.unsynced and not oldest.checked_when_read):
                oldest.used = False
                self._open[oldest] = None
            else:
                # Not closed: a thread may be reading it. It closes when the last of them is done.
                oldest.file = None

    def forget_in(self, directory: str) -> None:
        """Let go of all files of a directory that is no more: open ones would keep their room on the disk."""
        with self._lock:
            for handle in [each for each in self._open if os.path.dirname(each.path) == directory]:
                del self._open[handle]
                handle.file = None

    def forget(self, handle: Handle) -> File | None:
        with self._lock:
            self._open.pop(handle, None)
            file, handle.file = handle.file, None
        return file


class RowCache:
    """Chunks of rows by (segment's file, number), up to `limit_bytes`. The loop's thread only."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._chunks: OrderedDict[tuple[Hashable, int], bytes] = OrderedDict()
        self.size_bytes = 0
        self.loads = 0

    def get(self, owner: Hashable, number: int) -> bytes | None:
        key = (owner, number)
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._chunks.move_to_end(key)
        return chunk

    def put(self, owner: Hashable, number: int, chunk: bytes) -> None:
        self.drop(owner, number)
        self.loads += 1
        self._chunks[owner, number] = chunk
        self.size_bytes += len(chunk) + _CHUNK_OVERHEAD_BYTES
        while self.size_bytes > self._limit_bytes and len(self._chunks) > _FEWEST_CHUNKS:
            _, oldest = self._chunks.popitem(last=False)
            self.size_bytes -= len(oldest) + _CHUNK_OVERHEAD_BYTES

    def drop(self, owner: Hashable, number: int) -> None:
        chunk = self._chunks.pop((owner, number), None)
        if chunk is not None:
            self.size_bytes -= len(chunk) + _CHUNK_OVERHEAD_BYTES


class Resources:
    """Both bounds of one storage."""

    def __init__(self, disk: Disk, *, open_files: int, row_bytes: int) -> None:
        self.files = OpenFiles(disk, open_files)
        self.rows = RowCache(row_bytes)
