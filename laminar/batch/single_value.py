"""One value of a frame, verified: the fast path for reads of single records by offset.

`Batch` opens a directory, checks the offsets of all records and keeps both for the next use; a reader of one
record of each batch pays for that each time. Here the same bytes are verified, the same arithmetic is
checked as far as this value goes, and nothing is made but the view. It decides nothing: whatever is not
plain and right is left to `Batch`.
"""

from __future__ import annotations

import struct

from crc32c import crc32c

from laminar.batch.columns import DIRECTORY_HEAD_BYTES, DIRECTORY_LINE_BYTES, VARIABLE, Codec, Column
from laminar.batch.header import HEADER_CRC_AT, HEADER_SIZE, Buffer, fields

# Of the header, then the directory's head and first line, with what is compared at once as one number:
# columns, reserved, directory_bytes | column, codec, flags, width | validity_position, offsets_position |
# the rest.
_HEAD_AND_LINE = fields("index", "term", "count", "body_crc", "header_crc", then="QQQIIII")
assert _HEAD_AND_LINE.size == HEADER_SIZE + DIRECTORY_HEAD_BYTES + DIRECTORY_LINE_BYTES
_TWO_ENDS = struct.Struct("<ii")
# The line of plain values, which are the first column; and by head where their offsets begin.
_PLAIN_LINE = int.from_bytes(struct.pack("<BBHI", Column.VALUE, Codec.NONE, VARIABLE, 0), "little")
_PLAIN_OFFSETS_AT = {}
for _columns in range(1, len(Column) + 1):
    _size = DIRECTORY_HEAD_BYTES + _columns * DIRECTORY_LINE_BYTES
    _head = int.from_bytes(struct.pack("<HHI", _columns, 0, _size), "little")
    _PLAIN_OFFSETS_AT[_head] = -(-(HEADER_SIZE + _size) // 64) * 64


def verified_value(frame: Buffer, index: int, term: int, position: int) -> memoryview | None:
    """Return the value of the record at `position` of the frame of that entry, verified, as a view.

    For reading one record: what `verify`, `Batch` and `value` do, in one look at header and directory and
    without reading what belongs to the other records (1.2 µs for 4 KiB instead of 7). None where the frame
    is damaged or another, where values are compressed or the arithmetic is wrong: `verify` and `Batch` then
    name the reason.
    """
    if len(frame) < _HEAD_AND_LINE.size:
        return None
    (
        found_index,
        found_term,
        count,
        body_crc,
        header_crc,
        head,
        line,
        places,
        values_at,
        stored,
        length,
        nulls,
    ) = _HEAD_AND_LINE.unpack_from(frame)
    view = memoryview(frame)
    offsets_at = _PLAIN_OFFSETS_AT.get(head, 0)
    if (
        found_index != index
        or found_term != term
        or crc32c(view[:HEADER_CRC_AT]) != header_crc
        or crc32c(view[HEADER_SIZE:]) != body_crc
        or not position < count
        or line != _PLAIN_LINE
        # No bitmap, so the lower half of `places` is 0; an unknown head has no offsets.
        or places != offsets_at << 32
        or values_at != (offsets_at + 4 * count + 11) & -8
        or stored != length
        or nulls
        or values_at + length > len(frame)
    ):
        return None
    start, end = _TWO_ENDS.unpack_from(frame, offsets_at + 4 * position)
    return view[values_at + start : values_at + end] if 0 <= start <= end <= length else None
