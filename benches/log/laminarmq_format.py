"""laminarmq's file format, written and read by a Python loop the way laminarmq does it.

As of laminarmq 0.0.5 (arindas/laminarmq, `src/storage/commit_log/segmented_log`): a segment is a ``.store``
file of records back to back and an ``.index`` file. A record is the length of its metadata (u64), the
metadata (an optional u32 index: one byte and four), and the value. The index begins with a marker of 16
bytes (base index u64, padding) and has 16 bytes a record: checksum u64 (CRC-32 of what the store holds),
length u32, position u32; all little endian. Both files are written through buffers of 8 KiB and never
synced; the index is kept in memory, and a read is one positioned read and one checksum.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

_BUFFER_BYTES = 8192
_BASE_MARKER = struct.Struct("<QQ")
_INDEX_RECORD = struct.Struct("<QII")
# The length of the metadata, then the metadata: "there is an index", and the index.
_METADATA = struct.Struct("<QBI")
_METADATA_LENGTH = _METADATA.size - 8


class MqSegment:
    """One segment, from index 0."""

    def __init__(self, directory: Path) -> None:
        self._store = (directory / "0.store").open("wb", buffering=_BUFFER_BYTES)
        self._index = (directory / "0.index").open("wb", buffering=_BUFFER_BYTES)
        self._rows: list[tuple[int, int, int]] = []
        self._position = 0
        self._read_fd = os.open(directory / "0.store", os.O_RDONLY)

    def append(self, value: bytes) -> int:
        """Returns the record's index."""
        index = len(self._rows)
        if index == 0:
            self._index.write(_BASE_MARKER.pack(0, 0))
        head = _METADATA.pack(_METADATA_LENGTH, 1, index)
        self._store.write(head)
        self._store.write(value)
        length = len(head) + len(value)
        row = (crc32(value, crc32(head)), length, self._position)
        self._index.write(_INDEX_RECORD.pack(*row))
        self._rows.append(row)
        self._position += length
        return index

    def flush(self) -> None:
        """What laminarmq does when it closes a segment: empty the buffers, sync nothing."""
        self._store.flush()
        self._index.flush()

    def read(self, index: int) -> bytes:
        """The value, its checksum checked."""
        checksum, length, position = self._rows[index]
        data = os.pread(self._read_fd, length, position)
        if len(data) != length or crc32(data) != checksum:
            raise ValueError(f"record {index} is damaged")
        metadata_length, _, _ = _METADATA.unpack_from(data)
        return data[8 + metadata_length :]

    def close(self) -> None:
        self._store.close()
        self._index.close()
        os.close(self._read_fd)


def write_all(directory: Path, values: Sequence[bytes]) -> MqSegment:
    """A segment of these values, its buffers emptied."""
    segment = MqSegment(directory)
    append = segment.append
    for value in values:
        append(value)
    segment.flush()
    return segment


def read_all(segment: MqSegment, count: int) -> int:
    """Read every record in order, verified; returns the bytes of the values."""
    read = segment.read
    total = 0
    for index in range(count):
        total += len(read(index))
    return total
