"""The files of one segment: the data file with its frames, the index file with their rows, and a key index.

Both hold their parts back to back, and are named after the first index. The segment writer's thread changes
them, and any thread reads them; a reader's thread also replaces damaged rows. An index file is a hint: it may
be missing, short or stale, and is then rebuilt from the frames (`laminar.log.segment.index_rebuild`). What
the loop knows of a segment is a `Segment` (`laminar.log.segment.segment`).
"""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass

from laminar.log.disk.disk import Buffer, File
from laminar.log.disk.errors import DiskError
from laminar.log.disk.open_files import Handle, Resources, RowCache
from laminar.log.format.index_entry import ROW_SIZE
from laminar.log.key_index.layout import key_index_name

# magic, version, size of a row, first index, log id; the rows follow at 32.
_INDEX_HEAD = struct.Struct("<4sHHQQ8x")
INDEX_HEAD_SIZE = _INDEX_HEAD.size
_INDEX_MAGIC = b"LMNX"
_INDEX_VERSION = 1

# Rows are written when there are this many, or with the next checkpoint. Until then they can be rebuilt from
# the journal.
_ROWS_AT_ONCE = 256
# Rows read together: 7 KiB, checked in 0.1 ms.
CHUNK_ROWS = 128


def segment_name(first_index: int) -> str:
    """Return the file name of a segment."""
    return f"{first_index:020d}.log"


def index_name(first_index: int) -> str:
    """Return the file name of a segment's index."""
    return f"{first_index:020d}.index"


def index_head(first_index: int, log_id: int) -> bytes:
    """Return the bytes of an index file's head, which names the segment and its log."""
    return _INDEX_HEAD.pack(_INDEX_MAGIC, _INDEX_VERSION, ROW_SIZE, first_index, log_id)


