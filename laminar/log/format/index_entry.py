"""Index entries: packed rows of 56 bytes that say where each entry of a log lies in its segment.

There is one row for each entry, in the order of Raft indexes without gaps, so the place of a row is computed.
Pure: bytes in, values out. A row has a checksum of its own: where a batch is damaged, an intact row still
tells its index and term. The functions below do not check it, except `row_is_whole` and `whole_rows`.

A *slot* is the number of a row, from 0, among the rows that are given; in an index file, among all its rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from laminar.batch.header import HEADER_CRC_AT, HEADER_SIZE, SEALED_PLACE_FIELDS, Buffer, Kind, fields
from laminar.checksum import crc32c

_PLACE_AND_CRC = fields("index", "term", "header_crc")
_unpack_sealed_place = SEALED_PLACE_FIELDS.unpack_from

# term, base_offset, position, append_time_ms, tag_mask, count, size, kind, flags; then the row's crc32c.
_FIELDS = struct.Struct("<QQQqQIIBBH")
_CRC = struct.Struct("<I")
ROW_SIZE = _FIELDS.size + _CRC.size
assert ROW_SIZE == 56

# (term, offset of the first record, position, records, size) of the row at a byte position: what reading one
# record needs, without a Python call, as that path is counted in tenths of a µs.
unpack_frame_row = struct.Struct("<QQQ16xII").unpack_from

# The kind of an entry whose frame and row were both unreadable: its index is known, its term is not.
UNKNOWN_KIND = 255
# The kinds of entries whose records are not visible at their own place in the log: a `channel` entry may hold
# copies, and a `skip` entry has none. Plain numbers, because every lookup compares them.
_HIDDEN = (int(Kind.STAGED), int(Kind.DELAYED), int(Kind.CHANNEL), int(Kind.SKIP))


@dataclass(slots=True)
class IndexEntry:
    """One row of the index, unpacked: what is known of an entry without its frame.

    `index` and `term` are those of Raft. `base_offset` is the offset of the first record, and `count` the
    number of records. The frame is at byte `position` of its segment, and has `size` bytes. `kind` is a
    `Kind`, or `UNKNOWN_KIND` if header and row were both damaged. `tag_mask` is the mask of the records'
    tags.
    """

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
        """Offset after the last record."""
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
    """Return the packed row of an entry, with its checksum."""
    fields = _FIELDS.pack(term, base_offset, position, append_time_ms, tag_mask, count, size, kind, 0, 0)
    return fields + crc32c(fields).to_bytes(4, "little")


def unpack_row(rows: Buffer, slot: int, index: int) -> IndexEntry:
    """Return the index entry in `slot` of packed rows; `index` is its Raft index, which rows do not hold."""
    term, base_offset, position, time_ms, tag_mask, count, size, kind, _, _ = _FIELDS.unpack_from(
        rows, slot * ROW_SIZE
    )
    return IndexEntry(index, term, base_offset, count, position, size, time_ms, kind, tag_mask)


def row_is_whole(rows: Buffer, slot: int) -> bool:
    """Return whether the row in `slot` is intact, according to its own checksum."""
    view = memoryview(rows)[slot * ROW_SIZE : (slot + 1) * ROW_SIZE]
    if len(view) < ROW_SIZE:
        return False
    checksum: int = _CRC.unpack_from(view, _FIELDS.size)[0]
    return crc32c(view[: _FIELDS.size]) == checksum


def whole_rows(rows: Buffer, count: int) -> int:
    """Return how many of the first `count` rows are intact and follow each other without a gap.

    A row follows the row before it if its frame and its offsets begin where those of that row end.
    """
    position = offset = -1
    view = memoryview(rows)
    end = _FIELDS.size
    place = 0
    for slot in range(min(count, len(view) // ROW_SIZE)):
        _, base_offset, at, _, _, records, size, kind, _, _ = _FIELDS.unpack_from(view, place)
        checksum: int = _CRC.unpack_from(view, place + end)[0]
        if crc32c(view[place : place + end]) != checksum:
            return slot
        if position >= 0 and (at != position or base_offset != offset):
            # A placeholder row without bytes or records may have any position: a repair of
            # the entry before it moves the end of that entry, and leaves this row as it is.
            nowhere = kind == UNKNOWN_KIND and not size and not records
            if base_offset != offset or not nowhere:
                return slot
        position, offset = at + size, base_offset + records
        place += ROW_SIZE
    return min(count, len(view) // ROW_SIZE)


def is_frame_of(frame: Buffer, index: int, term: int) -> bool:
    """Return whether `frame` is that of entry `index` of term `term`, and both its checksums are right."""
    return is_frame_at(memoryview(frame), 0, len(frame), index, term)


def is_frame_at(view: memoryview, start: int, end: int, index: int, term: int) -> bool:
    """Return whether bytes `start` to `end` of `view` are the intact frame of entry `index` of term `term`.

    Like `is_frame_of`, but for a part of a larger buffer.
    """
    if start < 0 or end - start < HEADER_SIZE or end > len(view):  # rows may be of other frames
        return False
    found_index, found_term, body_crc, header_crc = _unpack_sealed_place(view, start)
    return bool(
        found_index == index
        and found_term == term
        and crc32c(view[start : start + HEADER_CRC_AT]) == header_crc
        and crc32c(view[start + HEADER_SIZE : end]) == body_crc
    )


def unpack_frame_rows(rows: Buffer, slot: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Return an iterator over `count` rows from `slot` on, each as (term, position, size, kind)."""
    start = slot * ROW_SIZE
    # A copy: `rows` may grow while the iterator lives.
    return _FRAME_ROW.iter_unpack(rows[start : start + count * ROW_SIZE])


