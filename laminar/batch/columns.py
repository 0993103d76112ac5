"""The body of a batch of records: a directory, then columns in Arrow's own layout.

The directory has one line for each column: where it is, how long, how compressed. This module decides where
each column begins and how a missing cell is written; it checks that the numbers in a directory from outside
are consistent and within limits. It decompresses a column, never to more bytes than the directory states. Of
cells it checks only lengths and times. ``docs/format.md`` has every byte.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

import mmh3

from laminar.batch.header import HEADER_SIZE, MAX_FRAME_BYTES, BatchError, Buffer, Header, Kind, malformed

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


class Column(IntEnum):
    """The known columns. A directory lists them by rising number; readers skip columns with other numbers."""

    VALUE = 1
    KEY = 2
    TIMESTAMP = 3
    TAG_HASH = 4
    TAG = 5
    DELIVERY_TIME = 6
    TRACE_ID = 7
    HEADERS = 8


class Codec(IntEnum):
    """The compression of a column of byte strings. The number of LZ4 is reserved: it is not supported."""

    NONE = 0
    ZSTD = 1
    LZ4 = 2


# Flags of a column. VARIABLE: it has count + 1 int32 offsets, from 0, then bytes; without it, elements of
# `width` bytes. NULLS: it begins with a bitmap, one bit for each record from the lowest bit up, 1 where there
# is a cell.
VARIABLE = 1
NULLS = 2
_KNOWN_COLUMN_FLAGS = VARIABLE | NULLS

# The largest time, 292,000 years: in microseconds, the unit of Arrow and Spark, it still fits 64 bits.
MAX_TIME_MS = (2**63 - 1) // 1000

_WIDTHS = {Column.TIMESTAMP: 8, Column.TAG_HASH: 8, Column.DELIVERY_TIME: 8, Column.TRACE_ID: 16}
_DATA = Kind.DATA
_COMPRESSIBLE = frozenset((Column.VALUE, Column.KEY, Column.HEADERS))
_ALIGNMENT = 64
_PART_ALIGNMENT = 8
_HEAD = struct.Struct("<HHI")  # columns, reserved, directory bytes
_ENTRY = struct.Struct("<BBHIIIIIII")
DIRECTORY_HEAD_BYTES, DIRECTORY_LINE_BYTES = _HEAD.size, _ENTRY.size
_ZEROS = bytes(_ALIGNMENT)


class Entry(NamedTuple):
    """One line of the directory. Positions count bytes from the start of the frame; 0 means absent."""

    column: int
    codec: int
    flags: int
    width: int
    validity_position: int
    offsets_position: int
    position: int
    stored_length: int
    plain_length: int
    null_count: int


class Cells(NamedTuple):
    """An encoded column, to be put into a frame by `assemble`, which joins its `parts`.

    `column` and `codec` are plain numbers, because those of a newer program have no names here. `width` is
    the number of bytes of each cell, 0 for a column of byte strings. `validity` and `offsets` are empty if
    the column has none. `stored_length` and `plain_length` are the bytes of `parts` as stored, and before
    compression.
    """

    column: int
    codec: int
    width: int
    validity: bytes
    offsets: bytes
    parts: Sequence[Buffer]
    stored_length: int
    plain_length: int
    null_count: int


def tag_hash(tag: str) -> int:
    """Return the 64-bit hash of a tag: the low half of MurmurHash3 x64 128, seed 0, of its UTF-8."""
    return mmh3.hash64(tag.encode(), signed=False)[0]


def tag_bit(tag: str) -> int:
    """Return a mask with the one bit that `tag` sets in a batch's `tag_mask`."""
    return 1 << (tag_hash(tag) & 63)


