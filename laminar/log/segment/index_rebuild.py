"""Rebuild index rows from the frames, where an index file is missing or damaged.

A segment is scanned header by header. Where a header is damaged, the row of the index file says what lies
there, if it is intact and agrees about the position. Without such a row the next intact header is searched,
and the terms of the entries before it are unknown. Nothing is changed but rows in an index file. It runs in
any thread; to rebuild a whole segment takes long, so that is never done in the loop's thread.
"""

from __future__ import annotations

from laminar.batch.header import HEADER_CRC_AT, HEADER_SIZE, LOG_FIELDS, MAGIC, Buffer, fields
from laminar.checksum import crc32c
from laminar.log.disk.disk import File
from laminar.log.disk.errors import DiskError
from laminar.log.format.index_entry import (
    ROW_SIZE,
    UNKNOWN_KIND,
    IndexEntry,
    is_header_of,
    pack_row,
    row_is_whole,
    unpack_row,
    whole_rows,
)
from laminar.log.segment.segment_file import CHUNK_ROWS, Chunk, SegmentFile

_BASE_OFFSET = fields("base_offset")

# A damaged header hides where the next frame begins; the search for it reads ranges of this size.
_SEARCH_BYTES = 1 << 20
_SECTOR_BYTES = 4096
# The largest number of records that a row can hold.
_MOST_RECORDS = (1 << 32) - 1
# Headers of small frames are read in windows of this size.
_WINDOW_BYTES = 64 * 1024


def header_row(header: Buffer, position: int) -> IndexEntry | None:
    """Return the index row of the frame with this header at `position`; None if the header is not intact."""
    if len(header) < HEADER_SIZE or header[: len(MAGIC)] != MAGIC:
        return None
    kind, _, index, term, _, base_offset, count, length, time_ms, tag_mask, checksum = LOG_FIELDS.unpack_from(
        header
    )
    if crc32c(memoryview(header)[:HEADER_CRC_AT]) != checksum:
        return None
    return IndexEntry(
        index, term, base_offset, count, position, HEADER_SIZE + length, time_ms, kind, tag_mask
    )


class _Headers:
    """The headers of a segment's frames, read with few calls where frames are small."""

    def __init__(self, data: File, size: int) -> None:
        self.data = data
        self.size = size
        self._window = memoryview(b"")
        self._at = 0
        self._last = 0

    def at(self, position: int) -> memoryview:
        """Return the bytes of a header at `position`; fewer at the end of the file."""
        start = position - self._at
        if not 0 <= start <= len(self._window) - HEADER_SIZE:
            near = position - self._last < _WINDOW_BYTES // 2
            wanted = min(_WINDOW_BYTES if near else HEADER_SIZE, self.size - position)
            self._window = memoryview(read_damaged(self.data, max(wanted, 0), position))
            self._at, start = position, 0
        self._last = position
        return self._window[start : start + HEADER_SIZE]

    def index_entry(self, position: int, index: int | None) -> IndexEntry | None:
        """Return the index entry of the frame at `position`.

        None if its header is not intact, or if the frame would reach beyond the end; with `index`, also if
        it is the frame of another entry.
        """
        row = header_row(self.at(position), position)
        if row is None or (index is not None and row.index != index) or position + row.size > self.size:
            return None
        return row

    def search(self, position: int, wanted: range) -> IndexEntry | None:
        """Return the first frame at or after `position` with an intact header and a wanted index."""
        while position < self.size:
            piece = bytes(read_damaged(self.data, min(_SEARCH_BYTES, self.size - position), position))
            at = piece.find(MAGIC)
            while at >= 0:
                row = self.index_entry(position + at, None)
                if row is not None and row.index in wanted:
                    return row
                at = piece.find(MAGIC, at + 1)
            position += max(len(piece) - len(MAGIC) + 1, 1)
        return None


