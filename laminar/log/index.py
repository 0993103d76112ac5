"""Rows of segments read back at a start, and made anew from the frames where an index file does not hold.

It decides which entries of a log are there and where they lie, behind the checkpoint; it changes nothing
on disk. Index files are hints: each row has its own checksum and must chain to the one before, else the
segment's frames are walked header by header, with whole rows as witnesses where a header is damaged.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from crc32c import crc32c

from laminar.log.disk import Disk, File
from laminar.log.rows import (
    HEADER,
    HEADER_CRC_POSITION,
    HEADER_SIZE,
    ROW_SIZE,
    UNKNOWN_KIND,
    Row,
    pack_row,
    row_is_whole,
    unpack_row,
)
from laminar.log.segment import INDEX_HEAD_SIZE, Segment, SegmentFile, index_head, index_name
from laminar.log.state import LogFiles

_BATCH_MAGIC = b"LMNB"
# A damaged header hides where the next frame begins; the search for it reads pieces of this size.
_SEARCH_BYTES = 1 << 20


@dataclass(slots=True)
class Loaded:
    """The segments of a log up to `last_index`.

    `stale` are segments on disk that belong to entries cut or dropped since. `short` says that entries the
    checkpoint names are missing at the end; `unknown` that some inside could not be identified.
    """

    segments: list[Segment] = field(default_factory=list)
    stale: list[SegmentFile] = field(default_factory=list)
    made_anew: list[Segment] = field(default_factory=list)
    short: bool = False
    unknown: bool = False


def load_segments(disk: Disk, files: LogFiles, *, last_index: int, goes_on: bool = False) -> Loaded:
    """Rows of the entries behind `files.start` up to `last_index`, as far as the segments hold them.

    `goes_on`: the last segment is to be continued, so it counts even if all it holds lies before the start.
    """
    loaded = Loaded()
    firsts = sorted(int(name[:-4]) for name in disk.list(files.directory) if _is_segment(name))
    files.made = bool(firsts) or disk.exists(files.directory)
    useful = [first for first in firsts if first <= last_index]
    for first in firsts:
        if first > last_index:
            loaded.stale.append(files.new_segment(first))
    for place, first in enumerate(useful):
        last = useful[place + 1] - 1 if place + 1 < len(useful) else last_index
        file = SegmentFile(disk, files.directory, first_index=first, log_id=files.log_id, exists=True)
        if last <= files.start.index and not (goes_on and last == last_index):
            loaded.stale.append(file)
            continue
        before = loaded.segments[-1] if loaded.segments else None
        if before is None and first > files.start.index + 1:
            break
        segment, anew = _load(disk, file, files.log_id, last, before)
        file.holds_rows(segment.count)
        if not segment.count:
            loaded.short = True
            loaded.stale.append(file)
            break
        loaded.segments.append(segment)
        if anew:
            loaded.made_anew.append(segment)
        loaded.unknown |= any(segment.row(index).kind == UNKNOWN_KIND for index in _indexes(segment, anew))
        if segment.last_index < last and place + 1 < len(useful):
            _fill(segment, last)
            loaded.unknown = True
    end = loaded.segments[-1].last_index if loaded.segments else files.start.index
    loaded.short |= end < last_index
    return loaded


def _is_segment(name: str) -> bool:
    return name.endswith(".log") and name[:-4].isdigit()


def _indexes(segment: Segment, anew: bool) -> range:
    return range(segment.first_index, segment.last_index + 1) if anew else range(0)


def _load(
    disk: Disk, file: SegmentFile, log_id: int, last: int, before: Segment | None
) -> tuple[Segment, bool]:
    """The segment up to entry `last`, and whether its rows were made anew from the frames."""
    wanted = last - file.first_index + 1
    size = file.data().size()
    rows = _read_index(disk, file, log_id, wanted)
    chain = _chain_length(rows, wanted)
    if chain == wanted:
        end = unpack_row(rows, wanted - 1, last)
        if end.position + end.size <= size:
            return Segment(file.first_index, file, rows), False
    start_offset = 0
    if before is not None:
        start_offset = before.row(before.last_index).next_offset
    return Segment(file.first_index, file, _walk(file, rows, wanted, size, start_offset)), True


def _read_index(disk: Disk, file: SegmentFile, log_id: int, wanted: int) -> bytearray:
    path = os.path.join(file.directory, index_name(file.first_index))
    if not disk.exists(path):
        return bytearray()
    index = disk.open(path)
    try:
        data = index.pread(INDEX_HEAD_SIZE + wanted * ROW_SIZE, 0)
    finally:
        index.close()
    if bytes(data[:INDEX_HEAD_SIZE]) != index_head(file.first_index, log_id):
        return bytearray()
    return bytearray(data[INDEX_HEAD_SIZE:])


def _chain_length(rows: bytearray, wanted: int) -> int:
    """How many rows from the first on are whole and follow each other."""
    position = offset = None
    with memoryview(rows) as view:
        for slot in range(min(wanted, len(rows) // ROW_SIZE)):
            row = unpack_row(view, slot, 0)
            if not row_is_whole(view, slot) or row.position != (position or 0):
                return slot
            if offset is not None and row.base_offset != offset:
                return slot
            position, offset = row.position + row.size, row.next_offset
    return min(wanted, len(rows) // ROW_SIZE)


def _walk(file: SegmentFile, hints: bytearray, wanted: int, size: int, offset: int) -> bytearray:
    """Rows made from the frames' headers; damaged headers are bridged by a whole hint or a search."""
    data = file.data()
    rows = bytearray()
    position = 0
    index = file.first_index
    last = file.first_index + wanted - 1
    while index <= last and position + HEADER_SIZE <= size:
        row = _row_at(data, position, index, size)
        if row is None:
            row = _hint(hints, index - file.first_index, index, position)
        if row is not None and position + row.size <= size:
            rows += _packed(row)
            position, offset, index = position + row.size, row.next_offset, index + 1
            continue
        found = _search(data, position + 1, size, range(index + 1, last + 1))
        if found is None:
            break
        rows += _bridge(index, position, offset, found)
        position, offset, index = found.position, found.base_offset, found.index
    return rows


