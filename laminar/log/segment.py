"""One segment of a log: its rows in memory (loop side) and its two files (writer side).

`Segment` is touched by the loop only, `SegmentFile` by the writer's thread; readers in any thread use
`SegmentFile.data`. The files hold frames back to back and rows back to back; their name is the first
index. An index file is a hint: it may be missing, short or stale, and is then made anew from the frames.
"""

from __future__ import annotations

import os
import struct
import threading

from laminar.log.disk import Buffer, Disk, File
from laminar.log.rows import ROW_SIZE, Row, row_term, unpack_row

# magic, version, size of a row, first index, log id; the rows follow at 32.
_INDEX_HEAD = struct.Struct("<4sHHQQ8x")
INDEX_HEAD_SIZE = _INDEX_HEAD.size
_INDEX_MAGIC = b"LMNX"
_INDEX_VERSION = 1

# Rows wait in memory for so many, or for the next checkpoint: until then the journal stands for them.
_ROWS_AT_ONCE = 256


def segment_name(first_index: int) -> str:
    return f"{first_index:020d}.log"


def index_name(first_index: int) -> str:
    return f"{first_index:020d}.index"


def index_head(first_index: int, log_id: int) -> bytes:
    return _INDEX_HEAD.pack(_INDEX_MAGIC, _INDEX_VERSION, ROW_SIZE, first_index, log_id)


class SegmentFile:
    """The files of one segment. Written by one thread; `data` may be asked for by any."""

    __slots__ = (
        "_data",
        "_disk",
        "_exists",
        "_index",
        "_lock",
        "_log_id",
        "_rows",
        "_rows_written",
        "_unwritten_back",
        "directory",
        "first_index",
    )

    def __init__(
        self, disk: Disk, directory: str, *, first_index: int, log_id: int, exists: bool = False
    ) -> None:
        self._disk = disk
        self.directory = directory
        self.first_index = first_index
        self._log_id = log_id
        self._lock = threading.Lock()
        self._data: File | None = None
        self._index: File | None = None
        self._exists = exists
        self._rows: list[bytes] = []
        self._rows_written = 0
        self._unwritten_back = 0

    @property
    def path(self) -> str:
        return os.path.join(self.directory, segment_name(self.first_index))

    @property
    def opened(self) -> File | None:
        """The data file if it is open; never blocks."""
        return self._data

    def data(self) -> File:
        """The data file, opened when needed. For a segment that was written."""
        if self._data is None:
            with self._lock:
                if self._data is None:
                    self._data = self._disk.open(self.path)
        return self._data

    def _make(self) -> None:
        """Both files, empty. Their directory must be synced before anything relies on them."""
        with self._lock:
            self._data = self._disk.open(self.path, create=True)
            self._data.truncate(0)
        self._open_index().truncate(0)
        self._open_index().pwritev([index_head(self.first_index, self._log_id)], 0)
        self._exists = True

    def _open_index(self) -> File:
        if self._index is None:
            self._index = self._disk.open(
                os.path.join(self.directory, index_name(self.first_index)), create=True
            )
        return self._index

    def write(self, position: int, frames: list[Buffer], rows: list[bytes], writeback_bytes: int) -> bool:
        """Append frames at `position`, and their rows. Returns whether the files were made by this call."""
        made = not self._exists
        if made:
            assert position == 0, f"a new segment {self.first_index} begins at {position}"
            self._make()
        data = self.data()
        size = data.pwritev(frames, position)
        self._unwritten_back += size
        if self._unwritten_back >= writeback_bytes:
            end = position + size
            data.start_writeback(self._unwritten_back, max(0, end - self._unwritten_back))
            self._unwritten_back = 0
        self._rows += rows
        if len(self._rows) >= _ROWS_AT_ONCE:
            self._write_rows()
        return made

    def _write_rows(self) -> None:
        if self._rows:
            position = INDEX_HEAD_SIZE + self._rows_written * ROW_SIZE
            self._open_index().pwritev([b"".join(self._rows)], position)
            self._rows_written += len(self._rows)
            self._rows = []

    def cut(self, position: int, rows: int) -> None:
        """Keep the first `rows` rows and the bytes below `position`."""
        if not self._exists:
            return
        self.data().truncate(position)
        self._write_rows()
        self._rows_written = rows
        self._open_index().truncate(INDEX_HEAD_SIZE + rows * ROW_SIZE)

    def holds_rows(self, rows: int) -> None:
        """The index file holds so many rows that count; the next goes behind them."""
        self._rows_written = rows

    def rewrite_index(self, rows: Buffer) -> None:
        """Make the index file anew from rows in memory."""
        file = self._open_index()
        file.truncate(0)
        file.pwritev([index_head(self.first_index, self._log_id), rows], 0)
        self._rows = []
        self._rows_written = len(rows) // ROW_SIZE

    def start_writeback(self) -> None:
        """Let the disk begin with what is not synced: that halves the time of many syncs."""
        if self._exists:
            self._write_rows()
            self.data().start_writeback(0, 0)
            self._open_index().start_writeback(0, 0)

    def sync(self) -> None:
        """Everything written so far is durable when this returns (names: see the directory)."""
        if self._exists:
            self._write_rows()
            self.data().sync()
            self._open_index().sync()
            self._unwritten_back = 0

    def remove(self) -> None:
        """Unlink both files. Open ones are readable until the last reader lets go of them."""
        self._disk.unlink(self.path)
        self._disk.unlink(os.path.join(self.directory, index_name(self.first_index)))
        self._exists = False
        self._rows = []
        self._rows_written = 0

    def close(self) -> None:
        for file in (self._data, self._index):
            if file is not None:
                file.close()
        self._data = self._index = None


class Segment:
    """What the loop knows of a segment: its rows, and how many bytes they stand for."""

    __slots__ = ("file", "first_index", "rows", "size")

    def __init__(self, first_index: int, file: SegmentFile, rows: bytearray | None = None) -> None:
        self.first_index = first_index
        self.file = file
        self.rows = bytearray() if rows is None else rows
        self.size = 0
        if self.rows:
            last = self.row(self.last_index)
            self.size = last.position + last.size

    @property
    def count(self) -> int:
        """Entries in it."""
        return len(self.rows) // ROW_SIZE

    @property
    def last_index(self) -> int:
        return self.first_index + len(self.rows) // ROW_SIZE - 1

    def row(self, index: int) -> Row:
        return unpack_row(self.rows, index - self.first_index, index)

    def term(self, index: int) -> int:
        return row_term(self.rows, index - self.first_index)

    def cut(self, index: int) -> None:
        """Forget entry `index` and all behind it; one before it stays."""
        assert index > self.first_index, f"cut of {index} would empty the segment {self.first_index}"
        self.size = self.row(index).position
        del self.rows[(index - self.first_index) * ROW_SIZE :]