def variable(column: Column, cells: Sequence[Buffer | None], codec: Codec = Codec.NONE) -> Cells:
    """Return a column of byte strings; None is a missing cell. It loops over no cells in Python.

    `codec` is used only for columns that may be compressed, and only if it saves bytes.
    """
    # Every record has a value: looking for None would cost as much as joining.
    validity, null_count = (b"", 0) if column is Column.VALUE else _validity(cells)
    present: Sequence[Buffer]
    present = [cell or b"" for cell in cells] if null_count else cells  # type: ignore[assignment]
    try:
        ends = list(accumulate(map(len, present), initial=0))
        offsets = struct.pack(f"<{len(ends)}i", *ends)
    except struct.error:
        raise too_large(f"{column.name.lower()}_bytes", ends[-1], MAX_FRAME_BYTES) from None
    plain_length = stored_length = ends[-1]
    if codec is not Codec.NONE and column in _COMPRESSIBLE:
        folded = _fold(codec, b"".join(present))
        if len(folded) < plain_length:
            return Cells(
                column, codec, 0, validity, offsets, (folded,), len(folded), plain_length, null_count
            )
    return Cells(column, Codec.NONE, 0, validity, offsets, present, stored_length, plain_length, null_count)


def times(column: Column, cells: Sequence[int | None]) -> Cells:
    """Return a column of times in ms; None is a missing cell, stored as 0."""
    validity, null_count = _validity(cells)
    present = [cell or 0 for cell in cells] if null_count else cells
    _check_times(column, present)  # type: ignore[arg-type]
    data = struct.pack(f"<{len(cells)}q", *present)
    return Cells(column, Codec.NONE, 8, validity, b"", (data,), len(data), len(data), null_count)


def tag_hashes(hashes: Sequence[int]) -> Cells:
    """Return the column of 64-bit tag hashes, 0 where a record has no tag."""
    data = struct.pack(f"<{len(hashes)}Q", *hashes)
    return Cells(Column.TAG_HASH, Codec.NONE, 8, b"", b"", (data,), len(data), len(data), 0)


def _check_times(column: int, found: Sequence[int]) -> None:
    for time in (min(found), max(found)):
        if abs(time) > MAX_TIME_MS:
            raise malformed("time", time, f"within {MAX_TIME_MS} ms of 1970", f"column {column:d}")


def read_times(frame: Buffer, entry: Entry, count: int) -> tuple[int, ...]:
    """Return the times of a column in ms, checked to be in range; for a missing cell any number."""
    found: tuple[int, ...] = struct.unpack_from(f"<{count}q", frame, entry.position)
    _check_times(entry.column, found)
    return found


def trace_ids(cells: Sequence[bytes | None]) -> Cells:
    """Return the column of 16-byte trace ids; None is a missing cell, stored as zeros."""
    validity, null_count = _validity(cells)
    parts = [bytes(16) if cell is None else cell for cell in cells]
    for part in parts:
        if len(part) != 16:
            raise malformed("trace_id", f"{len(part)} bytes", 16, "record")
    size = 16 * len(parts)
    return Cells(Column.TRACE_ID, Codec.NONE, 16, validity, b"", parts, size, size, null_count)


def _validity(cells: Sequence[object]) -> tuple[bytes, int]:
    if None not in cells:
        return b"", 0
    digits = "".join(["0" if cell is None else "1" for cell in cells])
    return bitmap(digits), digits.count("0")