def _packed(row: Row) -> bytes:
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


def _row_at(data: File, position: int, index: int | None, size: int) -> Row | None:
    """The row of the frame whose whole header lies at `position`; None if none does, or of another entry."""
    header = data.pread(HEADER_SIZE, position)
    if len(header) < HEADER_SIZE or bytes(header[:4]) != _BATCH_MAGIC:
        return None
    kind, _, found, term, _, base_offset, count, length, time_ms, tag_mask, checksum = HEADER.unpack_from(
        header
    )
    if crc32c(bytes(header[:HEADER_CRC_POSITION])) != checksum or (index is not None and found != index):
        return None
    if position + HEADER_SIZE + length > size:
        return None
    return Row(found, term, base_offset, count, position, HEADER_SIZE + length, time_ms, kind, tag_mask)


def _hint(hints: bytearray, slot: int, index: int, position: int) -> Row | None:
    """The index file's own row, where it is whole and agrees about the position."""
    if not row_is_whole(hints, slot):
        return None
    row = unpack_row(hints, slot, index)
    return row if row.position == position else None


def _search(data: File, position: int, size: int, wanted: range) -> Row | None:
    """The first whole header at `position` or behind it whose index is wanted."""
    while position < size:
        piece = bytes(data.pread(_SEARCH_BYTES, position))
        at = piece.find(_BATCH_MAGIC)
        while at >= 0:
            row = _row_at(data, position + at, None, size)
            if row is not None and row.index in wanted:
                return row
            at = piece.find(_BATCH_MAGIC, at + 1)
        position += max(len(piece) - len(_BATCH_MAGIC) + 1, 1)
    return None


def _bridge(index: int, position: int, offset: int, found: Row) -> bytes:
    """Rows for the damaged entries from `index` up to the one found behind them.

    Their terms are unknown (0). The first stands for all bytes and offsets between, so that a reader who
    skips it goes on at the right offset.
    """
    rows = pack_row(
        0,
        offset,
        position,
        0,
        0,
        max(found.base_offset - offset, 0),
        found.position - position,
        UNKNOWN_KIND,
    )
    empty = pack_row(0, found.base_offset, found.position, 0, 0, 0, 0, UNKNOWN_KIND)
    return rows + empty * (found.index - index - 1)


def _fill(segment: Segment, last: int) -> None:
    """Rows for entries that are missing at the end of a segment which has a successor."""
    end = segment.row(segment.last_index)
    missing = last - segment.last_index
    row = pack_row(0, end.next_offset, end.position + end.size, end.append_time_ms, 0, 0, 0, UNKNOWN_KIND)
    segment.rows += row * missing
