"""One fixed-size row per batch: what the index knows, and how it is read from a batch's header.

Rows are dense by Raft index, so finding one is arithmetic. Pure: bytes in, values out. A row carries its
own checksum, because it is the second witness of a damaged batch's (index, term).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from crc32c import crc32c

from laminar.log.disk import Buffer

# The fields of a batch's header that a log needs, as docs/format.md lays them out: kind, flags, index, term,
# prev_term, base_offset, count, body_length, append_time_ms, tag_mask, header CRC.
HEADER = struct.Struct("<4xxBHQQQQIIq40xQ20xI")
HEADER_SIZE = 128
HEADER_CRC_POSITION = 124
assert HEADER.size == HEADER_SIZE

# term, base_offset, position, append_time_ms, tag_mask, count, size, kind, flags; then the row's crc32c.
_FIELDS = struct.Struct("<QQQqQIIBBH")
_CRC = struct.Struct("<I")
ROW_SIZE = _FIELDS.size + _CRC.size
assert ROW_SIZE == 56

# Of a batch that could not be read and has no row: its index is known, its term is not.
UNKNOWN_KIND = 255


@dataclass(slots=True)
class Row:
    """What the index knows of one entry. `position` and `size` are bytes in its segment; `count` records."""

    index: int
    term: int
    base_offset: int
    count: int
    position: int
    size: int
    append_time_ms: int
    kind: int
    tag_mask: int

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.count


def pack_row(
    term: int,
    base_offset: int,
    position: int,
    append_time_ms: int,
    tag_mask: int,
    count: int,
    size: int,
    kind: int,
) -> bytes:
    fields = _FIELDS.pack(term, base_offset, position, append_time_ms, tag_mask, count, size, kind, 0, 0)
    return fields + _CRC.pack(crc32c(fields))


def unpack_row(rows: Buffer, slot: int, index: int) -> Row:
    """The row in `slot` of packed rows, as that of entry `index`."""
    term, base_offset, position, time_ms, tag_mask, count, size, kind, _, _ = _FIELDS.unpack_from(
        rows, slot * ROW_SIZE
    )
    return Row(index, term, base_offset, count, position, size, time_ms, kind, tag_mask)


def row_is_whole(rows: Buffer, slot: int) -> bool:
    """Whether the row's own checksum holds."""
    view = memoryview(rows)[slot * ROW_SIZE : (slot + 1) * ROW_SIZE]
    if len(view) < ROW_SIZE:
        return False
    checksum: int = _CRC.unpack_from(view, _FIELDS.size)[0]
    return crc32c(view[: _FIELDS.size]) == checksum


def row_term(rows: Buffer, slot: int) -> int:
    term: int = _TERM.unpack_from(rows, slot * ROW_SIZE)[0]
    return term


_TERM = struct.Struct("<Q")