def bitmap(digits: str) -> bytes:
    """Return the validity bitmap for `digits`: one character for each record, "1" where there is a cell."""
    # `int` parses binary digits in C, which is the fastest way to make a bitmap; its last digit is bit 0.
    return int(digits[::-1], 2).to_bytes((len(digits) + 7) // 8, "little")


def presence(frame: Buffer, entry: Entry, count: int) -> str | None:
    """Return one character for each record, "1" where there is a cell; None if every record has one."""
    if not entry.flags & NULLS:
        return None
    return f"{_validity_bits(frame, entry, count):0{count}b}"[::-1]


def _validity_bits(frame: Buffer, entry: Entry, count: int) -> int:
    start = entry.validity_position
    return int.from_bytes(memoryview(frame)[start : start + (count + 7) // 8], "little")


def _fold(codec: Codec, plain: bytes) -> bytes:
    if codec is not Codec.ZSTD:
        raise unsupported_codec(codec)
    return zstd.compress(plain)


def assemble(columns: Sequence[Cells]) -> bytearray:
    """Return a frame with room for a header, the directory, and `columns`, sorted by rising number.

    Every byte is copied once. `seal` then writes the header.
    """
    directory_bytes = _HEAD.size + _ENTRY.size * len(columns)
    directory = [_HEAD.pack(len(columns), 0, directory_bytes)]
    parts: list[Buffer] = [bytes(HEADER_SIZE), b""]
    position = HEADER_SIZE + directory_bytes
    for cells in columns:
        column, codec, width, validity, offsets, data, stored_length, plain_length, null_count = cells
        flags = 0 if width else VARIABLE
        validity_position = offsets_position = 0
        gap = -position % _ALIGNMENT
        if validity:
            flags |= NULLS
            parts.append(_ZEROS[:gap])
            validity_position = position + gap
            parts.append(validity)
            position = validity_position + len(validity)
            gap = -position % _PART_ALIGNMENT
        if offsets:
            parts.append(_ZEROS[:gap])
            offsets_position = position + gap
            parts.append(offsets)
            position = offsets_position + len(offsets)
            gap = -position % _PART_ALIGNMENT
        parts.append(_ZEROS[:gap])
        position += gap
        directory.append(
            _ENTRY.pack(
                column,
                codec,
                flags,
                width,
                validity_position,
                offsets_position,
                position,
                stored_length,
                plain_length,
                null_count,
            )
        )
        parts.extend(data)
        position += stored_length
        if position > MAX_FRAME_BYTES:
            raise too_large("frame_bytes", position, MAX_FRAME_BYTES)
    # A frame ends on 8 bytes, so that frames back to back keep their columns aligned in memory.
    parts.append(_ZEROS[: -position % _PART_ALIGNMENT])
    parts[1] = b"".join(directory)
    return bytearray().join(parts)


def has_column(frame: Buffer, column: Column) -> bool:
    """Return whether a batch of records has a column; its directory must be checked. It takes 0.3 µs."""
    columns = _HEAD.unpack_from(frame, HEADER_SIZE)[0]
    first = HEADER_SIZE + _HEAD.size
    return column in bytes(memoryview(frame)[first : first + _ENTRY.size * columns : _ENTRY.size])


def read_directory(frame: Buffer, header: Header) -> dict[int, Entry]:
    """Return the directory of a batch of records, by column number, after checking its numbers.

    Positions must be those that `assemble` would give: so columns cannot overlap or leave the frame, and only
    padding lies between them. Lengths must agree with the number of records. It takes a few microseconds,
    whatever the batch holds.

    Raises:
        BatchError: a number is wrong, or the batch holds no records.
    """
    if header.kind is not _DATA:
        raise malformed("kind", header.kind.name, Kind.DATA.name, "batch")
    if header.count == 0:
        raise malformed("count", 0, "at least 1", "batch")
    if len(frame) != header.frame_size:
        raise malformed("length", len(frame), header.frame_size, "frame")
    if header.body_length < _HEAD.size:
        raise malformed("body_length", header.body_length, f"at least {_HEAD.size}", "batch")
    if header.body_length > _ONLY_VALUES.size and (entry := _only_values(frame, header)) is not None:
        return {entry.column: entry}
    columns, reserved, directory_bytes = _HEAD.unpack_from(frame, HEADER_SIZE)
    if reserved:
        raise BatchError("unsupported", "directory: reserved is not 0", field="reserved", value=reserved)
    if directory_bytes != _HEAD.size + _ENTRY.size * columns or directory_bytes > header.body_length:
        raise malformed("directory_bytes", directory_bytes, f"those of {columns} columns", "directory")
    entries: dict[int, Entry] = {}
    end = HEADER_SIZE + directory_bytes
    last = 0
    for at in range(HEADER_SIZE + _HEAD.size, HEADER_SIZE + directory_bytes, _ENTRY.size):
        entry = Entry._make(_ENTRY.unpack_from(frame, at))
        if entry.column <= last:
            raise malformed("column", entry.column, f"above {last}", "directory")
        last = entry.column
        end = _check_entry(entry, header.count, end)
        entries[last] = entry
    end += -end % _PART_ALIGNMENT
    if end != header.frame_size:
        raise malformed("frame_size", header.frame_size, end, "directory")
    if Column.VALUE not in entries:
        raise malformed("column", "missing", Column.VALUE.name, "directory")
    for entry in entries.values():
        if entry.flags & NULLS:
            bits = _validity_bits(frame, entry, header.count)
            if bits >> header.count or header.count - bits.bit_count() != entry.null_count:
                raise malformed("validity", "another number of nulls", entry.null_count, "directory")
    return entries


# A directory of one line, and where the offsets of its column begin if it has no bitmap.
_ONLY_VALUES = struct.Struct(_HEAD.format + _ENTRY.format[1:])
_ONLY_OFFSETS_AT = -(-(HEADER_SIZE + _ONLY_VALUES.size) // _ALIGNMENT) * _ALIGNMENT
# The first numbers of such a directory, up to the offsets' position, if its column is of plain values:
# columns, reserved, directory_bytes, column, codec, flags, width, validity_position, offsets_position.
_PLAIN_VALUES = (
    1,
    0,
    _ONLY_VALUES.size,
    int(Column.VALUE),
    int(Codec.NONE),
    VARIABLE,
    0,
    0,
    _ONLY_OFFSETS_AT,
)


# The same as bytes, compared at once; and the line of such a column, up to its position.
_SHORT_ONLY_VALUES = struct.Struct("<24sIIII")
_SHORT_PLAIN_VALUES = struct.pack("<HHIBBHIII", *_PLAIN_VALUES)
_PLAIN_LINE = _PLAIN_VALUES[3:]


def says_only_values(frame: Buffer) -> bool:
    """Return whether the directory names one column, of uncompressed values; nothing is verified."""
    if len(frame) < HEADER_SIZE + _ONLY_VALUES.size:
        return False
    return _ONLY_VALUES.unpack_from(frame, HEADER_SIZE)[: len(_PLAIN_VALUES)] == _PLAIN_VALUES


def _only_values(frame: Buffer, header: Header) -> Entry | None:
    """Return the directory's line of a batch that has only uncompressed values; None for any other batch.

    For this most common batch it applies the rules of `read_directory` in a third of the time. None does not
    mean an error: call `read_directory` then.
    """
    line, position, stored_length, plain_length, null_count = _SHORT_ONLY_VALUES.unpack_from(
        frame, HEADER_SIZE
    )
    if (
        line != _SHORT_PLAIN_VALUES
        or position != -(-(_ONLY_OFFSETS_AT + 4 * (header.count + 1)) // _PART_ALIGNMENT) * _PART_ALIGNMENT
        or stored_length != plain_length
        or -(-(position + stored_length) // _PART_ALIGNMENT) * _PART_ALIGNMENT != header.frame_size
        or null_count
    ):
        return None
    # `tuple.__new__` takes a quarter of the time of `Entry`, which checks how many there are.
    return tuple.__new__(Entry, (*_PLAIN_LINE, position, stored_length, plain_length, 0))


def _check_entry(entry: Entry, count: int, end: int) -> int:
    """Check one line of the directory; return the position in the frame at which its column ends.

    `end` is where the column before it ends, `count` the number of records. Raises `BatchError`.
    """
    flags, width, name = entry.flags, entry.width, f"column {entry.column}"
    if flags & ~_KNOWN_COLUMN_FLAGS:
        raise BatchError("unsupported", f"{name}: flags {flags:#x}", field="flags", value=flags)
    if bool(flags & VARIABLE) is bool(width) or (
        entry.column in _LAYOUTS and _LAYOUTS[entry.column] != width
    ):
        raise malformed("width", width, _LAYOUTS.get(entry.column, "0 or VARIABLE"), name)
    nulls_allowed = 0 if entry.column in (Column.VALUE, Column.TAG_HASH) else count
    if bool(flags & NULLS) is not bool(entry.null_count) or entry.null_count > nulls_allowed:
        raise malformed("null_count", entry.null_count, "as the flags say, or not allowed", name)
    end += -end % _ALIGNMENT
    if flags & NULLS:
        if entry.validity_position != end:
            raise malformed("validity_position", entry.validity_position, end, name)
        end += (count + 7) // 8
        end += -end % _PART_ALIGNMENT
    elif entry.validity_position:
        raise malformed("validity_position", entry.validity_position, 0, name)
    if flags & VARIABLE:
        if entry.offsets_position != end:
            raise malformed("offsets_position", entry.offsets_position, end, name)
        end += 4 * (count + 1)
        end += -end % _PART_ALIGNMENT
        if entry.plain_length > MAX_FRAME_BYTES:
            raise malformed("plain_length", entry.plain_length, f"at most {MAX_FRAME_BYTES}", name)
        if entry.codec and entry.column in _LAYOUTS and entry.column not in _COMPRESSIBLE:
            raise malformed("codec", entry.codec, Codec.NONE, name)
    else:
        if entry.offsets_position:
            raise malformed("offsets_position", entry.offsets_position, 0, name)
        if entry.plain_length != width * count:
            raise malformed("plain_length", entry.plain_length, width * count, name)
        if entry.codec:
            raise malformed("codec", entry.codec, Codec.NONE, name)
    if entry.codec == Codec.NONE and entry.stored_length != entry.plain_length:
        raise malformed("stored_length", entry.stored_length, entry.plain_length, name)
    if entry.position != end:
        raise malformed("position", entry.position, end, name)
    return end + entry.stored_length


_LAYOUTS: dict[int, int] = {column: _WIDTHS.get(column, 0) for column in Column}


def read_ends(frame: Buffer, entry: Entry, count: int) -> tuple[int, ...]:
    """Return the count + 1 offsets of a column of byte strings; they must rise from 0 to its length."""
    ends: tuple[int, ...] = struct.unpack_from(f"<{count + 1}i", frame, entry.offsets_position)
    # To sort what is sorted takes one pass in C: the cheapest test of their order.
    if ends[0] != 0 or ends[-1] != entry.plain_length or sorted(ends) != list(ends):
        raise malformed("offsets", "not in order", f"0 to {entry.plain_length}", f"column {entry.column}")
    return ends


def unfold(frame: Buffer, entry: Entry) -> memoryview:
    """Return the plain bytes of a column: a view of the frame, or decompressed.

    Raises:
        BatchError: the codec is unknown, or the bytes do not decompress to exactly the stated length.
    """
    stored = memoryview(frame)[entry.position : entry.position + entry.stored_length]
    if entry.codec == Codec.NONE:
        return stored
    if entry.codec != Codec.ZSTD:
        raise unsupported_codec(entry.codec)
    decompressor = zstd.ZstdDecompressor()
    name = f"column {entry.column}"
    try:
        # One byte more than the stated length: enough to see that a column is longer than stated.
        plain = decompressor.decompress(stored, max_length=entry.plain_length + 1)
    except zstd.ZstdError as error:
        raise malformed("stored", str(error), "one zstd frame", name) from None
    if len(plain) != entry.plain_length or not decompressor.eof or decompressor.unused_data:
        raise malformed("plain_length", f"{len(plain)} bytes or more", entry.plain_length, name)
    return memoryview(plain)


def too_large(field: str, value: int, limit: int) -> BatchError:
    """Return the error for a part of a batch that has `value` bytes or cells, above its `limit`."""
    return BatchError(
        "too_large", f"batch: {field} is {value}, at most {limit}", field=field, value=value, limit=limit
    )


def unsupported_codec(codec: int) -> BatchError:
    """Return the error for a codec that this version cannot read."""
    known = [Codec.NONE.name, Codec.ZSTD.name]
    return BatchError("unsupported", f"codec {codec} is not known", field="codec", value=codec, limit=known)