def read_damaged(data: File, size: int, position: int) -> Buffer:
    """Return up to `size` bytes at `position`, with zeros for sectors that cannot be read."""
    try:
        return data.pread(size, position)
    except DiskError as error:
        if not error.is_damage:
            raise
        if size <= _SECTOR_BYTES:
            return bytes(size)
    end = position + size
    pieces = []
    while position < end:
        step = min(_SECTOR_BYTES - position % _SECTOR_BYTES, end - position)
        pieces.append(read_damaged(data, step, position))
        position += step
    return b"".join(pieces)


def rebuild_rows(
    data: File,
    wanted: range,
    *,
    position: int,
    offset: int,
    size: int,
    hints: Buffer = b"",
    hinted_size: int = 0,
    last_index: int | None = None,
) -> bytearray:
    """Return packed rows of the entries with indexes in `wanted`, as many as can be rebuilt.

    The frame of the first entry begins at `position`, and its first record has `offset`; `data` has `size`
    bytes. `hints` are the rows of the index file from the first wanted entry on. Where a header is damaged or
    missing, an intact hint is used, for frames that end at or before `size`, or `hinted_size` if that is
    larger: the size that the file should have. Damaged entries without a hint get rows of `UNKNOWN_KIND`.

    The rows end early where the frames end, and at a damaged header after which there is no intact one of an
    entry up to `last_index` (by default the last wanted).
    """
    headers = _Headers(data, size)
    rows = bytearray()
    index, last = wanted.start, wanted.stop - 1
    furthest = last if last_index is None else last_index
    believed = max(size, hinted_size)
    while index <= last and position + HEADER_SIZE <= believed:
        row = headers.index_entry(position, index) if position + HEADER_SIZE <= size else None
        if row is None:
            row = _entry_from_index(hints, index - wanted.start, index, position)
        if row is not None and position + row.size <= believed:
            rows += packed(row)
            position, offset, index = position + row.size, row.next_offset, index + 1
            continue
        found = headers.search(position + 1, range(index + 1, furthest + 1))
        if found is None:
            break
        rows += _fill_gap(index, position, offset, found)
        position, offset, index = found.position, found.base_offset, found.index
    return rows[: len(wanted) * ROW_SIZE]


def packed(row: IndexEntry) -> bytes:
    """Return the index entry as a packed row."""
    return pack_row(
        row.term,
        row.base_offset,
        row.position,
        row.append_time_ms,
        row.tag_mask,
        row.count,
        row.size,
        row.kind,
    )


def _entry_from_index(hints: Buffer, slot: int, index: int, position: int) -> IndexEntry | None:
    """Return the entry in row `slot` of the index file; None unless it is intact and names `position`."""
    if not row_is_whole(hints, slot):
        return None
    row = unpack_row(hints, slot, index)
    return row if row.position == position else None


def _fill_gap(index: int, position: int, offset: int, found: IndexEntry) -> bytes:
    """Return rows for the damaged entries from `index` up to `found`, the next intact one.

    Their terms are unknown (0). The first row has all bytes and all records of the gap, the others none, so
    that a reader that skips the first continues at the right offset. Their append time is that of `found`,
    as times never go back along a log.
    """
    time_ms = found.append_time_ms
    count = min(max(found.base_offset - offset, 0), _MOST_RECORDS)
    rows = pack_row(0, offset, position, time_ms, 0, count, found.position - position, UNKNOWN_KIND)
    empty = pack_row(0, found.base_offset, found.position, time_ms, 0, 0, 0, UNKNOWN_KIND)
    return rows + empty * (found.index - index - 1)


def missing_rows(before: IndexEntry, count: int, next_offset: int) -> bytes:
    """Return `count` placeholder rows (UNKNOWN_KIND, size 0) for entries missing after `before`.

    The first row has all their records, up to `next_offset`, as far as a row can hold the number; the rest go
    into the rows after it. So each of these offsets belongs to the gap, and not to the entry after it.
    """
    position, time_ms = before.position + before.size, before.append_time_ms
    offset = before.next_offset
    rows = bytearray()
    while offset < next_offset and count:
        records = min(next_offset - offset, _MOST_RECORDS)
        rows += pack_row(0, offset, position, time_ms, 0, records, 0, UNKNOWN_KIND)
        offset, count = offset + records, count - 1
    return bytes(rows) + pack_row(0, offset, position, time_ms, 0, 0, 0, UNKNOWN_KIND) * count