class SegmentFile:
    """The data file, index file and key index of one segment, and every access to them.

    Methods that change the files are for the segment writer's thread, unless their docstring says "any
    thread".
    """

    __slots__ = (
        "_data",
        "_exists",
        "_index",
        "_index_made",
        "_lock",
        "_log_id",
        "_removals",
        "_resources",
        "_rows",
        "_sync_error",
        "_sync_lock",
        "_unwritten_back",
        "directory",
        "first_index",
        "rows_written",
        "truncations",
    )

    def __init__(
        self, resources: Resources, directory: str, *, first_index: int, log_id: int, exists: bool = False
    ) -> None:
        self._resources = resources
        self.directory = directory
        self.first_index = first_index
        self._log_id = log_id
        # Held while the index file is changed: by the writer's thread, or by a reader's that rebuilds
        # rows.
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._sync_error: DiskError | None = None
        self._data = Handle(resources.files, self.path)
        index_path = os.path.join(directory, index_name(first_index))
        self._index = Handle(resources.files, index_path, checked_when_read=True)
        self._exists = self._index_made = exists
        self._rows: list[bytes] = []
        # How often rows were cut, and the number of rows that the index file holds. The loop reads them in
        # this order.
        self.truncations = 0
        self.rows_written = 0
        self._unwritten_back = 0
        # How often the files were removed: a concurrent sync may then find them missing.
        self._removals = 0

    @property
    def path(self) -> str:
        """Path of the data file."""
        return os.path.join(self.directory, segment_name(self.first_index))

    @property
    def log_id(self) -> int:
        """The id of the log to which the segment belongs."""
        return self._log_id

    @property
    def key_index_path(self) -> str:
        """Path of the key index, which may be missing."""
        return os.path.join(self.directory, key_index_name(self.first_index))

    def open_key_index(self) -> File:
        """Open the file of the key index and return it; its last reference closes it. Any thread.

        Raises:
            DiskError: The file is missing, or cannot be opened.
        """
        return self._resources.files.disk.open(self.key_index_path)

    def install_key_index(self, path: str, *, truncations: int) -> bool:
        """Rename the file at `path`, a new key index that is durable, to the segment's key index. Any thread.

        Nothing is done, and False returned, if the segment was removed, or was truncated since the key index
        was begun: `truncations` is the segment's number of truncations at that time.

        Raises:
            DiskError: The file cannot be renamed.
        """
        with self._lock:
            if self.truncations != truncations or not self._exists:
                return False
            self._resources.files.disk.rename(path, self.key_index_path)
            return True

    def remove_key_index(self) -> None:
        """Delete the key index, if there is one, because it is damaged or not needed any more. Any thread."""
        with self._lock:
            self._resources.files.disk.unlink(self.key_index_path)

    @property
    def rows_cache(self) -> RowCache:
        """Cache of index rows, shared by all logs of a storage."""
        return self._resources.rows

    @property
    def opened(self) -> File | None:
        """The data file if it is open at the moment, else None; never blocks."""
        data = self._data
        data.used = True
        return data.file

    def data(self) -> File:
        """Return the data file, opened if necessary. Any thread; only for a segment that has files."""
        return self._data.open()

    def data_size(self) -> int:
        """Return the size of the data file; 0 if it is missing."""
        try:
            return self.data().size()
        except DiskError as error:
            if not error.is_missing:
                raise
            return 0

    def make_missing(self) -> None:
        """Make an empty data file if it is missing, so that a repair can write the lost entries into it."""
        if not self._resources.files.disk.exists(self.path):
            self._make()

    def _make(self) -> None:
        """Make an empty data file. Its directory must be synced before anything relies on it."""
        self._data.truncate(0, create=True)
        self._exists = True

    def write(self, position: int, frames: list[Buffer], rows: list[bytes], writeback_bytes: int) -> None:
        """Write frames at `position`, the end of the data file, and remember their rows for the index file.

        After each `writeback_bytes` the kernel is asked to begin writing them to the disk. If this method
        fails because the disk is full, it may be called again with the same arguments.
        """
        if len(self._rows) >= _ROWS_AT_ONCE:
            self._write_rows()
        if not self._exists:
            assert position == 0, f"a new segment {self.first_index} begins at {position}"
            self._make()
        size = self._data.pwritev(frames, position)
        self._unwritten_back += size
        if self._unwritten_back >= writeback_bytes:
            end = position + size
            self._data.start_writeback(self._unwritten_back, max(0, end - self._unwritten_back))
            self._unwritten_back = 0
        self._rows += rows

    def _write_rows(self) -> None:
        if self._rows:
            with self._lock:
                self._make_index()
                position = INDEX_HEAD_SIZE + self.rows_written * ROW_SIZE
                self._index.pwritev([b"".join(self._rows)], position)
                self.rows_written += len(self._rows)
            self._rows = []

    def _make_index(self) -> None:
        """Make an index file without rows; called with the first rows to write."""
        if not self._index_made:
            self._index.truncate(0, create=True)
            self._index.pwritev([index_head(self.first_index, self._log_id)], 0)
            self._index_made = True

    def truncate(self, position: int, rows: int) -> None:
        """Cut the data file at `position` and the index file after `rows` rows."""
        if self._exists:
            self._data.truncate(position)
            self._write_rows()
            with self._lock:
                self._make_index()
                self.rows_written = rows
                self._index.truncate(INDEX_HEAD_SIZE + rows * ROW_SIZE)
                self.truncations += 1
        else:
            self.truncations += 1

    def holds_rows(self, rows: int) -> None:
        """Set the number of valid rows that recovery found in the index file; new rows follow these."""
        self.rows_written = rows

    def rewrite_index(self, rows: Buffer) -> None:
        """Replace the content of the index file by `rows`, the packed rows of all entries."""
        with self._lock:
            self._index_made = False
            self._make_index()
            self._index.pwritev([rows], INDEX_HEAD_SIZE)
            self._rows = []
            self.rows_written = len(rows) // ROW_SIZE

    def read_head(self) -> bytes:
        """Return the bytes of the index file's head; fewer if the file is missing or too short."""
        try:
            return bytes(self._index.open().pread(INDEX_HEAD_SIZE, 0))
        except DiskError as error:
            if not error.is_damage:
                raise
            return b""

    def read_rows(self, slot: int, count: int) -> bytes:
        """Return `count` rows from `slot` on, as the index file has them, unchecked. Any thread.

        They are fewer if the file is missing or too short.
        """
        try:
            return bytes(self._index.open().pread(count * ROW_SIZE, INDEX_HEAD_SIZE + slot * ROW_SIZE))
        except DiskError as error:
            if not error.is_damage:
                raise
            return b""

    def read_rows_nowait(self, slot: int, count: int) -> Buffer | None:
        """Return `count` rows from `slot` on if all are in the page cache, else None: use a thread then."""
        index = self._index
        index.used = True
        file = index.file
        if file is None:
            return None
        try:
            return file.pread_nowait(count * ROW_SIZE, INDEX_HEAD_SIZE + slot * ROW_SIZE)
        except DiskError:
            return None

    def mend_rows(self, slot: int, rows: bytes, *, truncations: int) -> None:
        """Write rebuilt rows to the index file, from `slot` on. Any thread.

        Nothing is written if the segment was removed, or was truncated since the rows were read:
        `truncations` is the segment's number of truncations at that time.
        """
        with self._lock:
            if self.truncations == truncations and self._exists:
                file = self._index.open(create=True)
                if file.size() < INDEX_HEAD_SIZE:
                    self._index.pwritev([index_head(self.first_index, self._log_id)], 0)
                self._index.pwritev([rows], INDEX_HEAD_SIZE + slot * ROW_SIZE)

    def repair(self, position: int, frame: Buffer, slot: int, rows: bytes) -> None:
        """Write an intact frame over a damaged one, and its index rows from `slot` on; durable on return."""
        counted_on = self._data.unsynced
        self._data.pwritev([frame], position)
        self._sync_now(self._data, counted_on=counted_on)
        self._write_rows()
        counted_on = self._index.unsynced
        with self._lock:
            self._make_index()
            self._index.pwritev([rows], INDEX_HEAD_SIZE + slot * ROW_SIZE)
        self._sync_now(self._index, counted_on=counted_on)

    def _sync_now(self, handle: Handle, *, counted_on: bool) -> None:
        """Sync one file after a write.

        `counted_on` tells that the file held unsynced data before that write, on which a checkpoint will
        rely. The disk reports a failure only once, so the error is then kept, and the checkpoint's own `sync`
        raises it again.
        """
        with self._sync_lock:
            try:
                handle.sync()
            except DiskError as error:
                if counted_on:
                    self._sync_error = error
                else:
                    handle.synced(handle.writes)  # nothing relies on it: the write may be tried again
                raise

    @property
    def unsynced(self) -> bool:
        """Whether the data file holds unsynced data, so that it stays open."""
        return self._exists and self._data.unsynced

    def prepare_sync(self) -> None:
        """Write all rows in memory to the index file, so that `sync`, called next, covers them.

        The segment writer's thread; `sync` may run in another one.
        """
        if self._exists:
            self._write_rows()
            self._unwritten_back = 0

    @property
    def exists(self) -> bool:
        """Whether the segment has files: they were made, and not removed since."""
        return self._exists

    def sync(self) -> None:
        """Make everything written before `prepare_sync` durable, except the files' names in the directory.

        It may run beside the writer's thread, which may remove the files meanwhile: then there is nothing
        to sync. Every call after a failed one fails too. Written files stay open until they are synced,
        because the sync of a file that was closed and opened again may not report an earlier error.
        """
        self._sync_handles(self._data, self._index)

    def sync_data(self) -> None:
        """Sync the data file alone, as `sync` does, so that the file need not stay open any more."""
        self._sync_handles(self._data)

    def _sync_handles(self, *handles: Handle) -> None:
        # The kernel reports an error to one caller only; here all callers get it.
        with self._sync_lock:
            if self._sync_error is not None:
                raise self._sync_error
            removals = self._removals
            try:
                for handle in handles:
                    handle.sync()
            except DiskError as error:
                if error.is_missing and removals != self._removals:
                    return
                self._sync_error = error
                raise

    def remove(self) -> None:
        """Delete all files of the segment. An open file stays readable until its last reader releases it."""
        # First, as a concurrent sync may find the files missing from here on.
        self._exists = False
        self._removals += 1
        disk = self._resources.files.disk
        with self._lock:
            # First, so that none is left without its segment.
            disk.unlink(self.key_index_path)
            disk.unlink(self._data.path)
            disk.unlink(self._index.path)
            self.forget()
        self._index_made = False
        self._rows = []
        self.rows_written = 0

    def forget(self) -> None:
        """Release both files without closing them: they are deleted or in the trash, and need no sync."""
        self._exists = False
        self._removals += 1
        self._data.forget()
        self._index.forget()

    def close(self) -> None:
        """Close both files."""
        self._data.close()
        self._index.close()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk (some consecutive rows) of an index file: what a thread needs to read or rebuild the rows.

    `number` is the chunk's number in the file, `count` the number of its rows. The other attributes describe
    the whole segment at the time of the request: `truncations` is how often it had been truncated,
    `last_index` its last entry, `size` the bytes of its frames, `next_offset` the offset after its records.
    """

    file: SegmentFile
    number: int
    count: int
    truncations: int
    last_index: int
    size: int
    next_offset: int

    @property
    def slot(self) -> int:
        """Number of the chunk's first row in the index file, from 0."""
        return self.number * CHUNK_ROWS

    @property
    def first_index(self) -> int:
        """Raft index of the entry of the chunk's first row."""
        return self.file.first_index + self.slot