def is_header_of(header: Buffer, row: IndexEntry) -> bool:
    """Return whether `header` is intact (its checksum is right) and is that of the entry of `row`."""
    if len(header) < HEADER_SIZE:
        return False
    index, term, checksum = _PLACE_AND_CRC.unpack_from(header)
    return bool(
        (index, term) == (row.index, row.term) and crc32c(memoryview(header)[:HEADER_CRC_AT]) == checksum
    )


def row_mask(rows: Buffer, slot: int) -> int:
    """Return the mask of the tags of an entry's records, by which a reader with a filter skips entries.

    All bits are set for a row of `UNKNOWN_KIND`, so that such a reader does not skip the damage. The mask of
    a staged entry is 0: its records are read through the publish entry that names it.
    """
    mask, kind = _TAGS.unpack_from(rows, slot * ROW_SIZE)
    if kind in _HIDDEN:
        return 0
    return int(mask) if kind != UNKNOWN_KIND else _ALL_TAGS


def row_is_shown(rows: Buffer, slot: int) -> bool:
    """Return whether readers see an entry's records at its own place in the log: False for a staged entry."""
    _, kind = _TAGS.unpack_from(rows, slot * ROW_SIZE)
    return bool(kind not in _HIDDEN)


def row_kind(rows: Buffer, slot: int) -> int:
    """Return the kind of a row's entry: a `Kind`, or `UNKNOWN_KIND`."""
    kind: int = _TAGS.unpack_from(rows, slot * ROW_SIZE)[1]
    return kind


def row_offset(rows: Buffer, slot: int) -> int:
    """Return the offset of the first record of a row's entry."""
    offset: int = _OFFSET.unpack_from(rows, slot * ROW_SIZE)[0]
    return offset


def row_offsets(rows: Buffer, slot: int) -> tuple[int, int]:
    """Return (offset of the first record, number of records) of a row's entry."""
    offset, count = _OFFSETS.unpack_from(rows, slot * ROW_SIZE)
    return offset, count


def row_next_offset(rows: Buffer, slot: int) -> int:
    """Return the offset after the last record of a row's entry."""
    offset, count = _OFFSETS.unpack_from(rows, slot * ROW_SIZE)
    return int(offset + count)


def row_place(rows: Buffer, slot: int) -> tuple[int, int, int]:
    """Return (term, position, size) of a row's entry, with which its frame can be read and checked."""
    term, position, size = _WHERE.unpack_from(rows, slot * ROW_SIZE)
    return term, position, size


def row_term(rows: Buffer, slot: int) -> int:
    """Return the term of a row's entry."""
    term: int = _TERM.unpack_from(rows, slot * ROW_SIZE)[0]
    return term


_TERM = struct.Struct("<Q")
_OFFSET = struct.Struct("<8xQ")
_OFFSETS = struct.Struct("<8xQ24xI")
_TAGS = struct.Struct("<32xQ8xB")
_ALL_TAGS = (1 << 64) - 1
_WHERE = struct.Struct("<Q8xQ20xI")
_FRAME_ROW = struct.Struct("<Q8xQ20xIB7x")
assert _FRAME_ROW.size == ROW_SIZE