# Chunks


def load_chunk(chunk: Chunk) -> bytes:
    """Return a chunk's rows from the index file, rebuilt from the frames if they are damaged or missing.

    Raises:
        DiskError: The files cannot be read.
    """
    rows = chunk.file.read_rows(chunk.slot, chunk.count)
    if whole_rows(rows, chunk.count) == chunk.count:
        return rows
    return _rebuild_chunk(chunk, rows)


def check_chunk(chunk: Chunk, row: IndexEntry) -> bytes | None:
    """Compare `row`, one of the chunk's, with the frame at its position; return rebuilt rows if it is wrong.

    They are the rows of the whole chunk. None if the row is right, and also if the frame's header is damaged
    or missing: then the row is all that is known of the entry.
    """
    try:
        data = chunk.file.data()
    except DiskError as error:
        if not error.is_damage:
            raise
        return None
    if is_header_of(read_damaged(data, HEADER_SIZE, row.position), row):
        return None
    rows = _rebuild_chunk(chunk, chunk.file.read_rows(chunk.slot, chunk.count))
    slot = row.index - chunk.first_index
    return None if unpack_row(rows, slot, row.index) == row else rows


def _rebuild_chunk(chunk: Chunk, hints: Buffer) -> bytes:
    """Rebuild a chunk's rows from the frames, write them to the index file, and return them."""
    data = chunk.file.data()
    size = min(chunk.size, data.size())
    anchor = _first_known(chunk, _Headers(data, size))
    wanted = chunk.first_index + chunk.count
    if anchor is None:
        first, position, offset = chunk.file.first_index, 0, _first_offset(data)
    else:
        first, position, offset = anchor.index + 1, anchor.position + anchor.size, anchor.next_offset
    before = chunk.first_index - first
    if before:
        hints = chunk.file.read_rows(first - chunk.file.first_index, before + chunk.count)
    rows = rebuild_rows(
        data,
        range(first, wanted),
        position=position,
        offset=offset,
        size=size,
        hints=hints,
        hinted_size=chunk.size,
        last_index=chunk.last_index,
    )
    missing = wanted - first - len(rows) // ROW_SIZE
    if missing:
        count = len(rows) // ROW_SIZE
        end = unpack_row(rows, count - 1, first + count - 1) if count else anchor
        end = end or IndexEntry(first - 1, 0, offset, 0, position, 0, 0, UNKNOWN_KIND, 0)
        rows += missing_rows(end, missing, chunk.next_offset)
    chunk.file.mend_rows(first - chunk.file.first_index, bytes(rows), truncations=chunk.truncations)
    return bytes(rows[before * ROW_SIZE :])


def _first_offset(data: File) -> int:
    row = _Headers(data, HEADER_SIZE).at(0)
    return _BASE_OFFSET.unpack_from(row)[0] if len(row) == HEADER_SIZE else 0


def _first_known(chunk: Chunk, headers: _Headers) -> IndexEntry | None:
    """Return the nearest index entry before the chunk that agrees with its frame.

    None if there is none: then the scan must begin at the start of the file.
    """
    slot = chunk.slot - 1
    while slot >= 0:
        index = chunk.file.first_index + slot
        found = chunk.file.read_rows(slot, 1)
        if row_is_whole(found, 0):
            row = unpack_row(found, 0, index)
            if row.kind != UNKNOWN_KIND and is_header_of(headers.at(row.position), row):
                return row
        slot -= CHUNK_ROWS
    return None


def whole_index(file: SegmentFile, wanted: range, *, size: int, hinted_size: int, offset: int) -> bytearray:
    """Rebuild the index rows of a whole segment, with its index file as hints; return them packed.

    The arguments are those of `rebuild_rows`.
    """
    hints = file.read_rows(0, len(wanted))
    return rebuild_rows(
        file.data(), wanted, position=0, offset=offset, size=size, hints=hints, hinted_size=hinted_size
    )
